"""Batches in an order that can be taken up again anywhere, the same on any number of ranks.

Lightning takes any sized iterable with a state for a resumable loader. A plain `DataLoader` would
start its epoch anew after a resume; an unsized iterable would be read one batch ahead.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from lit_align.errors import UserError
from lit_align.rollout import with_window

# Of the values, only `window` is no tensor: a list of batches.
Batch = dict[str, Any]
Rows = Sequence[int]


class SizedRows(Protocol):
    """A data set with a length and rows by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Any: ...


@dataclass(frozen=True)
class Replica:
    """Which of the processes that share the rows this one is."""

    rank: int = 0
    num_replicas: int = 1


def no_loaders() -> list[Any]:
    """What a data module without validation data gives to Lightning, which is told it is meant."""
    warnings.filterwarnings("ignore", "Total length of `list` across ranks is zero")
    return []


class PairLoader:
    """Every row exactly once an epoch over all ranks, in batches that know their window.

    The order of the rows is a function of seed and epoch alone. Micro-batch j is cut from it at
    `j * batch_size * num_replicas`, and its rows are dealt out to the ranks in turn; the last one
    may be smaller. A rank that would get nothing of it is given a filler row, which keeps the
    ranks in step and must not count.

    To what `collate` makes, each batch adds

    * `pair_mask` (B,) bool: False for a filler row;
    * `window_pairs` () float32: the pairs, over all ranks, of the optimizer step that the batch
      belongs to. Steps are counted as Lightning does: `accumulate` micro-batches, and fewer where
      the epoch or `limit_batches` ends;
    * `window`, if `whole_window`, in the first batch of a step that has other batches or other
      ranks: all batches of the step on this rank, in order, itself included.

    Args:
        rows: the data set.
        collate: from a list of rows to a batch with an `index` (B,); picklable.
        batch_size: rows of a micro-batch on each rank.
        seed: of the order; the global random state is left alone.
        shuffle: False: the rows in their order, every epoch.
        num_workers: processes that read and collate ahead.
        replica: this process among those that share the rows.
        epoch: to begin with.
        accumulate: micro-batches of an optimizer step, or a function that knows when asked.
        limit_batches: micro-batches of an epoch (int) or share of them (float), or a function.
        whole_window: whether a step is looked at as a whole before its first batch is trained on,
            or a function that knows when asked.
    """

    def __init__(  # noqa: PLR0913 - what is read, and how
        self,
        rows: SizedRows,
        collate: Callable[[list[Any]], Batch],
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        num_workers: int = 0,
        replica: Replica | None = None,
        epoch: int = 0,
        accumulate: int | Callable[[], int] = 1,
        limit_batches: float | Callable[[], float] = 1.0,
        whole_window: bool | Callable[[], bool] = False,
    ) -> None:
        self.rows = rows
        self.collate = collate
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.num_workers = num_workers
        self.replica = replica or Replica()
        self.epoch = epoch
        self.accumulate = accumulate
        self.limit_batches = limit_batches
        self.whole_window = whole_window
        self._done = 0
        self._resume_at = 0
        self._accumulated: int | None = None

    def __len__(self) -> int:
        """Micro-batches of an epoch, before any limit."""
        return math.ceil(len(self.rows) / self._stride)

    def __iter__(self) -> Iterator[Batch]:
        """An epoch from its start, or, once after `load_state_dict`, the rest of it."""
        # In a generator nothing happens before the first batch is asked for: Lightning calls
        # iter() early and more than once, and callbacks may set `accumulate` in between.
        first, self._resume_at = self._resume_at, 0
        last = self._epoch_batches()
        if first >= last:
            self.epoch, first = self.epoch + 1, 0
        self._refuse_half_a_step(first)
        collated = self._collated(self._order(self.epoch), first, last)
        done = first
        while done < last:
            for batch in self._window(collated, done, last):
                # Lightning never asks a sized loader for more than its batches: what must have
                # happened by the end of the epoch happens before its last batch is handed over.
                done += 1
                self._done = done % last
                self.epoch += done == last
                yield batch

    def first_rows(self, batches: float, epochs: float = math.inf) -> list[int]:
        """Row numbers that a run reads on all ranks until it ends, in order.

        Args:
            batches: micro-batches of the run, counted from its first epoch; may be infinite.
            epochs: after which it ends at the latest; may be infinite.
        """
        rows: set[int] = set()
        epoch, taken = 0, self._epoch_batches()
        while taken and batches > 0 and epoch < epochs and len(rows) < len(self.rows):
            rows.update(self._order(epoch)[: self._rows_before(int(min(batches, taken)))])
            if not self.shuffle:
                break
            batches, epoch = batches - taken, epoch + 1
        return sorted(rows)

    def state_dict(self) -> dict[str, int]:
        """Where the next batch begins: plain numbers, the same on all ranks."""
        return {
            "epoch": self.epoch,
            "rows_seen": self._rows_before(self._done),
            "rows": len(self.rows),
            "seed": self.seed,
            "shuffle": int(self.shuffle),
            "rows_at_once": self._stride,
            "accumulate": self._accumulate(),
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from there, after an epoch with larger batches or on more ranks if need be.

        Raises:
            UserError: if the rows or their order are others, or Lightning would go on counting
                batches that are others.
        """
        ours = self.state_dict()
        for name in ("rows", "seed", "shuffle"):
            if state[name] != ours[name]:
                raise UserError(
                    f"cannot resume: the checkpoint was written with {name}={state[name]} in the "
                    f"data, not {ours[name]}; resume with the same data, seed and shuffling"
                )
        self._check_sizes(state)
        self.epoch = state["epoch"]
        self._done = self._resume_at = self._position(state)
        self._accumulated = state.get("accumulate")

    def _check_sizes(self, state: Mapping[str, int]) -> None:
        """Refuse what would make other micro-batches than Lightning goes on counting."""
        seen, theirs = state["rows_seen"], state.get("rows_at_once", self._stride)
        if "micro_batches" in state:
            raise UserError(
                "cannot resume: the checkpoint's run cut its steps by tokens: repeat its "
                "data.max_tokens_per_batch"
            )
        # Its counter starts anew only where that is past the end of an epoch.
        if self._stride != theirs and (seen or (state["epoch"] and self._stride < theirs)):
            raise UserError(
                f"cannot resume with {self._stride} rows at a time (data.batch_size x ranks), "
                f"where the checkpoint's run read {theirs}: set data.batch_size so that it is "
                f"{theirs} again; only after an epoch it may be more"
            )

    def _position(self, state: Mapping[str, int]) -> int:
        """Micro-batches of the epoch that are done."""
        return state["rows_seen"] // self._stride

    @property
    def _stride(self) -> int:
        """Rows of a micro-batch over all ranks."""
        return self.batch_size * self.replica.num_replicas

    def _rows_before(self, number: int) -> int:
        """Rows of an epoch before a micro-batch."""
        return min(number * self._stride, len(self.rows))

    def _epoch_batches(self) -> int:
        """Micro-batches of an epoch, cut as Lightning cuts them."""
        limit = self.limit_batches() if callable(self.limit_batches) else self.limit_batches
        return min(len(self), limit) if isinstance(limit, int) else int(len(self) * limit)

    def _order(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(len(self.rows)))
        seed = (self.seed * 1_000_003 + epoch) % 2**63
        return torch.randperm(
            len(self.rows), generator=torch.Generator().manual_seed(seed)
        ).tolist()

    def _collated(self, order: list[int], first: int, last: int) -> Iterator[Batch]:
        """This rank's share of the micro-batches `first` to `last`."""
        shares = []
        for number in range(first, last):
            rows = order[self._rows_before(number) : self._rows_before(number + 1)]
            share = rows[self.replica.rank :: self.replica.num_replicas]
            shares.append(share or rows[:1])
        return self._read(shares)

    def _read(self, shares: Iterable[Rows]) -> Iterator[Batch]:
        """The rows of each share as a batch."""
        # Without a generator of its own, each epoch would draw from the global one.
        loader: DataLoader[Any] = DataLoader(
            self.rows,  # type: ignore[arg-type]
            batch_sampler=shares,  # type: ignore[arg-type]  # any iterable will do
            collate_fn=self.collate,
            num_workers=self.num_workers,
            generator=torch.Generator(),
        )
        return iter(loader)

    def _window(self, collated: Iterator[Batch], first: int, last: int) -> Iterator[Batch]:
        """The batches of an optimizer step from the micro-batch `first` on."""
        _, end = self._step_of(first, last)
        batches = (
            batch | self._stamps(batch, number, last)
            for number, batch in zip(range(first, end), collated, strict=False)
        )
        whole = self.whole_window() if callable(self.whole_window) else self.whole_window
        has_others = (end - first) * self.replica.num_replicas > 1
        return with_window(batches) if whole and has_others else batches

    def _step_of(self, number: int, last: int) -> tuple[int, int]:
        """The first micro-batch of the optimizer step that one belongs to, and the one after it."""
        accumulate = self._accumulate()
        start = number - number % accumulate
        return start, min(start + accumulate, last)

    def _accumulate(self) -> int:
        """Micro-batches of an optimizer step."""
        return self.accumulate() if callable(self.accumulate) else self.accumulate

    def _refuse_half_a_step(self, first: int) -> None:
        """Lightning counts the micro-batches of a step from the start of the epoch."""
        theirs, self._accumulated = self._accumulated, None
        if theirs not in (None, ours := self._accumulate()) and first % ours:
            raise UserError(
                f"cannot resume after {first} micro-batches of an epoch with "
                f"trainer.accumulate_grad_batches={ours}, which does not divide them: take "
                f"{theirs}, as the checkpoint's run had, or a checkpoint from the end of an epoch"
            )

    def _stamps(self, batch: Batch, number: int, last: int) -> Batch:
        start, end = self._step_of(number, last)
        pairs = self._rows_before(end) - self._rows_before(start)
        rows = self._rows_before(number + 1) - self._rows_before(number)
        is_real = self.replica.rank < rows
        return {
            "pair_mask": torch.full(batch["index"].shape, is_real),
            "window_pairs": torch.tensor(float(pairs)),
        }
