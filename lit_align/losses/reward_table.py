"""Rewards laid out by group, and what advantages count of them.

A reward of NaN stands for a completion that nothing scored: it is in no mean, in no deviation and
in no count.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lit_align.errors import UserError
from lit_align.ops import check_same_shape


class RewardTable(NamedTuple):
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
    def of(cls, rewards: Tensor, groups: Tensor) -> "RewardTable":
        """From one row per completion.

        Raises:
            ValueError: if the shapes differ, groups are not integers, or a reward is infinite.
        """
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

    @classmethod
    def of_one(cls, rewards: Tensor) -> "RewardTable":
        """Of completions that are all of one group: the batch, (1, N)."""
        groups = torch.zeros(rewards.shape, dtype=torch.int64, device=rewards.device)
        return cls.of(rewards, groups)

    @property
    def excess(self) -> Tensor:
        """Rewards less the lowest of their group, (P, G); where all agree, exactly 0."""
        return excess(self.rewards)

    @property
    def centred(self) -> Tensor:
        """Rewards less the mean of their group, (P, G); NaN where there is no reward."""
        return self.excess - self.excess.nansum(-1, keepdim=True) / self.scored.clamp(min=1)

    @property
    def scored(self) -> Tensor:
        """How many of each group are scored, (P, 1)."""
        return count(self.rewards)

    def laid_out(self, values: Tensor) -> Tensor:
        """Other numbers of the completions where their rewards stand, (N,) to (P, G), float64."""
        table = torch.zeros_like(self.rewards).flatten()
        table[self.places] = values.double()
        return table.view(self.rewards.shape)

    def returned(self, advantages: Tensor) -> Tensor:
        """Back in the order of the completions: (P, G) to (N,); NaN becomes 0."""
        return advantages.nan_to_num(nan=0.0).flatten()[self.places].to(self.dtype)


def excess(table: Tensor) -> Tensor:
    """Each row less its lowest value, which stands first: where all agree, 0 and not a rounding."""
    return table - table[:, :1]


def count(table: Tensor) -> Tensor:
    """How many of each row are numbers, (P, 1)."""
    return (~table.isnan()).sum(-1, keepdim=True)


def deviation(table: Tensor, ddof: float) -> Tensor:
    """Standard deviation of each row of an ascending table, (P, 1); 0 where it has no meaning."""
    above, scored = excess(table), count(table)
    mean = above.nansum(-1, keepdim=True) / scored.clamp(min=1)
    squares = (above - mean).square().nansum(-1, keepdim=True)
    return (squares / (scored - ddof).clamp(min=1)).sqrt()


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
