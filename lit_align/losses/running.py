"""Numbers that a loss remembers from one optimizer step to the next.

A loss names such a number among the tensors that may be missing, and reads what the steps before
the present one have made of it; without any it is 0. Here is the arithmetic. Whoever trains keeps
the states, adds up the moments of an optimizer step over its micro-batches and ranks, and changes
the states once a step, so that they do not depend on how the step was cut.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Running:
    """One number: of what, and how it goes on.

    Args:
        values: from a config and what its loss says of some rows to the values it is made of.
        after: from a state and the moments of an optimizer step, with a config, to the next state.
        read: from a state to the number.
        start: the state before the first step, (S,), float64.
    """

    values: Callable[[Any, Any], Tensor]
    after: Callable[[Tensor, Tensor, Any], Tensor]
    read: Callable[[Tensor], Tensor]
    start: Tensor


def moments(values: Tensor) -> Tensor:
    """How many values there are, their sum and that of their squares, (3,), float64, on the CPU.

    Those of two samples together are the sum of theirs.
    """
    given = values.detach().flatten().double().cpu()
    return torch.stack([torch.tensor(len(given)).double(), given.sum(), given.square().sum()])


def mean_of(sums: Tensor) -> Tensor:
    """The mean that moments tell of, (); of no values 0."""
    return sums[1] / sums[0].clamp(min=1)


def std_of(sums: Tensor) -> Tensor:
    """The standard deviation that moments tell of, unbiased, (); of fewer than two values 0."""
    squares = (sums[2] - sums[1] * mean_of(sums)).clamp(min=0)
    return (squares / (sums[0] - 1).clamp(min=1)).sqrt()


def exponential(before: Tensor, now: Tensor, momentum: float) -> Tensor:
    """An exponential mean one step on: momentum * before + (1 - momentum) * now."""
    return momentum * before + (1 - momentum) * now


def _rewards(config: Any, found: Any) -> Tensor:
    """All rewards that a loss tells of, whichever responses they are of."""
    return torch.cat([value for name, value in found._asdict().items() if "rewards" in name])


def _leads(config: Any, pair: Any) -> Tensor:
    """By how much log-ratios of preferred responses are above those of the others, nats."""
    leads: Tensor = (pair.chosen_rewards - pair.rejected_rewards).double() / config.beta
    return leads


# The mean over everything seen so far: its state is how much that was, and its sum.
CUMULATIVE_MEAN = Running(
    values=_rewards,
    after=lambda state, sums, config: state + sums[:2],
    read=lambda state: state[1] / state[0].clamp(min=1),
    start=torch.zeros(2, dtype=torch.float64),
)
EXPONENTIAL_MEAN = Running(
    values=_leads,
    after=lambda state, sums, config: exponential(state, mean_of(sums), config.momentum),
    read=lambda state: state[0],
    start=torch.zeros(1, dtype=torch.float64),
)
EXPONENTIAL_STD = Running(
    values=_leads,
    after=lambda state, sums, config: exponential(state, std_of(sums), config.momentum),
    read=lambda state: state[0],
    start=torch.zeros(1, dtype=torch.float64),
)

# By the name of the tensor that a loss reads.
RUNNING: Mapping[str, Running] = MappingProxyType(
    {"delta": CUMULATIVE_MEAN, "lead_mean": EXPONENTIAL_MEAN, "lead_std": EXPONENTIAL_STD}
)
