"""Advantages that differ from token to token of one completion.

What `advantages` says of all holds for these, but that there is one advantage a token, (N, T), and
that the order of the rows shows in the last bits. They read what the policy that sampled says of
each token:

* `old_logprobs`, (N, T), nats, and `mask`, (N, T) bool: of the completions' tokens, from the first;
* `alignment`, (N, T), nats: the logarithm of sum_v p(v)^2, as `token_terms` has it ("sampled").
"""

import torch
from torch import Tensor

from lit_align.losses.advantages import ADVANTAGES
from lit_align.losses.numerics import check_finite
from lit_align.losses.reward_table import RewardTable
from lit_align.ops import check_same_shape

# What float32 leaves of a certain token's energy, of either sign, is no surprise.
LEAST_ENERGY = 1e-6


@ADVANTAGES.register("optimal_token_baseline")
def optimal_token_baseline(
    rewards: Tensor, groups: Tensor, old_logprobs: Tensor, alignment: Tensor, mask: Tensor
) -> Tensor:
    """Rewards less a baseline of each position, in which completions count by their surprise.

        energy_t    = sum over s <= t of (1 - 2 p(token_s) + sum_v p_s(v)^2)
        baseline_t  = sum over the group of (energy_t * reward) / sum of energy_t
        advantage_t = reward - baseline_t, the group being those that have a token at t

    The energy is the squared norm of the log-probs' gradient by the logits, which stands for that
    by the weights; of all baselines that only know the position, this one leaves the gradient the
    least variance.

    Args:
        rewards: one per completion, (N,), reward units; NaN: unscored.
        groups: number of the group of each completion, (N,), integers.
        old_logprobs: under the policy that sampled, (N, T), nats.
        alignment: log of the sum of squared probabilities, (N, T), nats.
        mask: the completions' tokens, (N, T) bool.

    Returns:
        (N, T), reward units; 0 outside the mask, and where a completion is alone at its position.

    Raises:
        ValueError: if the shapes differ, groups are not integers, a reward is infinite, or a number
            on the mask is not finite.

    Elsewhere:
        verl can give a completion that is alone at its position its reward (handle_zero_tail). Its
        tir_optimal_token_baseline is this one for completions of several turns.

    Source:
        Li et al. 2026, "The optimal token baseline", arXiv:2602.07078, the baseline with the proxy
        of logits; as verl has it.
    """
    check_same_shape(old_logprobs=old_logprobs, alignment=alignment, mask=mask)
    check_same_shape(rewards=rewards, rows=mask[:, 0])
    check_finite(mask, old_logprobs=old_logprobs, alignment=alignment)
    table = RewardTable.of(rewards.double(), groups)
    excess = table.returned(table.excess).unsqueeze(-1)
    counted = mask & ~rewards.isnan().unsqueeze(-1)
    steps = 1 - 2 * old_logprobs.double().exp() + alignment.double().exp()
    steps = steps.where(counted & (steps.abs() > LEAST_ENERGY), 0.0)
    energy = steps.cumsum(-1).where(counted, 0.0)
    total, weighted, members = (
        _over_group(values, groups) for values in (energy, energy * excess, counted.double())
    )
    plain = _over_group(excess.where(counted, 0.0), groups) / members.clamp(min=1)
    # Without any surprise nothing has a gradient, and any baseline does.
    baseline = (weighted / total.where(total > 0, 1.0)).where(total > 0, plain)
    found = (excess - baseline).where(counted & (members > 1), 0.0)
    return found.to(torch.promote_types(rewards.dtype, torch.float32))


def _over_group(values: Tensor, groups: Tensor) -> Tensor:
    """The sum over each completion's group, position by position, (N, T)."""
    _, group = torch.unique(groups, return_inverse=True)
    return torch.zeros_like(values).index_add(0, group, values)[group]
