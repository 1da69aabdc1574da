"""Preference pairs for a Trainer."""

import math
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

import lightning as L
import torch
from datasets import Dataset
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import Subset
from transformers import PreTrainedTokenizerBase

from lit_align.data.loader import PairLoader, no_loaders
from lit_align.data.module import ResumableDataModule
from lit_align.data.pairs import Collate, PairCollate, PairRows, StoredRows
from lit_align.data.preparation import Preparation
from lit_align.data.rows import COLUMNS, REQUIRED
from lit_align.data.sources import Columns, Source, open_source
from lit_align.data.token_loader import StepCut, TokenPairLoader, refuse_fixed_accumulation
from lit_align.data.tokenise import TRUNCATIONS, PairTokeniser
from lit_align.errors import UserError
from lit_align.losses import PAIR_COLUMNS

Place = str | PathLike[str]


class PreferenceDataModule(ResumableDataModule):
    """Pairs of a preferred and a rejected answer, tokenised once and kept.

    A row has `chosen` and `rejected`, and a `prompt` or a beginning that both share; each a text
    or a list of messages (`role`, `content`). Conversations may come with `tools` and
    `chat_template_kwargs`. `lit_align.data.rows` says what is accepted.

    A row may also have numbers that bear on its loss, which reach the batch as (B,) float32 if any
    row has one:

    * `weight`, finite and >= 0: the pair's loss is multiplied by it; null is 1. Means are still
      over the number of pairs.
    * `label_prob`, in [0, 1]: how likely it is that the chosen answer is the better one; null is 1.
    * `margin`, finite: by how much it is to lead, in the unit that the loss says. Nothing stands
      for null: either every row has one or none.

    `lit_align.losses.columns` says which losses honour which; one that does not refuses the data
    before training starts.

    Args:
        path: a JSONL, JSON or Parquet file, a folder written by `save_to_disk`, or a name on the
            hub (`owner/name` or `owner/name:configuration`).
        split: part of a folder or hub data set to train on.
        val_path: a second file, folder or name to validate on.
        val_split: or a further split of `path`; or the share of its pairs, between 0 and 1, to
            take from training for that, chosen by `seed` (not read if there is a `val_path`).
        max_length: tokens of prompt and answer together, at least 2; None: no limit.
        truncation: "right" cuts the ends of answers, and drops pairs whose prompt leaves them no
            room; "left" cuts beginnings of prompts, by what the longer answer of a pair needs.
        batch_size: pairs of a micro-batch on each rank.
        max_tokens_per_batch: tokens that a micro-batch runs at most, prompts and answers together:
            a prompt once if the model can share it, padding too if it has to stay padded. Each
            step still has the pairs that `batch_size`, accumulation and ranks say, cut into
            micro-batches of like many tokens; `trainer.accumulate_grad_batches` is set to their
            number, as many for every step. A pair of more tokens has a micro-batch of its own.
            None: micro-batches of `batch_size` pairs.
        val_batch_size: the same for validation; None: `batch_size`.
        num_workers: processes that read ahead.
        seed: of the order of the rows and of the fraction for validation.
        shuffle: whether training rows come in a new order every epoch.
        on_bad_row: "raise" stops at a row that cannot be used; "skip" leaves it out and counts.
        chat_template_kwargs: variables for the chat template of all rows. A template that writes
            today's date writes the date of the first run, or the one given here.
        max_rows: train on the first so many pairs only.
        val_max_rows: validate on the first so many pairs only.
        cache_dir: folder of tokenised pairs; None: $LIT_ALIGN_CACHE, else ~/.cache/lit_align.
        ignore_columns: of `weight`, `margin` and `label_prob` those to leave unread.
        tokenizer: None: that of the module in training.

    Attributes:
        train_rows: after `setup`; `index` runs from 0.
        val_rows: after `setup`, empty without validation; `index` runs on from the training rows.
    """

    rows = "pairs"
    noun = "pair"
    train_rows: StoredRows
    val_rows: StoredRows

    def __init__(  # noqa: PLR0913 - the configuration file sets each of them
        self,
        path: Place,
        *,
        split: str = "train",
        val_path: Place | None = None,
        val_split: str | float | None = None,
        max_length: int | None = 1024,
        truncation: str = "right",
        batch_size: int = 8,
        max_tokens_per_batch: int | None = None,
        val_batch_size: int | None = None,
        num_workers: int = 0,
        seed: int = 0,
        shuffle: bool = True,
        on_bad_row: str = "raise",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        max_rows: int | None = None,
        val_max_rows: int | None = None,
        cache_dir: Place | None = None,
        ignore_columns: Sequence[str] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        super().__init__(tokenizer)
        self.path = path
        self.split = split
        self.val_path = val_path
        # A file of its own takes the place of a share; a split by name would be a second one.
        self.val_split = None if val_path and isinstance(val_split, float) else val_split
        self.batch_size = batch_size
        self.max_tokens_per_batch = max_tokens_per_batch
        self.val_batch_size = batch_size if val_batch_size is None else val_batch_size
        self.num_workers = num_workers
        self.seed = seed
        self.shuffle = shuffle
        self.on_bad_row = on_bad_row
        self.max_rows = max_rows
        self.val_max_rows = val_max_rows
        self.cache_dir = cache_dir
        self.ignore_columns = ignore_columns or ()
        self.tokenising: dict[str, Any] = {
            "max_length": max_length,
            "truncation": truncation,
            "chat_template_kwargs": dict(chat_template_kwargs or {}),
        }
        self._check()

    @property
    def collate(self) -> Collate:
        """Makes a batch of rows."""
        return PairCollate(self._pad_token_id())

    def _pad_token_id(self) -> int:
        ids = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
        return next(token_id for token_id in ids if token_id is not None)

    def prepare_data(self) -> None:
        for source, limit in self._sources():
            self._preparation()(source, limit)

    def setup(self, stage: str | None = None) -> None:
        if self.trainer is not None and stage == TrainerFn.FITTING:
            self._loader = self._loader_state = None
            if self.max_tokens_per_batch is not None:
                refuse_fixed_accumulation(self.trainer)
                self._take_over_accumulation("data.max_tokens_per_batch says")
        if hasattr(self, "train_rows"):
            return
        prepare = self._preparation()
        prepared = [prepare(source, limit) for source, limit in self._sources()]
        for (source, _), (_, summary) in zip(self._sources(), prepared, strict=True):
            rank_zero_info(f"{source.name}: {summary.describe()}")
        self.train_rows, self.val_rows = self._parts([pairs for pairs, _ in prepared])

    @property
    def pair_columns(self) -> dict[str, tuple[str, ...]]:
        """After `setup`, which of `PAIR_COLUMNS` each part of the data has."""
        parts = {"the training data": self.train_rows, "the validation data": self.val_rows}
        return {part: rows.columns for part, rows in parts.items() if len(rows)}

    def state_dict(self) -> dict[str, Any]:
        """The position of the training loader, and the columns that training reads."""
        return {**super().state_dict(), "columns": list(self.train_rows.columns)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        before, now = state_dict.get("columns"), list(self.train_rows.columns)
        if self.trainer and self.trainer.state.fn == "fit" and before not in (None, now):
            raise UserError(
                f"cannot resume: the checkpoint was written with the columns {before} of the data "
                f"and there are {now}: repeat data.ignore_columns and the data of that run"
            )

    def rows_of_fit(self) -> list[torch.utils.data.Dataset[Any]]:
        """The rows that a fit reads: of training as far as it goes, of validation all or none."""
        trainer: Any = self.trainer
        schedules = (c for c in trainer.callbacks if isinstance(c, GradientAccumulationScheduler))
        most = [max(schedule.scheduling.values()) for schedule in schedules]
        accumulate = max([trainer.accumulate_grad_batches, *most])
        steps, epochs = self._limits()
        loader = self._loader or self._train_loader()
        if isinstance(loader, TokenPairLoader):
            accumulate = loader.micro_batches
        read = loader.first_rows(steps * accumulate, epochs)
        validation = [self.val_rows] if trainer.enable_validation else []
        return [Subset(self.train_rows, read), *validation]

    def _limits(self) -> tuple[float, float]:
        """Steps and epochs after which a fit ends at the latest; may be infinite."""
        if self.trainer is None:
            return math.inf, math.inf
        steps, epochs = self.trainer.max_steps, self.trainer.max_epochs
        return math.inf if steps == -1 else steps, math.inf if epochs in (None, -1) else epochs

    def train_dataloader(self) -> PairLoader:
        loader = self._loader = self._train_loader()
        self._restore()
        return loader

    def _train_loader(self) -> PairLoader:
        trainer = self.trainer
        options: dict[str, Any] = {
            "seed": self.seed,
            "shuffle": self.shuffle and not getattr(trainer, "overfit_batches", 0),
            "num_workers": self.num_workers,
            "replica": self._replica(),
            "epoch": trainer.current_epoch if trainer else 0,
            "limit_batches": lambda: trainer.limit_train_batches if trainer else 1.0,
            "whole_window": self.needs_window,
        }
        if self.max_tokens_per_batch is not None:
            return self._token_loader(options)
        return PairLoader(
            self.train_rows,
            self.collate,
            batch_size=self.batch_size,
            # Asked at every batch: a schedule of accumulation changes it between epochs.
            accumulate=lambda: trainer.accumulate_grad_batches if trainer else 1,
            **options,
        )

    def _token_loader(self, options: Mapping[str, Any]) -> TokenPairLoader:
        """The loader that cuts by tokens; finding out how goes over all rows once."""
        assert self.max_tokens_per_batch is not None
        size = self.batch_size * getattr(self, "_asked", 1)
        ranks = self._replica().num_replicas
        cut = StepCut(self.train_rows.lengths(), self._ways(), self.max_tokens_per_batch, ranks)
        cut.warn(self.noun)
        steps, epochs = self._limits()
        limit = self.trainer.limit_train_batches if self.trainer else 1.0
        whole = isinstance(limit, float) and limit == 1
        # Where a limit cuts epochs short, every step may be the first of one.
        steps_of_epoch = math.ceil(len(self.train_rows) / (size * ranks)) if whole else 1
        return TokenPairLoader(
            self.train_rows,
            self.collate,
            cut,
            batch_size=size,
            epochs=min(epochs, steps / steps_of_epoch),
            **options,
        )

    def _restore(self) -> None:
        """Let the Trainer know how many micro-batches a step has, which a state may say."""
        super()._restore()
        if self.trainer is not None and isinstance(self._loader, TokenPairLoader):
            self.trainer.accumulate_grad_batches = self._loader.micro_batches

    def val_dataloader(self) -> PairLoader | list[PairLoader]:
        if not len(self.val_rows):
            return no_loaders()
        return PairLoader(
            self.val_rows,
            self.collate,
            batch_size=self.val_batch_size,
            shuffle=False,
            num_workers=self.num_workers,
            replica=self._replica(),
        )

    def describe_plan(self, trainer: L.Trainer) -> str:
        """What a fit of this Trainer reads, and how a step is put together, in a line."""
        rows, ranks = len(self.train_rows), self._replica().num_replicas
        asked = getattr(self, "_asked", trainer.accumulate_grad_batches)
        step = self.batch_size * asked * ranks
        steps = trainer.estimated_stepping_batches
        columns = self.train_rows.columns
        cut = f"{self.batch_size} per micro-batch x {asked} accumulated x {ranks} ranks"
        if self.max_tokens_per_batch is not None:
            cut = (
                f"{trainer.accumulate_grad_batches} micro-batches x {ranks} ranks of at most "
                f"{self.max_tokens_per_batch:,} tokens"
            )
        return (
            f"plan: {steps} steps over {rows:,} {self.noun}s ({steps * step / rows:.2g} epochs), "
            f"each of {step}: {cut}; {len(self.val_rows):,} {self.noun}s to validate on"
            + (f"; reads {', '.join(columns)} of each {self.noun}" if columns else "")
        )

    def _preparation(self) -> Preparation:
        tokeniser = PairTokeniser(self.tokenizer, **self.tokenising)
        return Preparation(tokeniser, self.on_bad_row, self.cache_dir, self._columns_to_read())

    def _columns_to_read(self) -> tuple[str, ...]:
        return tuple(name for name in PAIR_COLUMNS if name not in self.ignore_columns)

    def _open(self, path: Place, split: str) -> Source:
        return open_source(path, split, Columns(REQUIRED, (*COLUMNS, *self._columns_to_read())))

    def _sources(self) -> list[tuple[Source, int | None]]:
        """What to read, and how many pairs of it: for training, then for validation if apart."""
        if isinstance(self.val_split, float):
            return [(self._open(self.path, self.split), None)]
        sources = [(self._open(self.path, self.split), self.max_rows)]
        if self.val_path is not None:
            sources.append((self._open(self.val_path, "train"), self.val_max_rows))
        elif self.val_split is not None:
            sources.append((self._open(self.path, self.val_split), self.val_max_rows))
        return sources

    def _rows(self, stored: Dataset, positions: Sequence[int], first_index: int = 0) -> StoredRows:
        return PairRows(stored, positions, first_index)

    def _split(self, stored: Dataset, share: float) -> tuple[list[int], list[int]]:
        """Row numbers to train on, and a share of them to validate on."""
        return split_rows(len(stored), share, self.seed)

    def _parts(self, pairs: list[Dataset]) -> tuple[StoredRows, StoredRows]:
        """Rows for training and validation."""
        train, val = pairs[0], pairs[-1]
        train_positions: Sequence[int] = range(len(train))
        val_positions: Sequence[int] = range(len(val) if len(pairs) > 1 else 0)
        if isinstance(self.val_split, float):
            train_positions, val_positions = self._split(train, self.val_split)
            train_positions = train_positions[: self.max_rows]
            val_positions = val_positions[: self.val_max_rows]
        train_rows = self._rows(train, train_positions)
        return train_rows, self._rows(val, val_positions, first_index=len(train_rows))

    def _check(self) -> None:
        """Refuse at once what cannot work."""
        for name, value, known in (
            ("truncation", self.tokenising["truncation"], TRUNCATIONS),
            ("on_bad_row", self.on_bad_row, ("raise", "skip")),
        ):
            if value not in known:
                raise UserError(f"data.{name} must be one of {', '.join(known)}, not {value!r}")
        for name, value, least in (
            ("max_length", self.tokenising["max_length"], 2),
            ("batch_size", self.batch_size, 1),
            ("max_tokens_per_batch", self.max_tokens_per_batch, 1),
            ("val_batch_size", self.val_batch_size, 1),
            ("max_rows", self.max_rows, 1),
            ("val_max_rows", self.val_max_rows, 1),
            ("num_workers", self.num_workers, 0),
        ):
            whole = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and not (whole and value >= least):
                raise UserError(
                    f"data.{name} must be a whole number of at least {least}, not {value!r}"
                )
        self._check_ignored()
        self._check_validation()

    def _check_ignored(self) -> None:
        ignored = self.ignore_columns
        if isinstance(ignored, str) or not set(ignored) <= PAIR_COLUMNS.keys():
            raise UserError(
                f"data.ignore_columns must be a list of some of {', '.join(PAIR_COLUMNS)}, not "
                f"{ignored if isinstance(ignored, str) else list(ignored)!r}"
            )

    def _check_validation(self) -> None:
        for place in (self.path, self.val_path or ""):
            if not isinstance(place, str | PathLike):
                raise UserError(f"data.path: {place!r} is no file, folder or name of a data set")
        if self.val_path is not None and self.val_split is not None:
            raise UserError(
                f"data.val_path and the split '{self.val_split}' exclude each other: "
                "set one of data.val_path and data.val_split to null"
            )
        if isinstance(self.val_split, str) or self.val_split is None:
            return
        if not 0 < self.val_split < 1:
            raise UserError(
                "data.val_split must be the name of a split or a share between 0 and 1, "
                f"not {self.val_split}"
            )


def split_rows(rows: int, share: float, seed: int) -> tuple[list[int], list[int]]:
    """Row numbers to train on and to validate on, both in order, at least one each.

    Args:
        rows: to divide, at least 2.
        share: for validation, between 0 and 1.
        seed: which rows that are.
    """
    if rows < len(("train", "val")):
        raise UserError(
            f"{rows} row cannot be divided into training and validation: set data.val_split=null"
        )
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed)).tolist()
    val = min(max(round(rows * share), 1), rows - 1)
    return sorted(order[val:]), sorted(order[:val])
