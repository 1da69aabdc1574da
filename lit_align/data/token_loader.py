"""Optimizer steps cut by tokens: the same rows, in micro-batches that run about as much each."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import tee
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities import rank_zero_warn

from lit_align.data.loader import Batch, PairLoader, Rows, SizedRows
from lit_align.errors import UserError
from lit_align.logprobs import Item, Ways, balance, fill, tokens_of

# Of each micro-batch the rows of each rank; some may have none.
Window = list[list[list[int]]]

# Rows that are cut for trial to find out how many micro-batches a step needs: some seconds.
MOST_ROWS = 1_000_000


class StepCut:
    """How the rows of a step are spread over micro-batches and ranks.

    Rows of like many tokens stand together, those of the most first: if memory does not suffice,
    that shows at once.

    Args:
        lengths: tokens of prompt and answers of each row.
        ways: of the model in training.
        most_tokens: that a micro-batch runs; a row of more has one of its own.
        ranks: that share the work.
    """

    def __init__(
        self, lengths: Sequence[tuple[int, ...]], ways: Ways, most_tokens: int, ranks: int = 1
    ) -> None:
        self.items = [
            Item(row, prompt, tuple(answers)) for row, (prompt, *answers) in enumerate(lengths)
        ]
        self.tokens = [tokens_of([item], ways) for item in self.items]
        self.ways = ways
        self.most_tokens = most_tokens
        self.ranks = ranks

    def __call__(self, rows: Rows, micro_batches: int) -> Window:
        """The rows of a step in so many micro-batches, or in fewer where there are fewer rows."""
        ordered = self._ordered(rows)
        items = [self.items[row] for row in ordered]
        found = balance(items, self.ways, micro_batches * self.ranks)
        shares = [[ordered[place] for place in places] for places in found]
        shares += [[] for _ in range(-len(shares) % self.ranks)]
        return [shares[n : n + self.ranks] for n in range(0, len(shares), self.ranks)]

    def needs(self, rows: Rows) -> int:
        """Micro-batches that these rows take if none is to run more than it may."""
        items = [self.items[row] for row in self._ordered(rows)]
        return math.ceil(len(fill(items, self.ways, self.most_tokens)) / self.ranks)

    def largest(self, count: int) -> list[int]:
        """So many rows, which take at least as many micro-batches as any others."""
        return self._ordered(range(len(self.items)))[:count]

    def warn(self, noun: str) -> None:
        """Say so once if rows are too large."""
        too_large = [row for row, tokens in enumerate(self.tokens) if tokens > self.most_tokens]
        if too_large:
            (largest,) = self.largest(1)
            rank_zero_warn(
                f"{len(too_large)} {noun}s run more than the {self.most_tokens} tokens of "
                f"data.max_tokens_per_batch, the most in row {largest}: {self.tokens[largest]}; "
                "each has a micro-batch of its own. If memory does not suffice for that, lower "
                "data.max_length"
            )

    def _ordered(self, rows: Rows) -> list[int]:
        return sorted(rows, key=lambda row: -self.tokens[row])


class Part(NamedTuple):
    """A rank's part of a micro-batch, a filler row if it has none, and the pairs of its step."""

    rows: list[int]
    is_real: bool
    window_pairs: int


