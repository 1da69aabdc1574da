"""Rewards for answers that are one number, read by a pattern and never evaluated."""

import math
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from lit_align.rewards.text import column_values, completion_text

LONGEST = 100
"""Characters of a number; what is longer is none. It bounds the work on a runaway completion."""

_PLAIN = (
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,3})?|\.[0-9]+"
)
_NUMBER = re.compile(
    rf"""
    (?<![A-Za-z0-9_])(?<![0-9]\.)        # neither inside a word nor inside a number
    (?:(?<![)\]}}])(?P<sign>[-+]))?      # after a bracket, a dash subtracts
    (?:[$€£¥]\s?(?P<sign_after>[-+])?)?
    (?:
        \\[dt]?frac\s*\{{\s*(?P<top>-?(?:{_PLAIN}))\s*\}}\s*\{{\s*(?P<bottom>-?(?:{_PLAIN}))\s*\}}
      | (?P<over>{_PLAIN})(?:\s?/\s?(?P<under>{_PLAIN}))?
      | (?=\\pi|π)
    )
    (?P<pi>\s?\*?\s?(?:\\pi(?![A-Za-z])|π))?
    (?P<percent>\s?(?:%|percent(?![A-Za-z])))?
    """,
    re.VERBOSE,
)
# How LaTeX and typographers write what the pattern above reads.
_SPELLINGS = (
    (re.compile(r"(?<=[0-9])(?:,?\\[,!]|\{,\})(?=[0-9]{3})"), ","),
    (re.compile(r"\\([%$])"), r"\1"),
    (re.compile("\N{MINUS SIGN}"), "-"),
)


class Number(NamedTuple):
    """A number as it was written: exact, and whether a percent sign follows."""

    value: Fraction
    is_percent: bool


def numeric_match(
    completions: Sequence[Any],
    *,
    column: str = "answer",
    tolerance: float = 1e-12,
    **columns: Sequence[Any],
) -> list[float | None]:
    r"""1 for a completion whose number is that of the answer, 0 for any other.

    The number of a text is the last one in its last `\boxed{}`; without a box, the first after its
    last `####` (the form of GSM8K, Cobbe et al. 2021, arXiv:2110.14168); else the last one of all.
    It may have a sign, thousands separators, decimals, an exponent, a currency before it; it may be
    a fraction (`3/4`, `\frac{3}{4}`), a percentage, or a multiple of pi. A percentage equals both
    the number before its sign and a hundredth of it, unless both are percentages.

    Args:
        completions: texts or lists of messages, N.
        column: where the right answers stand, as numbers or as texts that are read likewise.
        tolerance: how far the number may be off, as a share of the right one. The default allows
            what is lost when the data holds a rounded float; whole numbers up to 10^12 must be
            right to the last digit.
        columns: the data.

    Returns:
        N scores, 0 or 1; None where the data has no number.
    """
    answers = [number_in(answer) for answer in column_values(columns, column)]
    return [
        None if answer is None else float(_is_same(number_in(text), answer, Fraction(tolerance)))
        for text, answer in zip(completions, answers, strict=True)
    ]


def number_in(value: Any) -> Number | None:
    """The number that a text ends on, in the sense of `numeric_match`.

    Args:
        value: a text, a list of messages, a number, or None.
    """
    if value is None:
        return None
    text = completion_text(value) if isinstance(value, str | list) else str(value)
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    if "\\boxed{" in text:
        found = list(_NUMBER.finditer(_last_box(text)))[-1:]
    elif "####" in text:
        found = list(_NUMBER.finditer(text, text.rindex("####") + 4))[:1]
    else:
        found = list(_NUMBER.finditer(text))[-1:]
    return _read(found[0]) if found else None


def _last_box(text: str) -> str:
    r"""What stands in the last `\boxed{}`, to the end of the text if it is not closed."""
    start = text.rindex("\\boxed{") + len("\\boxed{")
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position]
    return text[start:]


def _read(match: re.Match[str]) -> Number | None:
    if len(match[0]) > LONGEST:
        return None
    top, bottom = (_plain(match[a] or match[b]) for a, b in (("top", "over"), ("bottom", "under")))
    if bottom == 0:
        return None
    value = top / bottom
    if match["pi"]:
        value *= Fraction(math.pi)
    if (match["sign"] == "-") != (match["sign_after"] == "-"):
        value = -value
    return Number(value, is_percent=match["percent"] is not None)


def _plain(text: str | None) -> Fraction:
    """A number without its sign, 1 where there is none to multiply with or divide by."""
    return Fraction(text.replace(",", "")) if text else Fraction(1)


def _is_same(given: Number | None, answer: Number, tolerance: Fraction) -> bool:
    if given is None:
        return False
    factors = [Fraction(1)]
    if given.is_percent and not answer.is_percent:
        factors.append(Fraction(1, 100))
    elif answer.is_percent and not given.is_percent:
        factors.append(Fraction(100))
    allowed = tolerance * abs(answer.value)
    return any(abs(given.value * factor - answer.value) <= allowed for factor in factors)
