"""From a source of rows to pairs on disk: read, check, tokenise, count, keep."""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from datasets import Dataset
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn
from rich.console import Console
from rich.progress import track

from lit_align.data.cache import cache_root, digest, filling
from lit_align.data.rows import AnswerRow, RowError, read_row
from lit_align.data.sources import Placed, Source
from lit_align.data.store import PairWriter, Row, stored
from lit_align.data.summary import Summary, Tally
from lit_align.data.tokenise import Dropped, Pair, RowTokeniser
from lit_align.errors import UserError
from lit_align.losses import PAIR_COLUMNS, WITHOUT_VALUE

# Part of every key: raise it when equal keys would no longer mean equal pairs.
SCHEMA = 2
# Rows tokenised in one call: enough to keep the tokenizer's threads busy, little to hold.
AT_ONCE = 1024
LACKS = (
    "field '{0}' is missing or null, and other rows have it: nothing can stand for it "
    "(data.ignore_columns=[{0}] reads it of no row)"
)


class Prepared(NamedTuple):
    """Pairs of token ids, memory-mapped, and what became of the rows they come from."""

    pairs: Dataset
    summary: Summary


@dataclass(frozen=True)
class Preparation:
    """How rows become pairs, or whatever a subclass says.

    Args:
        tokeniser: makes the token ids.
        on_bad_row: "raise" stops at the first row that cannot be read, "skip" counts such rows.
        cache_dir: folder of the caches; see `cache_root`.
        columns: those of `PAIR_COLUMNS` to read.
    """

    noun: ClassVar[str] = "pair"
    ids: ClassVar[tuple[str, ...]] = Pair._fields
    numbers: ClassVar[tuple[str, ...]] = tuple(PAIR_COLUMNS)
    most: ClassVar[int] = 1  # of what is kept that one row of a file can hold

    tokeniser: RowTokeniser[Any]
    on_bad_row: str = "raise"
    cache_dir: str | PathLike[str] | None = None
    columns: tuple[str, ...] = tuple(PAIR_COLUMNS)

    def __call__(self, source: Source, limit: int | None = None) -> Prepared:
        """The pairs of a source, made anew only if its content or any option has changed.

        Args:
            source: of the rows.
            limit: keep only this many pairs, and read no further.

        Raises:
            UserError: for a bad row, or if no pair is left.
        """
        key = digest(
            schema=SCHEMA,
            content=source.content(),
            tokeniser=self.tokeniser.fingerprint,
            on_bad_row=self.on_bad_row,
            limit=limit,
            columns=self.columns,
        )
        folder = cache_root(self.cache_dir) / f"{self.noun}s" / key
        found = stored(folder)
        if found is None:
            with filling(folder) as scratch:
                self._fill(scratch, source, limit)
            found = stored(folder)
        if found is None:
            raise UserError(
                f"the {self.noun}s just written to {folder} cannot be read back: bad disk?"
            )
        return Prepared(*found)

    def read(self, raw: object) -> Sequence[AnswerRow]:
        """What one row of a file holds.

        Raises:
            RowError: naming the field and what is wrong with it.
        """
        return [read_row(raw, self.columns)]

    def _fill(self, folder: Path, source: Source, limit: int | None) -> None:
        """Write the pairs, from the start again if rows were kept without what others have."""
        build = _Build(self, source, self._writer(folder), Tally(self.noun))
        try:
            build.run(limit)
        except _FoundLateError as late:
            build.writer.abandon()
            anew = Tally(self.noun)
            _Build(self, source, self._writer(folder), anew, found={str(late)}).run(limit)

    def _writer(self, folder: Path) -> PairWriter:
        return PairWriter(folder, self.ids, self.numbers)


class _FoundLateError(Exception):
    """The name of a column that rows kept before have no value of."""


