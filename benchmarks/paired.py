"""Variants measured side by side: same process, same model, same batches, alternating order."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Step = Callable[[Any], Any]


@dataclass
class Times:
    """CPU seconds of each variant, a number per round."""

    by_name: dict[str, list[float]] = field(default_factory=dict)

    def median(self, name: str) -> float:
        return statistics.median(self.by_name[name])

    def ratios(self, slow: str, fast: str) -> list[float]:
        """How many times faster, round by round."""
        return [a / b for a, b in zip(self.by_name[slow], self.by_name[fast], strict=True)]

    def said(self, slow: str, fast: str) -> str:
        """The median of the ratios, and their range."""
        ratios = self.ratios(slow, fast)
        return f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"


def measure(
    variants: Mapping[str, Step],
    batches: Callable[[int], Any],
    rounds: int,
    warm_up: Any,
) -> Times:
    """Run every variant on the batch of each round; every other round in reverse order.

    Args:
        variants: by name; each is given the batch and does the whole of the work.
        batches: from the number of a round to its batch.
        rounds: at least 1.
        warm_up: a small batch that each variant sees before anything is measured.
    """
    for step in variants.values():
        step(warm_up)
    times = Times({name: [] for name in variants})
    for number in range(rounds):
        batch = batches(number)
        order = list(variants) if number % 2 == 0 else list(variants)[::-1]
        for name in order:
            start = time.process_time()
            variants[name](batch)
            times.by_name[name].append(time.process_time() - start)
    return times