class TokenPairLoader(PairLoader):
    """`PairLoader` whose optimizer steps are cut by tokens.

    Which rows a step holds is what a `PairLoader` says that reads it at once; how they are spread
    over micro-batches and ranks changes nothing but memory and time. All steps are cut into
    equally many micro-batches, as Lightning wants it: as many as the one of them needs that needs
    the most. Only a step that has fewer rows than that, at the end of an epoch, has fewer.

    Where `limit_batches` ends an epoch within a step, the rest of the step is dropped.

    Args:
        rows: the data set.
        collate: from a list of rows to a batch with an `index` (B,); picklable.
        cut: how steps are cut; knows the lengths of all rows.
        batch_size: rows of an optimizer step on each rank.
        epochs: that a run reads from the first one on; may be infinite.
        **options: as for a `PairLoader`, but for `accumulate`, which follows from the rows.
    """

    def __init__(
        self,
        rows: SizedRows,
        collate: Callable[[list[Any]], Batch],
        cut: StepCut,
        *,
        batch_size: int,
        epochs: float = 1,
        **options: Any,
    ) -> None:
        super().__init__(
            rows,
            collate,
            batch_size=batch_size,
            accumulate=lambda: self.micro_batches,
            **options,
        )
        self.cut = cut
        self.epochs = epochs

    def __len__(self) -> int:
        """Micro-batches of an epoch, before any limit."""
        steps, rest = divmod(len(self.rows), self._stride)
        last = min(math.ceil(rest / self.replica.num_replicas), self.micro_batches)
        return steps * self.micro_batches + last

    @cached_property
    def micro_batches(self) -> int:
        """Of an optimizer step."""
        return self._needs(first_epoch=0)

    def _needs(self, first_epoch: int) -> int:
        """Micro-batches of the step that needs the most, of all from an epoch on."""
        epochs = min(self.epochs, first_epoch + 1) if not self.shuffle else self.epochs
        if (epochs - first_epoch) * len(self.rows) > MOST_ROWS:
            return self.cut.needs(self.cut.largest(self._stride))
        orders = (self._order(epoch) for epoch in range(first_epoch, math.ceil(epochs)))
        return max(
            (
                self.cut.needs(order[start : start + self._stride])
                for order in orders
                for start in range(0, len(order), self._stride)
            ),
            default=1,
        )

    def state_dict(self) -> dict[str, int]:
        return {
            **super().state_dict(),
            "micro_batches": self.micro_batches,
            "batches_done": self._done,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from there, in as many micro-batches as the checkpoint's run had.

        Raises:
            UserError: if rows or steps are others, or need more micro-batches than that.
        """
        theirs = state.get("micro_batches", 1)
        if theirs >= self._needs(state["epoch"]):
            self.micro_batches = theirs
        super().load_state_dict(state)

    def _check_sizes(self, state: Mapping[str, int]) -> None:
        given, theirs = self.state_dict(), state.get("micro_batches", 1)
        if theirs != self.micro_batches or state["rows_at_once"] != given["rows_at_once"]:
            raise UserError(
                f"cannot resume with steps of {given['rows_at_once']} rows in {self.micro_batches} "
                f"micro-batches, where the checkpoint's run had {state['rows_at_once']} in "
                f"{theirs}: repeat its data.batch_size and trainer.accumulate_grad_batches, and "
                "its data.max_tokens_per_batch or a larger one"
            )

    def _position(self, state: Mapping[str, int]) -> int:
        return state["batches_done"]

    def _rows_before(self, number: int) -> int:
        """Rows of an epoch before a micro-batch; within a step, all of the step."""
        return super()._rows_before(math.ceil(number / self.micro_batches))

    def _collated(self, order: list[int], first: int, last: int) -> Iterator[Batch]:
        ahead, parts = tee(self._parts(order, first, last))
        for batch, part in zip(self._read(part.rows for part in ahead), parts, strict=True):
            yield batch | {
                "pair_mask": torch.full(batch["index"].shape, part.is_real),
                "window_pairs": torch.tensor(float(part.window_pairs)),
            }

    def _stamps(self, batch: Batch, number: int, last: int) -> Batch:
        # They are there: how many pairs a step has that a limit cuts short, its cut says.
        return {}

    def _parts(self, order: list[int], first: int, last: int) -> Iterator[Part]:
        """This rank's parts of the micro-batches `first` to `last`."""
        for start in range(first - first % self.micro_batches, last, self.micro_batches):
            rows = order[self._rows_before(start) : self._rows_before(start + 1)]
            window = self.cut(rows, self.micro_batches)[: last - start]
            pairs = sum(len(share) for shares in window for share in shares)
            shortest = next(share for share in reversed(window[-1]) if share)[-1:]
            for shares in window[max(first - start, 0) :]:
                share = shares[self.replica.rank]
                yield Part(share or shortest, bool(share), pairs)


def refuse_fixed_accumulation(trainer: L.Trainer) -> None:
    """Refuse a strategy that asks how many micro-batches make a step before that is known.

    Raises:
        UserError: for DeepSpeed.
    """
    if isinstance(trainer.strategy, DeepSpeedStrategy):
        raise UserError(
            "DeepSpeed fixes how many micro-batches make a step before it is known how many "
            "data.max_tokens_per_batch takes: choose strategy=ddp or strategy=fsdp, or leave it out"
        )
