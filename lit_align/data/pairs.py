"""Tokenised pairs as a data set, and as batches of tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lit_align.ops import IGNORE_INDEX


class PairIds(TypedDict):
    """One tokenised pair; `index` is its key, in the reference cache for one."""

    index: int
    prompt_ids: list[int]
    chosen_ids: list[int]
    rejected_ids: list[int]


class PairRows(torch.utils.data.Dataset[PairIds]):
    """Some of the pairs of a stored set.

    Args:
        pairs: columns `prompt_ids`, `chosen_ids`, `rejected_ids`.
        positions: which of them, in which order; None: all.
        first_index: `index` of the first row; the others count on from there.
    """

    def __init__(
        self, pairs: Dataset, positions: Sequence[int] | None = None, first_index: int = 0
    ) -> None:
        self.pairs = pairs
        self.positions = range(len(pairs)) if positions is None else positions
        self.first_index = first_index

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, row: int) -> PairIds:
        # What is no row must raise IndexError: plain iteration ends by it.
        pair = self.pairs[self.positions[row]]
        return PairIds(
            index=self.first_index + row % len(self),
            prompt_ids=pair["prompt_ids"],
            chosen_ids=pair["chosen_ids"],
            rejected_ids=pair["rejected_ids"],
        )


@dataclass(frozen=True)
class PairCollate:
    """Pads pairs to tensors; small enough to be sent to workers.

    Args:
        pad_token_id: fills the end of short rows. It is never looked for: what is padding follows
            from lengths, so that a genuine token of the same id keeps its label.
    """

    pad_token_id: int

    def __call__(self, rows: Sequence[PairIds]) -> dict[str, Tensor]:
        """Batch of B pairs, right padded.

        Returns:
            `index` (B,) int64; for chosen and rejected each `*_input_ids`, `*_attention_mask` and
            `*_labels` (B, T) int64, T the longest of that side; labels are `IGNORE_INDEX` on
            prompt and padding.
        """
        index = torch.tensor([row["index"] for row in rows])
        prompts = [row["prompt_ids"] for row in rows]
        return {
            "index": index,
            **self._side("chosen", prompts, [row["chosen_ids"] for row in rows]),
            **self._side("rejected", prompts, [row["rejected_ids"] for row in rows]),
        }

    def _side(
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


def _padded(rows: list[list[int]], value: int) -> Tensor:
    """(B, longest), int64."""
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)
