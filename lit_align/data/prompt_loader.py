"""Prompts for validation, the same on any number of ranks."""

import math
from collections.abc import Iterator
from typing import TypedDict

from lit_align.data.loader import Replica
from lit_align.data.prompts import Prompt, PromptRows


class PromptBatch(TypedDict):
    """Some prompts of a rank, and which of them count."""

    prompts: list[Prompt]
    is_real: list[bool]


class PromptLoader:
    """Every prompt once over all ranks, in order.

    Batch j is cut from the rows at `j * batch_size * num_replicas`, and its prompts are dealt out
    to the ranks in turn. A rank that would get nothing of the last one is given a filler, which
    keeps the ranks in step and must not count: `is_real` is False for it.

    Args:
        rows: the prompts.
        batch_size: prompts of a batch on each rank.
        replica: this process among those that share the rows.
    """

    def __init__(
        self, rows: PromptRows, *, batch_size: int, replica: Replica | None = None
    ) -> None:
        self.rows = rows
        self.batch_size = batch_size
        self.replica = replica or Replica()

    def __len__(self) -> int:
        """Batches of each rank."""
        return math.ceil(len(self.rows) / self._stride)

    def __iter__(self) -> Iterator[PromptBatch]:
        for start in range(0, len(self.rows), self._stride):
            dealt = range(start, min(start + self._stride, len(self.rows)))
            own = dealt[self.replica.rank :: self.replica.num_replicas]
            yield PromptBatch(
                prompts=[self.rows[row] for row in own or dealt[:1]],
                is_real=[bool(own)] * max(len(own), 1),
            )

    @property
    def _stride(self) -> int:
        """Prompts of a batch over all ranks."""
        return self.batch_size * self.replica.num_replicas
