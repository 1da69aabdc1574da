"""What became of the rows of a data set: counted while tokenising, shown at every start."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from lit_align.data.rows import LABEL
from lit_align.data.tokenise import Kept
from lit_align.losses import PAIR_COLUMNS


@dataclass(frozen=True)
class Summary:
    """Counts of one data set; plain values, so that they can be kept beside the pairs.

    Attributes:
        rows: read.
        pairs: kept.
        dropped: rows that hold nothing to learn from, by reason.
        skipped: bad rows left out because of `on_bad_row="skip"`.
        first_skipped: where the first of them stands and what is wrong with it.
        truncated: pairs that lost tokens to `max_length`.
        prompt_tokens: median and maximum.
        answer_tokens: median and maximum over both answers.
        columns: of numbers that some row has a value in, see `PAIR_COLUMNS`.
        noun: what has been kept.
        desirable: of labelled completions how many are; None: there are no labels.
    """

    rows: int
    pairs: int
    dropped: Mapping[str, int]
    skipped: int
    first_skipped: str
    truncated: int
    prompt_tokens: tuple[float, int]
    answer_tokens: tuple[float, int]
    columns: tuple[str, ...] = ()
    noun: str = "pair"
    desirable: int | None = None

    def describe(self) -> str:
        """One line for people."""
        parts = [f"{self.pairs} {self.noun}s{self._classes()} of {self.rows} rows"]
        if self.dropped:
            parts.append(f"dropped {sum(self.dropped.values())} ({self._reasons()})")
        if self.skipped:
            parts.append(f"skipped {self.skipped} bad (first: {self.first_skipped})")
        if self.truncated:
            parts.append(f"truncated {self.truncated}")
        for name, (middle, longest) in (
            ("prompt", self.prompt_tokens),
            ("answer", self.answer_tokens),
        ):
            parts.append(f"{name} tokens median {middle:g}, max {longest}")
        if self.columns:
            parts.append(f"with {', '.join(self.columns)} of each")
        return "; ".join(parts)

    def _classes(self) -> str:
        if self.desirable is None:
            return ""
        return f" ({self.desirable} desirable, {self.pairs - self.desirable} undesirable)"

    def _reasons(self) -> str:
        return ", ".join(f"{count} {reason}" for reason, count in self.dropped.items())


@dataclass
class Tally:
    """The counts while they grow."""

    noun: str = "pair"
    rows: int = 0
    plain: int = 0
    desirable: int = 0
    truncated: int = 0
    skipped: list[str] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    columns: set[str] = field(default_factory=set)
    prompt_lengths: list[int] = field(default_factory=list)
    answer_lengths: list[int] = field(default_factory=list)

    @property
    def pairs(self) -> int:
        """Kept so far."""
        return len(self.prompt_lengths)

    def keep(self, kept: Kept[Any], numbers: Mapping[str, float]) -> None:
        prompt, *answers = kept.ids
        self.truncated += kept.truncated
        self.prompt_lengths.append(len(prompt))
        self.answer_lengths += map(len, answers)
        self.columns.update(numbers)
        self.desirable += int(numbers.get(LABEL, 0))

    def summary(self) -> Summary:
        """The final counts, once a pair has been kept."""
        return Summary(
            rows=self.rows,
            pairs=self.pairs,
            dropped=dict(self.dropped.most_common()),
            skipped=len(self.skipped),
            first_skipped=next(iter(self.skipped), ""),
            truncated=self.truncated,
            prompt_tokens=_median_max(self.prompt_lengths),
            answer_tokens=_median_max(self.answer_lengths),
            columns=tuple(name for name in PAIR_COLUMNS if name in self.columns),
            noun=self.noun,
            desirable=self.desirable if LABEL in self.columns else None,
        )

    def why_nothing_is_left(self) -> str:
        """What became of the rows, when no pair has been kept."""
        if not self.rows:
            return "it has no rows"
        parts = [f"{count} {reason}" for reason, count in self.dropped.most_common()]
        if self.skipped:
            parts.append(f"{len(self.skipped)} bad (first: {self.skipped[0]})")
        return f"no {self.noun} is left of {self.rows} rows: {', '.join(parts)}"


def _median_max(lengths: list[int]) -> tuple[float, int]:
    return float(median(lengths)), max(lengths)
