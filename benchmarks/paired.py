"""Variants measured side by side: same process, same weights, same batches, alternating order."""

import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Step = Callable[[Any], Any]


class Variant(NamedTuple):
    """One way of doing the work: `step` is given the batch, and `around` is what it runs in.

    Entering and leaving `around` is not timed.
    """

    step: Step
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


class Took(NamedTuple):
    """What a step returns that knows better than its caller which part of it is to be timed."""

    cpu: float
    wall: float
    result: Any


@dataclass
class Times:
    """CPU seconds and wall seconds of each variant, a number per round."""

    by_name: dict[str, list[float]] = field(default_factory=dict)
    wall: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, cpu: float, wall: float) -> None:
        """What one round of a variant took."""
        self.by_name.setdefault(name, []).append(cpu)
        self.wall.setdefault(name, []).append(wall)

    def median(self, name: str) -> float:
        """CPU seconds."""
        return statistics.median(self.by_name[name])

    def ratios(self, slow: str, fast: str) -> list[float]:
        """How many times faster, round by round."""
        return [a / b for a, b in zip(self.by_name[slow], self.by_name[fast], strict=True)]


class Spread(NamedTuple):
    """A median, what it lies between, and of how many rounds it is the median."""

    median: float
    least: float
    most: float
    rounds: int

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.least:.2f}, {self.most:.2f}]"


def spread(numbers: list[float]) -> Spread:
    """Median, least and greatest of a number per round."""
    return Spread(statistics.median(numbers), min(numbers), max(numbers), len(numbers))


def measure(
    variants: Mapping[str, Variant],
    batches: Callable[[int], Any],
    rounds: int,
    *,
    before: Callable[[], object] = lambda: None,
    after: Callable[[str, int, Any], object] = lambda name, number, result: None,
    warm_up: Any = None,
) -> Times:
    """Run every variant on the batch of each round; every other round in reverse order.

    Args:
        variants: by name; each is given the batch and does the whole of the work.
        batches: from the number of a round to its batch.
        rounds: at least 1.
        before: untimed, before each run: what the one before has left behind is taken away.
        after: untimed, given the name, the round and the result of each run.
        warm_up: a small batch that each variant sees before anything is measured; None: none.
    """
    if warm_up is not None:
        for variant in variants.values():
            with variant.around():
                variant.step(warm_up)
    times = Times()
    for number in range(rounds):
        batch = batches(number)
        order = list(variants) if number % 2 == 0 else list(variants)[::-1]
        for name in order:
            before()
            # Trainers hold on to themselves, and so to the state of their optimizers.
            gc.collect()
            with variants[name].around():
                wall, cpu = time.perf_counter(), time.process_time()
                result = variants[name].step(batch)
                took = Took(time.process_time() - cpu, time.perf_counter() - wall, result)
            took = result if isinstance(result, Took) else took
            times.add(name, took.cpu, took.wall)
            print(f"  round {number}, {name}: {took.cpu:.2f} s", file=sys.stderr, flush=True)
            after(name, number, took.result)
    return times
