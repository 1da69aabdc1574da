"""Advantages: how much better a completion was than the others of its prompt.

Every function takes one reward per completion, (N,), and the number of its group, (N,), and
returns one advantage per completion. Which completions belong together is said by that number
alone: the order of the rows means nothing, and changes nothing.

What holds for all of them:

* A reward of NaN stands for a completion that nothing scored. It is left out of every mean and
  standard deviation, and its advantage is exactly 0.
* Where all rewards of a group agree, its advantages are exactly 0; so is that of the only scored
  completion of a group, which has nothing to be compared with.
* It is computed in float64 and returned as float32, or as float64 if the rewards are.
* The batch is what is passed: the rewards of all ranks, for the numbers of one process to be those
  of many.
"""

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from lit_align.errors import UserError
from lit_align.losses.variants import Range, Variants
from lit_align.ops import check_same_shape

ADVANTAGES = Variants(noun="advantage")


@dataclass(frozen=True)
class _ZeroOrOne:
    """The two corrections of a standard deviation that anyone takes."""

    def admits(self, value: object) -> bool:
        return not isinstance(value, bool) and value in (0, 1)

    def __str__(self) -> str:
        return "0 or 1"


Ddof = Annotated[int, _ZeroOrOne()]
StdEps = Annotated[float, Range(above=0)]


@ADVANTAGES.register("group_mean")
def group_mean(rewards: Tensor, groups: Tensor) -> Tensor:
    """Rewards centred by group.

        advantage = reward - mean of the group

    Args:
        rewards: one per completion, (N,), reward units; NaN: unscored.
        groups: number of the group of each completion, (N,), integers.

    Returns:
        (N,), reward units.

    Raises:
        ValueError: if the shapes differ, groups are not integers, or a reward is infinite.

    Source:
        Liu et al. 2025 (Dr. GRPO), arXiv:2503.20783, section 3.2.
    """
    table = _Table.of(rewards, groups)
    return table.returned(table.centred)


@ADVANTAGES.register("group_mean_std")
def group_mean_std(
    rewards: Tensor, groups: Tensor, *, ddof: Ddof = 1, std_eps: StdEps = 1e-4
) -> Tensor:
    """Rewards centred and scaled by group.

        advantage = (reward - mean of the group) / (standard deviation of the group + std_eps)

    The paper says "std" and no more. With 8 completions, ddof 0 makes advantages 7 % larger than
    ddof 1. Of the projects, TRL and torchtune take ddof 1 and std_eps 1e-4, verl 1 and 1e-6, the
    authors of Dr. GRPO 1 and 1e-8, OpenRLHF 1 and 1e-9, open-instruct 0 and 1e-8.

    Args:
        rewards: one per completion, (N,), reward units; NaN: unscored.
        groups: number of the group of each completion, (N,), integers.
        ddof: what is subtracted from the number of rewards when squares are averaged: 0 for the
            deviation of the group, 1 for an estimate of the policy's.
        std_eps: added to the standard deviation, reward units, > 0. Differences between rewards
            that are smaller than this count for little.

    Returns:
        (N,), dimensionless.

    Raises:
        ValueError: if the shapes differ, groups are not integers, or a reward is infinite.

    Source:
        Shao et al. 2024 (DeepSeekMath), arXiv:2402.03300, section 4.1.2; ddof and std_eps: TRL.
    """
    table = _Table.of(rewards, groups)
    return table.returned(table.centred / (_std(table.rewards, ddof) + std_eps))


@ADVANTAGES.register("batch_std")
def batch_std(rewards: Tensor, groups: Tensor, *, ddof: Ddof = 1, std_eps: StdEps = 1e-4) -> Tensor:
    """Rewards centred by group and scaled by what the whole batch spreads.

        advantage = (reward - mean of the group) / (standard deviation of the batch + std_eps)

    A group in which nearly all completions agree is not blown up by its own small deviation. The
    deviation is that of the rewards themselves, around their mean over the batch, as in TRL.

    Args:
        rewards: one per completion, (N,), reward units; NaN: unscored.
        groups: number of the group of each completion, (N,), integers.
        ddof: what is subtracted from the number of rewards when squares are averaged, 0 or 1.
        std_eps: added to the standard deviation, reward units, > 0.

    Returns:
        (N,), dimensionless.

    Raises:
        ValueError: if the shapes differ, groups are not integers, or a reward is infinite.

    Source:
        Liu et al. 2025 (Lite PPO), arXiv:2508.08221; ddof and std_eps: TRL.
    """
    table = _Table.of(rewards, groups)
    batch = table.rewards.flatten().sort().values.unsqueeze(0)
    return table.returned(table.centred / (_std(batch, ddof) + std_eps))


