"""Tokenised pairs as a data set, and as batches of tensors."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NotRequired, TypedDict

import torch
from datasets import Dataset
from pyarrow import compute
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lit_align.data.tokenise import Pair
from lit_align.losses import PAIR_COLUMNS
from lit_align.ops import IGNORE_INDEX

READ_AT_ONCE = 1000


class PairIds(TypedDict):
    """One tokenised pair; `index` is its key, in the reference cache for one.

    The numbers are there if the data has them; see `lit_align.losses.columns`.
    """

    index: int
    prompt_ids: list[int]
    chosen_ids: list[int]
    rejected_ids: list[int]
    weight: NotRequired[float]
    margin: NotRequired[float]
    label_prob: NotRequired[float]


class StoredRows(torch.utils.data.Dataset[Any]):
    """Some of the rows of a stored set.

    Args:
        stored: columns of token ids, and any of `PAIR_COLUMNS`.
        positions: which of them, in which order; None: all.
        first_index: `index` of the first row; the others count on from there.

    Attributes:
        columns: those of `PAIR_COLUMNS` that every row has.
    """

    ids: ClassVar[tuple[str, ...]]

    def __init__(
        self, stored: Dataset, positions: Sequence[int] | None = None, first_index: int = 0
    ) -> None:
        self.stored = stored
        self.positions = range(len(stored)) if positions is None else positions
        self.first_index = first_index
        self.columns = tuple(name for name in PAIR_COLUMNS if name in stored.column_names)

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, row: int) -> Any:
        # What is no row must raise IndexError: plain iteration ends by it.
        found = self.stored[self.positions[row]]
        index = self.first_index + row % len(self)
        return {"index": index, **{name: found[name] for name in (*self.ids, *self.columns)}}

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(len(self)))

    def lengths(self) -> list[tuple[int, ...]]:
        """Tokens of the prompt and of each answer of every row."""
        found: list[tuple[int, ...]] = []
        chosen = self.stored.select_columns(list(self.ids)).select(self.positions)
        for part in chosen.with_format("arrow").iter(READ_AT_ONCE):
            columns = (compute.list_value_length(part[name]).to_pylist() for name in self.ids)
            found += zip(*columns, strict=True)
        return found

    @abstractmethod
    def answers(self) -> Iterator[tuple[list[int], list[int]]]:
        """What the policy should answer, row by row: ids of a prompt and of a good answer."""


class PairRows(StoredRows):
    """Some of the pairs of a stored set; a row is a `PairIds`."""

    ids = Pair._fields

    def answers(self) -> Iterator[tuple[list[int], list[int]]]:
        return ((row["prompt_ids"], row["chosen_ids"]) for row in self)


@dataclass(frozen=True)
class Collate:
    """Pads rows to tensors; small enough to be sent to workers.

    Args:
        pad_token_id: fills the end of short rows. It is never looked for: what is padding follows
            from lengths, so that a genuine token of the same id keeps its label.
    """

    pad_token_id: int

    @abstractmethod
    def __call__(self, rows: Sequence[Any]) -> dict[str, Tensor]:
        """A batch of rows."""

    def side(
        self, name: str, prompts: list[list[int]], answers: list[list[int]]
    ) -> dict[str, Tensor]:
        """One sequence a row: prompt, then answer."""
        both = list(zip(prompts, answers, strict=True))
        ids = [[*prompt, *answer] for prompt, answer in both]
        labels = [[IGNORE_INDEX] * len(prompt) + answer for prompt, answer in both]
        ones = [[1] * len(row) for row in ids]
        return {
            f"{name}_input_ids": _padded(ids, self.pad_token_id),
            f"{name}_attention_mask": _padded(ones, 0),
            f"{name}_labels": _padded(labels, IGNORE_INDEX),
        }


class PairCollate(Collate):
    """Pads pairs to tensors."""

    def __call__(self, rows: Sequence[PairIds]) -> dict[str, Tensor]:
        """Batch of B pairs, right padded.

        Returns:
            `index` (B,) int64; for chosen and rejected each `*_input_ids`, `*_attention_mask` and
            `*_labels` (B, T) int64, T the longest of that side; labels are `IGNORE_INDEX` on
            prompt and padding; of `PAIR_COLUMNS` those that the rows have, (B,) float32.
        """
        prompts = [row["prompt_ids"] for row in rows]
        return {
            "index": torch.tensor([row["index"] for row in rows]),
            **numbers(rows),
            **self.side("chosen", prompts, [row["chosen_ids"] for row in rows]),
            **self.side("rejected", prompts, [row["rejected_ids"] for row in rows]),
        }


def numbers(rows: Sequence[Any]) -> dict[str, Tensor]:
    """Of `PAIR_COLUMNS` those that the rows have, (B,) float32."""
    return {
        name: torch.tensor([row[name] for row in rows]) for name in PAIR_COLUMNS if name in rows[0]
    }


def _padded(rows: list[list[int]], value: int) -> Tensor:
    """(B, longest), int64."""
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)
