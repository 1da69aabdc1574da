"""Labelled completions for a Trainer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset

from lit_align.data.completions import CompletionCollate, CompletionRows
from lit_align.data.labelled import LABELLED_COLUMNS, WEIGHT, read_labelled
from lit_align.data.pairs import Collate, StoredRows
from lit_align.data.preference import Place, PreferenceDataModule, split_rows
from lit_align.data.preparation import Preparation
from lit_align.data.rows import LABEL, AnswerRow
from lit_align.data.sources import Columns, Source, open_source
from lit_align.data.tokenise import Completion, CompletionTokeniser
from lit_align.errors import UserError
from lit_align.losses import PAIR_COLUMNS


@dataclass(frozen=True)
class LabelledPreparation(Preparation):
    """How rows become completions that are desirable or not."""

    noun = "completion"
    ids = Completion._fields
    numbers = (LABEL, WEIGHT)
    most = 2

    def read(self, raw: object) -> Sequence[AnswerRow]:
        return read_labelled(raw, PAIR_COLUMNS.keys() - self.columns)


class UnpairedDataModule(PreferenceDataModule):
    """Completions that are desirable or not, tokenised once and kept.

    A row has `prompt`, `completion` and `label` (true or 1: desirable; false or 0: not); the first
    two are texts or lists of messages. A row of a pair (`chosen`, `rejected`) becomes two: one
    desirable, one not. Conversations may come with `tools` and `chat_template_kwargs`, all rows
    with a `weight` by which their loss is multiplied. `lit_align.data.labelled` says what is
    accepted.

    If the module in training asks for it (`needs_mismatched`), each row comes with the completion
    of another prompt. Which one depends on the rows and `seed` alone; with `shuffle=False` it is
    that of the next row.

    The arguments are those of `PreferenceDataModule`; where it speaks of pairs, completions are
    meant: `batch_size`, `max_rows` and `val_max_rows` count them. `ignore_columns` names those of
    `weight`, `margin` and `label_prob` to leave unread; the last two, which say something of a
    pair, cannot be honoured here.

    Attributes:
        train_rows: after `setup`; `index` runs from 0.
        val_rows: after `setup`, empty without validation; `index` runs on from the training rows.
    """

    rows = "labelled completions"
    noun = "completion"
    train_rows: CompletionRows
    val_rows: CompletionRows

    def setup(self, stage: str | None = None) -> None:
        super().setup(stage)
        trainer: Any = self.trainer
        if not getattr(trainer and trainer.lightning_module, "needs_mismatched", False):
            return
        parts = {"training": self.train_rows}
        if trainer.limit_val_batches:
            parts["validation"] = self.val_rows
        for name, rows in parts.items():
            if len(rows) and rows.partners is None:
                self._mismatch(name, rows)

    def _mismatch(self, name: str, rows: CompletionRows) -> None:
        try:
            rows.mismatch(self.seed if self.shuffle else None)
        except UserError as error:
            raise UserError(f"the {name} data: {error}") from error

    @property
    def collate(self) -> Collate:
        return CompletionCollate(self._pad_token_id())

    def _preparation(self) -> Preparation:
        tokeniser = CompletionTokeniser(self.tokenizer, **self.tokenising)
        return LabelledPreparation(
            tokeniser, self.on_bad_row, self.cache_dir, self._columns_to_read()
        )

    def _open(self, path: Place, split: str) -> Source:
        ignored = set(self.ignore_columns)
        known = tuple(name for name in LABELLED_COLUMNS if name not in ignored)
        return open_source(path, split, Columns((), known))

    def _split(self, stored: Dataset, share: float) -> tuple[list[int], list[int]]:
        """Prompt by prompt: the other answer of a pair would give away what is measured."""
        prompts: dict[tuple[int, ...], list[int]] = {}
        for position, ids in enumerate(stored["prompt_ids"]):
            prompts.setdefault(tuple(ids), []).append(position)
        groups = list(prompts.values())
        train, val = split_rows(len(groups), share, self.seed)
        labels = [{stored[LABEL][position] for position in group} for group in groups]
        for label in {0.0, 1.0}.difference(*(labels[n] for n in val)):
            having = [n for n in train if label in labels[n]]
            # One of two or more: nothing can be told of a class that is not there.
            if len(having) > 1:
                train.remove(having[0])
                val.append(having[0])
        return self._positions(groups, train), self._positions(groups, val)

    @staticmethod
    def _positions(groups: Sequence[Sequence[int]], part: Sequence[int]) -> list[int]:
        return sorted(position for n in part for position in groups[n])

    def _rows(self, stored: Dataset, positions: Sequence[int], first_index: int = 0) -> StoredRows:
        return CompletionRows(stored, positions, first_index, self.tokenising["max_length"])