@ADVANTAGES.register("leave_one_out")
def leave_one_out(rewards: Tensor, groups: Tensor) -> Tensor:
    """Rewards less the mean of the others of the group.

        advantage_i = reward_i - mean of reward_j, j != i

    It is n / (n - 1) times what `group_mean` gives a group of n scored completions.

    Args:
        rewards: one per completion, (N,), reward units; NaN: unscored.
        groups: number of the group of each completion, (N,), integers.

    Returns:
        (N,), reward units.

    Raises:
        ValueError: if the shapes differ, groups are not integers, or a reward is infinite.

    Source:
        Ahmadian et al. 2024 (RLOO), arXiv:2402.14740; Kool et al. 2019, "Buy 4 REINFORCE
        samples, get a baseline for free".
    """
    table = _Table.of(rewards, groups)
    scored = _count(table.rewards)
    return table.returned(table.centred * scored / (scored - 1).clamp(min=1))


class _Table(NamedTuple):
    """Rewards laid out by group, P groups of at most G, whatever order they came in.

    Attributes:
        rewards: (P, G), float64, ascending; NaN at the end, for the unscored and where a group has
            fewer than G. Sorted, because a sum in floating point depends on its order.
        places: where each completion stands among the P * G, (N,).
        dtype: of what is returned.
    """

    rewards: Tensor
    places: Tensor
    dtype: torch.dtype

    @classmethod
    def of(cls, rewards: Tensor, groups: Tensor) -> "_Table":
        """From one row per completion."""
        _check(rewards, groups)
        _, group, sizes = torch.unique(groups, return_inverse=True, return_counts=True)
        order = rewards.argsort(stable=True)
        order = order[group[order].argsort(stable=True)]
        starts = (sizes.cumsum(0) - sizes)[group[order]]
        width = max(sizes.tolist(), default=0)
        places = torch.empty_like(group)
        places[order] = (
            group[order] * width + torch.arange(len(order), device=starts.device) - starts
        )
        table = torch.full((len(sizes) * width,), torch.nan).to(rewards.device, torch.float64)
        table[places] = rewards.detach().double()
        dtype = torch.promote_types(rewards.dtype, torch.float32)
        return cls(table.view(len(sizes), width), places, dtype)

    @property
    def centred(self) -> Tensor:
        """Rewards less the mean of their group, (P, G); NaN where there is no reward."""
        excess = _excess(self.rewards)
        return excess - excess.nansum(-1, keepdim=True) / _count(excess).clamp(min=1)

    def returned(self, advantages: Tensor) -> Tensor:
        """Back in the order of the completions: (P, G) to (N,); NaN becomes 0."""
        return advantages.nan_to_num(nan=0.0).flatten()[self.places].to(self.dtype)


def _check(rewards: Tensor, groups: Tensor) -> None:
    """Raise ValueError for what cannot be a reward or a group's number."""
    check_same_shape(rewards=rewards, groups=groups)
    if rewards.dim() != 1 or groups.is_floating_point():
        raise ValueError(
            f"rewards and groups must be (N,), groups integers: "
            f"not {tuple(rewards.shape)} and {groups.dtype}"
        )
    if rewards.isinf().any():
        row = int(rewards.isinf().nonzero()[0])
        raise UserError(
            f"the reward of completion {row} is {rewards[row].item()}: rewards must be finite "
            "numbers, or NaN for a completion that is not to be scored"
        )


def _excess(table: Tensor) -> Tensor:
    """Each row less its lowest value, which stands first: where all agree, 0 and not a rounding."""
    return table - table[:, :1]


def _count(table: Tensor) -> Tensor:
    """How many of each row are scored, (P, 1)."""
    return (~table.isnan()).sum(-1, keepdim=True)


def _std(table: Tensor, ddof: float) -> Tensor:
    """Standard deviation of each row of an ascending table, (P, 1); 0 where it has no meaning."""
    excess, count = _excess(table), _count(table)
    mean = excess.nansum(-1, keepdim=True) / count.clamp(min=1)
    squares = (excess - mean).square().nansum(-1, keepdim=True)
    return (squares / (count - ddof).clamp(min=1)).sqrt()
