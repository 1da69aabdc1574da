"""Tokenised labelled completions as a data set, and as batches of tensors."""

from collections.abc import Iterator, Sequence
from typing import NotRequired, TypedDict

import torch
from datasets import Dataset
from torch import Tensor

from lit_align.data.mismatch import mismatched_rows
from lit_align.data.pairs import READ_AT_ONCE, Collate, StoredRows, numbers
from lit_align.data.rows import LABEL
from lit_align.data.tokenise import Completion


class CompletionIds(TypedDict):
    """One tokenised completion; `index` is its key, in the reference cache for one."""

    index: int
    prompt_ids: list[int]
    completion_ids: list[int]
    label: bool
    mismatched_ids: NotRequired[list[int]]  # of another prompt, as far as there is room for them
    weight: NotRequired[float]


class CompletionRows(StoredRows):
    """Some of the labelled completions of a stored set; a row is a `CompletionIds`.

    Args:
        stored: columns `prompt_ids`, `completion_ids`, `label` and maybe `weight`.
        positions: which of its rows, in which order; None: all.
        first_index: `index` of the first row; the others count on from there.
        max_length: tokens of prompt and completion together; None: no limit.
    """

    ids = Completion._fields

    def __init__(
        self,
        stored: Dataset,
        positions: Sequence[int] | None = None,
        first_index: int = 0,
        max_length: int | None = None,
    ) -> None:
        super().__init__(stored, positions, first_index)
        self.max_length = max_length
        self.partners: list[int] | None = None

    def __getitem__(self, row: int) -> CompletionIds:
        found: CompletionIds = super().__getitem__(row)
        found["label"] = bool(self.stored[self.positions[row]][LABEL])
        if self.partners is not None:
            other = self.stored[self.positions[self.partners[row]]]
            room = None if self.max_length is None else self.max_length - len(found["prompt_ids"])
            found["mismatched_ids"] = other["completion_ids"][:room]
        return found

    def answers(self) -> Iterator[tuple[list[int], list[int]]]:
        return ((row["prompt_ids"], row["completion_ids"]) for row in self if row["label"])

    def classes(self) -> tuple[int, int]:
        """How many rows are desirable, and how many are not."""
        labels = self.stored.with_format("numpy", columns=[LABEL])[LABEL][:]
        desirable = int(labels[list(self.positions)].sum())
        return desirable, len(self) - desirable

    def mismatch(self, seed: int | None) -> None:
        """Put a completion of another prompt beside each row, under `mismatched_ids`.

        Args:
            seed: of the order in which they are dealt out; None: each row gets that of the next.

        Raises:
            UserError: if there are fewer than two different prompts.
        """
        prompts: list[int] = []
        completions: list[int] = []
        for part in self.stored.select(self.positions).iter(READ_AT_ONCE):
            prompts += (hash(tuple(ids)) for ids in part["prompt_ids"])
            completions += (hash(tuple(ids)) for ids in part["completion_ids"])
        order = list(range(len(self)))
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            order = torch.randperm(len(self), generator=generator).tolist()
        self.partners = mismatched_rows(prompts, completions, order)


class CompletionCollate(Collate):
    """Pads labelled completions to tensors."""

    def __call__(self, rows: Sequence[CompletionIds]) -> dict[str, Tensor]:
        """Batch of B completions, right padded.

        Returns:
            `index` (B,) int64; `labels` (B,) bool, true for desirable; `completion_input_ids`,
            `completion_attention_mask` and `completion_labels` (B, T) int64, which are
            `IGNORE_INDEX` on prompt and padding; the same three of `mismatched`, if the rows have
            that; `weight` (B,) float32, if they have one.
        """
        prompts = [row["prompt_ids"] for row in rows]
        batch = {
            "index": torch.tensor([row["index"] for row in rows]),
            "labels": torch.tensor([row["label"] for row in rows]),
            **numbers(rows),
            **self.side("completion", prompts, [row["completion_ids"] for row in rows]),
        }
        if "mismatched_ids" in rows[0]:
            batch |= self.side("mismatched", prompts, [row["mismatched_ids"] for row in rows])
        return batch