@dataclass
class _Build:
    """One pass over a source."""

    how: Preparation
    source: Source
    writer: PairWriter
    tally: Tally
    found: set[str] = field(default_factory=set)  # columns without which a row cannot be used
    lacking: dict[str, str] = field(default_factory=dict)  # where the first row stands without one

    def run(self, limit: int | None) -> None:
        rows = with_progress(iter(self.source), f"Tokenising {self.source.name}")
        while chunk := list(islice(rows, _room(limit, self.tally.pairs, self.how.most))):
            self.writer.write(self._kept(chunk, limit))
        if not self.tally.pairs:
            raise UserError(f"{self.source.name}: {self._why_nothing_is_left()}")
        if self.tally.plain and self.how.tokeniser.tokenizer.eos_token_id is None:
            rank_zero_warn("the tokenizer has no end token: answers in plain text have no end")
        self.writer.close(self.tally.summary())

    def _kept(self, chunk: list[tuple[str, object]], limit: int | None) -> list[Row]:
        """What to keep of a few rows, with their numbers; the others are counted."""
        rows = list(self._readable(chunk))
        outcomes = self.how.tokeniser([row for _, row in rows])
        kept: list[Row] = []
        for (place, row), outcome in zip(rows, outcomes, strict=True):
            if isinstance(outcome, RowError):
                self._refuse(place, outcome)
            elif isinstance(outcome, Dropped):
                self.tally.dropped[outcome.reason] += 1
            elif limit is None or self.tally.pairs < limit:
                self.tally.keep(outcome, row.numbers)
                kept.append((outcome.ids, row.numbers))
        return kept

    def _readable(self, chunk: list[tuple[str, object]]) -> Iterator[tuple[str, AnswerRow]]:
        for place, raw in chunk:
            self.tally.rows += 1
            try:
                rows = self._read(place, raw)
            except RowError as error:
                self._refuse(place, error)
                continue
            for row in rows:
                if row.drop_reason:
                    self.tally.dropped[row.drop_reason] += 1
                else:
                    self._check_template(place, row)
                    self.tally.plain += not row.is_conversation
                    yield place, row

    def _read(self, place: str, raw: object) -> Sequence[AnswerRow]:
        if isinstance(raw, RowError):
            raise raw
        rows = self.how.read(raw)
        for row in rows:
            if not row.drop_reason:
                for name in set(self.how.columns) - WITHOUT_VALUE.keys():
                    self._demand(name, place, row)
        return rows

    def _demand(self, name: str, place: str, row: AnswerRow) -> None:
        """A column for which nothing can stand is there in every row or in none."""
        if name not in row.numbers:
            if name in self.found:
                raise RowError(LACKS.format(name))
            self.lacking.setdefault(name, place)
        elif name not in self.found:
            self.found.add(name)
            if name in self.lacking:
                self._refuse(self.lacking[name], RowError(LACKS.format(name)))
                raise _FoundLateError(name)

    def _refuse(self, place: str, error: RowError) -> None:
        if self.how.on_bad_row == "raise":
            raise UserError(
                f"{self.source.name}, {place}: {error} (on_bad_row=skip leaves such rows out)"
            ) from error
        self.tally.skipped.append(f"{place}: {error}")

    def _check_template(self, place: str, row: AnswerRow) -> None:
        """Without a template no conversation at all can be read: not a fault of one row."""
        tokenizer = self.how.tokeniser.tokenizer
        if row.is_conversation and not tokenizer.chat_template:
            raise UserError(
                f"{self.source.name}, {place} is a conversation, but the tokenizer "
                f"'{tokenizer.name_or_path}' has no chat template: give one with "
                "model.chat_template (a file or its text), or write prompt and answers as plain "
                "texts"
            )

    def _why_nothing_is_left(self) -> str:
        why = self.tally.why_nothing_is_left()
        if self.tally.dropped["empty after truncation"]:
            why += (
                f"; prompts fill max_length={self.how.tokeniser.max_length} and leave no room for "
                "an answer: raise data.max_length"
            )
        return why


def _room(limit: int | None, kept: int, most: int) -> int:
    """Rows to read next, of which each holds at most so many."""
    return AT_ONCE if limit is None else min(AT_ONCE, math.ceil((limit - kept) / most))


def with_progress(rows: Placed, title: str) -> Iterator[tuple[str, object]]:
    """The rows, with a bar on the first rank's terminal while they are read."""
    console = Console(stderr=True)
    if getattr(rank_zero_only, "rank", 0) or not sys.stderr.isatty():
        return rows
    return iter(track(rows, title, console=console, transient=True))
