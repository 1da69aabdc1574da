"""Who does which share of a callback's work, and how all ranks come to know the outcome."""

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import TypeVar

import lightning as L
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lit_align.modules.window import replica

T = TypeVar("T")


def turns(trainer: L.Trainer, batches: Sequence[T]) -> Iterator[tuple[T, bool]]:
    """This rank's batches, as many as any rank has, each with whether it counts.

    Weights that are sharded are gathered by all ranks or by none; so a rank that is left without a
    batch runs one of the others' once more, which does not count.
    """
    rank, replicas = replica(trainer)
    for first in range(0, len(batches), replicas):
        yield batches[(first + rank) % len(batches)], first + rank < len(batches)


def from_all_ranks(trainer: L.Trainer, value: T) -> list[T]:
    """The value that each rank holds, in the order of the ranks."""
    if trainer.world_size == 1:
        return [value]
    values: list[T | None] = [None] * trainer.world_size
    torch.distributed.all_gather_object(values, value)
    return values  # type: ignore[return-value]  # every entry is filled


def from_all_replicas(trainer: L.Trainer, value: T) -> list[T]:
    """The value of each replica of the data, in their order; ranks that share one count once."""
    rank, _ = replica(trainer)
    return list(dict(sorted(from_all_ranks(trainer, (rank, value)), key=itemgetter(0))).values())


def sum_over_ranks(values: Tensor) -> Tensor:
    """The sum of what each rank holds, of one shape; all ranks together. One process: a copy."""
    total = values.clone()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(total)
    return total


def is_sharded(model: nn.Module) -> bool:
    """Whether each rank holds a piece of the weights only, so that all must run it together."""
    return any(isinstance(p, DTensor) for p in model.parameters())
