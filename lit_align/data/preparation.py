"""From a source of rows to pairs on disk: read, check, tokenise, count, keep."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from os import PathLike
from typing import NamedTuple

from datasets import Dataset
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn
from rich.console import Console
from rich.progress import track

from lit_align.data.cache import cache_root, digest, filling
from lit_align.data.rows import PreferenceRow, RowError, read_row
from lit_align.data.sources import Placed, Source
from lit_align.data.store import PairWriter, stored
from lit_align.data.summary import Summary, Tally
from lit_align.data.tokenise import Dropped, Pair, PairTokeniser
from lit_align.errors import UserError

# Part of every key: raise it when equal keys would no longer mean equal pairs.
SCHEMA = 1
# Rows tokenised in one call: enough to keep the tokenizer's threads busy, little to hold.
AT_ONCE = 1024


class Prepared(NamedTuple):
    """Pairs of token ids, memory-mapped, and what became of the rows they come from."""

    pairs: Dataset
    summary: Summary


@dataclass(frozen=True)
class Preparation:
    """How rows become pairs.

    Args:
        tokeniser: makes the token ids.
        on_bad_row: "raise" stops at the first row that cannot be read, "skip" counts such rows.
        cache_dir: folder of the caches; see `cache_root`.
    """

    tokeniser: PairTokeniser
    on_bad_row: str = "raise"
    cache_dir: str | PathLike[str] | None = None

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
        )
        folder = cache_root(self.cache_dir) / "pairs" / key
        found = stored(folder)
        if found is None:
            with filling(folder) as scratch:
                _Build(self, source, PairWriter(scratch)).run(limit)
            found = stored(folder)
        if found is None:
            raise UserError(f"the pairs just written to {folder} cannot be read back: bad disk?")
        return Prepared(*found)


class _Build:
    """One pass over a source."""

    def __init__(self, how: Preparation, source: Source, writer: PairWriter) -> None:
        self.how = how
        self.source = source
        self.writer = writer
        self.tally = Tally()

    def run(self, limit: int | None) -> None:
        rows = with_progress(iter(self.source), f"Tokenising {self.source.name}")
        while chunk := list(islice(rows, _room(limit, self.tally.pairs))):
            self.writer.write(self._pairs(chunk))
        if not self.tally.pairs:
            raise UserError(f"{self.source.name}: {self._why_nothing_is_left()}")
        if self.tally.plain and self.how.tokeniser.tokenizer.eos_token_id is None:
            rank_zero_warn("the tokenizer has no end token: answers in plain text have no end")
        self.writer.close(self.tally.summary())

    def _pairs(self, chunk: list[tuple[str, object]]) -> list[Pair]:
        """The pairs to keep of a few rows; the others are counted."""
        rows = dict(self._readable(chunk))
        pairs = []
        for place, outcome in zip(rows, self.how.tokeniser(list(rows.values())), strict=True):
            if isinstance(outcome, RowError):
                self._refuse(place, outcome)
            elif isinstance(outcome, Dropped):
                self.tally.dropped[outcome.reason] += 1
            else:
                self.tally.keep(outcome)
                pairs.append(outcome.pair)
        return pairs

    def _readable(self, chunk: list[tuple[str, object]]) -> Iterator[tuple[str, PreferenceRow]]:
        for place, raw in chunk:
            self.tally.rows += 1
            try:
                row = _read(raw)
            except RowError as error:
                self._refuse(place, error)
                continue
            if row.drop_reason:
                self.tally.dropped[row.drop_reason] += 1
            else:
                self._check_template(place, row)
                self.tally.plain += not row.is_conversation
                yield place, row

    def _refuse(self, place: str, error: RowError) -> None:
        if self.how.on_bad_row == "raise":
            raise UserError(
                f"{self.source.name}, {place}: {error} (on_bad_row=skip leaves such rows out)"
            ) from error
        self.tally.skipped.append(f"{place}: {error}")

    def _check_template(self, place: str, row: PreferenceRow) -> None:
        """Without a template no conversation at all can be read: not a fault of one row."""
        tokenizer = self.how.tokeniser.tokenizer
        if row.is_conversation and not tokenizer.chat_template:
            raise UserError(
                f"{self.source.name}, {place} is a conversation, but the tokenizer "
                f"'{tokenizer.name_or_path}' has no chat template: give one with "
                "model.chat_template (a file or its text), or write prompt, chosen and rejected "
                "as plain texts"
            )

    def _why_nothing_is_left(self) -> str:
        why = self.tally.why_nothing_is_left()
        if self.tally.dropped["empty after truncation"]:
            why += (
                f"; prompts fill max_length={self.how.tokeniser.max_length} and leave no room for "
                "an answer: raise data.max_length"
            )
        return why


def _read(raw: object) -> PreferenceRow:
    if isinstance(raw, RowError):
        raise raw
    return read_row(raw)


def _room(limit: int | None, kept: int) -> int:
    return AT_ONCE if limit is None else min(AT_ONCE, limit - kept)


def with_progress(rows: Placed, title: str) -> Iterator[tuple[str, object]]:
    """The rows, with a bar on the first rank's terminal while they are read."""
    console = Console(stderr=True)
    if getattr(rank_zero_only, "rank", 0) or not sys.stderr.isatty():
        return rows
    return iter(track(rows, title, console=console, transient=True))
