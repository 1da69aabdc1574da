"""Advantages that are normalised over the whole batch: over its completions, or over its tokens.

What `advantages` says of all holds for these, but where a mean over the batch is subtracted, a
group that agrees is not at 0.
"""

import torch
from torch import Tensor

from lit_align.errors import UserError
from lit_align.losses.advantages import ADVANTAGES, Ddof, StdEps, group_mean_std
from lit_align.losses.reward_table import RewardTable, deviation
from lit_align.ops import check_same_shape

# Below this a variance over the batch is taken for rounding; OpenRLHF's floor, and nearly verl's.
LEAST_VARIANCE = 1e-8


@ADVANTAGES.register("reinforce_pp")
def reinforce_pp(rewards: Tensor, lengths: Tensor, *, ddof: Ddof = 0) -> Tensor:
    """Rewards, normalised over all tokens of the batch.

        advantage = (reward - mean) / standard deviation, both over tokens: a completion counts as
        often as it has tokens

    No completion is compared with its group, so that one for each prompt is enough. Returns are not
    discounted, as in the paper's experiments.

    Args:
        rewards: one per completion, (N,), reward units; NaN: unscored.
        lengths: tokens of each completion, (N,), >= 0.
        ddof: what is subtracted from the number of tokens when squares are averaged; 0 in the
            authors' code, 1 in verl.

    Returns:
        (N,), dimensionless.

    Raises:
        ValueError: if the shapes differ, or a reward is infinite.

    Elsewhere:
        verl estimates the variance without bias, and both discount if told to.

    Source:
        Hu et al. 2025 (REINFORCE++), arXiv:2501.03262, the normalised
        advantage; the floor under the variance:
        OpenRLHF, which the authors maintain.
    """
    table = RewardTable.of_one(rewards)
    return table.returned(_whitened(table, table.excess, lengths, ddof))


@ADVANTAGES.register("reinforce_pp_baseline")
def reinforce_pp_baseline(
    rewards: Tensor, groups: Tensor, lengths: Tensor, *, ddof: Ddof = 0
) -> Tensor:
    """Rewards centred by group, then normalised over all tokens of the batch.

        advantage = (c - mean of c) / standard deviation of c, c = reward - mean of the group

    Mean and deviation are over tokens: a completion counts as often as it has tokens.

    Args:
        rewards: one per completion, (N,), reward units; NaN: unscored.
        groups: number of the group of each completion, (N,), integers.
        lengths: tokens of each completion, (N,), >= 0.
        ddof: what is subtracted from the number of tokens when squares are averaged; 0 in the
            authors' code, 1 in verl.

    Returns:
        (N,), dimensionless.

    Raises:
        ValueError: if the shapes differ, groups are not integers, or a reward is infinite.

    Source:
        Hu et al. 2025 (REINFORCE++), arXiv:2501.03262, "w/ baseline"; as `reinforce_pp`.
    """
    table = RewardTable.of(rewards, groups)
    return table.returned(_whitened(table, table.centred, lengths, ddof))


@ADVANTAGES.register("gpg")
def gpg(rewards: Tensor, groups: Tensor) -> Tensor:
    """Rewards centred by group, made larger by as much as groups without signal make them smaller.

        advantage = (reward - mean of the group) * B / (B - M)

    B completions are scored, and M of them are in groups whose rewards all agree. Where such groups
    are left out beforehand, this is `group_mean`.

    Args:
        rewards: one per completion, (N,), reward units; NaN: unscored.
        groups: number of the group of each completion, (N,), integers.

    Returns:
        (N,), reward units.

    Raises:
        ValueError: if the shapes differ, groups are not integers, or a reward is infinite.

    Elsewhere:
        verl divides by the number of rewards that are not 0: it leaves out wrong answers beside
        right ones, and keeps groups that are all right.

    Source:
        Chu et al. 2025 (GPG), arXiv:2504.02546, eq. 6 with F_norm = 1, and eq. 7.
    """
    table = RewardTable.of(rewards, groups)
    varied = (table.excess > 0).any(-1, keepdim=True)
    teaching = (table.scored * varied).sum().clamp(min=1)
    return table.returned(table.centred * table.scored.sum() / teaching)


@ADVANTAGES.register("gdpo")
def gdpo(
    rewards_by_name: Tensor,
    reward_weights: Tensor,
    groups: Tensor,
    *,
    ddof: Ddof = 1,
    std_eps: StdEps = 1e-4,
) -> Tensor:
    """Each reward scaled by group on its own, then their weighted sum scaled over the batch.

        z_k = `group_mean_std` of reward k;  s = sum over k of reward_weights_k * z_k
        advantage = s / (standard deviation of s over the batch + std_eps)

    A sum of rewards gives 1 + 0 and 0 + 1 the same advantage, even where one is rare and the other
    common; here each has a scale of its own. The mean of s over the batch, which the paper
    subtracts, is 0: z_k sums to 0 in every group.

    Args:
        rewards_by_name: K rewards of each completion, (N, K), reward units; NaN: does not apply.
        reward_weights: of each in the sum, (K,).
        groups: number of the group of each completion, (N,), integers.
        ddof: what is subtracted from a number when squares are averaged, 0 or 1; of both steps.
        std_eps: added to standard deviations, > 0; of both steps.

    Returns:
        (N,), dimensionless; 0 where no reward applies.

    Raises:
        ValueError: if the shapes differ, groups are not integers, or a reward is infinite.

    Source:
        Liu et al. 2026 (GDPO), arXiv:2601.05242, the three steps, over completions as
        in the authors' fork of TRL (their fork of verl: over tokens); ddof and std_eps: TRL.
    """
    if rewards_by_name.shape[1:] != reward_weights.shape or reward_weights.dim() != 1:
        raise UserError(
            "rewards_by_name must be (N, K) and reward_weights (K,): not "
            f"{tuple(rewards_by_name.shape)} and {tuple(reward_weights.shape)}"
        )
    columns = [
        weight * group_mean_std(column.double(), groups, ddof=ddof, std_eps=std_eps)
        for weight, column in zip(reward_weights.double(), rewards_by_name.unbind(1), strict=True)
    ]
    total = torch.stack([torch.zeros(groups.shape).to(groups.device).double(), *columns]).sum(0)
    # Unscored are those to whom nothing applied.
    total = total.masked_fill(rewards_by_name.isnan().all(1), torch.nan)
    table = RewardTable.of_one(total)
    scaled = table.returned(table.rewards / (deviation(table.rewards, ddof) + std_eps))
    return scaled.to(torch.promote_types(rewards_by_name.dtype, torch.float32))


def _whitened(table: RewardTable, values: Tensor, lengths: Tensor, ddof: float) -> Tensor:
    """Values less their mean over all tokens, over their deviation there, (P, G)."""
    check_same_shape(rewards=table.places, lengths=lengths)
    scored = ~values.isnan()
    weights = table.laid_out(lengths).where(scored, 0.0)
    tokens = weights.sum()
    centred = values - (weights * values).nansum() / tokens.clamp(min=1)
    variance = (weights * centred.square()).nansum() / (tokens - ddof).clamp(min=1)
    return centred / variance.clamp(min=LEAST_VARIANCE).sqrt()
