"""Advantages that compare a completion with its group, or its prompt, otherwise than by its mean.

What `advantages` says of all holds for these: NaN is left out, and a group that agrees has
advantages of exactly 0 (`remax` looks at no group).
"""

import torch
from torch import Tensor

from lit_align.losses.advantages import ADVANTAGES, Ddof, StdEps
from lit_align.losses.reward_table import RewardTable, deviation
from lit_align.ops import check_same_shape


@ADVANTAGES.register("length_weighted")
def length_weighted(rewards: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    """Rewards less a mean in which long completions count for more.

        advantage = reward - sum over the group of (length * reward) / sum of length

    Of the baselines that are one number for all, it is the one of least variance if a gradient's
    square grows with the number of tokens.

    Args:
        rewards: one per completion, (N,), reward units; NaN: unscored.
        groups: number of the group of each completion, (N,), integers.
        lengths: tokens of each completion, (N,), >= 0.

    Returns:
        (N,), reward units.

    Raises:
        ValueError: if the shapes differ, groups are not integers, or a reward is infinite.

    Source:
        Hao et al. 2025 (OPO), arXiv:2505.23585, the length-weighted baseline.
    """
    check_same_shape(rewards=rewards, lengths=lengths)
    table = RewardTable.of(rewards, groups)
    weights = table.laid_out(lengths).where(~table.rewards.isnan(), 0.0)
    # A group of empty completions has no tokens for a baseline to matter to.
    total = weights.sum(-1, keepdim=True)
    baseline = (weights * table.excess).nansum(-1, keepdim=True) / total.where(total > 0, 1.0)
    return table.returned(table.excess - baseline)


@ADVANTAGES.register("best_of_group")
def best_of_group(rewards: Tensor, groups: Tensor) -> Tensor:
    """What the best completion adds to the best of the others: the policy gradient of pass@k.

        advantage = largest reward - second largest, for the best completion of the group; else 0

    The group is the k tries: leaving one out changes their maximum only if it is the best one.

    Args:
        rewards: one per completion, (N,), reward units; NaN: unscored.
        groups: number of the group of each completion, (N,), integers.

    Returns:
        (N,), reward units, >= 0; 0 for all where the best two tie.

    Raises:
        ValueError: if the shapes differ, groups are not integers, or a reward is infinite.

    Source:
        Tang et al. 2025, arXiv:2503.19595, the leave-one-out form for a maximum of k.
    """
    table = RewardTable.of(rewards, groups)
    return table.returned(_best(table))


@ADVANTAGES.register("best_of_group_std")
def best_of_group_std(
    rewards: Tensor, groups: Tensor, *, ddof: Ddof = 1, std_eps: StdEps = 1e-6
) -> Tensor:
    """`best_of_group`, scaled by the standard deviation of the group.

    Args:
        rewards: one per completion, (N,), reward units; NaN: unscored.
        groups: number of the group of each completion, (N,), integers.
        ddof: what is subtracted from the number of rewards when squares are averaged, 0 or 1.
        std_eps: added to the standard deviation, reward units, > 0.

    Returns:
        (N,), dimensionless, >= 0.

    Raises:
        ValueError: if the shapes differ, groups are not integers, or a reward is infinite.

    Source:
        As `best_of_group`; the deviation, ddof and std_eps: verl, grpo_passk.
    """
    table = RewardTable.of(rewards, groups)
    return table.returned(_best(table) / (deviation(table.rewards, ddof) + std_eps))


@ADVANTAGES.register("mean_relative")
def mean_relative(rewards: Tensor, groups: Tensor) -> Tensor:
    """Rewards as multiples of their group's mean: hard prompts count for more.

        advantage = (reward - mean of the group) / mean of the group, 0 where the mean is not > 0

    For rewards of 0 or 1 the mean estimates how often a prompt is solved, and this is the gradient
    of the logarithm of that: of the likelihood of a right answer, where `group_mean` is that of the
    expected number of right ones.

    Args:
        rewards: one per completion, (N,), reward units, usually >= 0; NaN: unscored.
        groups: number of the group of each completion, (N,), integers.

    Returns:
        (N,), dimensionless.

    Raises:
        ValueError: if the shapes differ, groups are not integers, or a reward is infinite.

    Source:
        MaxRL 2026, arXiv:2602.02710, the estimator, as prime-rl has it.
    """
    table = RewardTable.of(rewards, groups)
    mean = table.rewards.nansum(-1, keepdim=True) / table.scored.clamp(min=1)
    return table.returned((table.centred / mean.where(mean > 0, 1.0)).where(mean > 0, 0.0))


@ADVANTAGES.register("remax")
def remax(rewards: Tensor, greedy_rewards: Tensor) -> Tensor:
    """Rewards less that of the prompt's greedy completion.

        advantage = reward - greedy_reward

    Args:
        rewards: one per completion, (N,), reward units; NaN: unscored.
        greedy_rewards: of the greedy completion of each completion's prompt, (N,), reward units;
            without a KL, as it is a constant to the completions. NaN: unscored.

    Returns:
        (N,), reward units; 0 where either is unscored.

    Raises:
        ValueError: if the shapes differ, or a reward is infinite.

    Source:
        Li et al. 2023 (ReMax), arXiv:2310.10505, the gradient estimator.
    """
    check_same_shape(rewards=rewards, greedy_rewards=greedy_rewards)
    table = RewardTable.of_one(rewards)
    return table.returned(table.rewards - table.laid_out(greedy_rewards))


def _best(table: RewardTable) -> Tensor:
    """The lead of the best of each group over the second best at the place of the best, (P, G)."""
    best = torch.zeros_like(table.rewards)
    at = (table.scored - 1).clamp(min=0)
    second = table.rewards.gather(-1, (at - 1).clamp(min=0))
    return best.scatter(-1, at, table.rewards.gather(-1, at) - second)
