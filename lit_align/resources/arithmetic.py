"""The bundled task: sums of two numbers below 100, and which of them a model may learn from.

One rule splits the sums; the script that made the bundled model and data, and whatever draws
prompts later, take it from here, so that a held-out sum is held out everywhere.
"""

from __future__ import annotations

import random
from typing import NamedTuple

OPERANDS = 100
HELD_OUT_SHARE = 0.1
SPLIT_SEED = 0


class Sum(NamedTuple):
    """One sum: two operands from 0 to 99; `prompt` and `answer` are the texts of a chat."""

    a: int
    b: int

    @property
    def prompt(self) -> str:
        """What the user says, for example `12 + 34 =`."""
        return f"{self.a} + {self.b} ="

    @property
    def answer(self) -> str:
        """What the assistant should say, for example `46`."""
        return str(self.a + self.b)


def training_sums(seed: int = SPLIT_SEED) -> list[Sum]:
    """The sums that a model may learn from, sorted: 9,000 for the default split.

    Args:
        seed: names the split; the bundled model and data know only the default one, and have
            seen the held-out sums of any other.
    """
    return _split(seed)[1]


def held_out_sums(seed: int = SPLIT_SEED) -> list[Sum]:
    """The sums kept for measuring, sorted: 1,000 or so, none a training sum read backwards.

    Args:
        seed: names the split, see `training_sums`.
    """
    return _split(seed)[0]


def _split(seed: int) -> tuple[list[Sum], list[Sum]]:
    """Held-out and training sums; a + b stays with b + a, or one would give the other away."""
    unordered = [(a, b) for a in range(OPERANDS) for b in range(a, OPERANDS)]
    random.Random(seed).shuffle(unordered)
    cut = round(HELD_OUT_SHARE * len(unordered))
    return _both_orders(unordered[:cut]), _both_orders(unordered[cut:])


def _both_orders(unordered: list[tuple[int, int]]) -> list[Sum]:
    """Each pair of operands as a + b and as b + a, sorted, without repeats."""
    return sorted({Sum(*pair) for a, b in unordered for pair in ((a, b), (b, a))})
