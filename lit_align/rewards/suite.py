"""Several reward functions over one batch of completions: named, weighted, and bounded in time."""

import logging
import math
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lit_align.errors import UserError
from lit_align.rewards.calls import (
    Failed,
    Mark,
    RewardFunction,
    wanted,
)
from lit_align.rewards.halving import halved
from lit_align.rewards.packed import Packed
from lit_align.rewards.pool import Here, Pool

log = logging.getLogger(__name__)

INSTEAD = {"zero": 0.0, "skip": None}
"""What a completion gets in place of a score, per value of `on_error` that goes on."""

Columns = dict[str, Sequence[Any]]


@dataclass(frozen=True)
class Scores:
    """What a batch of completions got.

    Args:
        total: per completion, the weighted sum of the scores that apply; None if none does.
        by_name: per function and completion, the score; None if it does not apply.
        failed: per function and completion, whether it failed there and gave no score of its own.
        seconds: per function, how long it took.
    """

    total: list[float | None]
    by_name: dict[str, list[float | None]]
    failed: dict[str, list[bool]]
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def failures(self) -> dict[str, int]:
        """Per function, how many completions it failed for."""
        return {name: sum(failed) for name, failed in self.failed.items()}


class RewardSuite:
    """Scores completions with several functions, each in a process that can be stopped.

    A function is called as `f(prompts=..., completions=..., completion_ids=..., **columns)`, with
    those of the names that it takes, and returns one number per completion: None or NaN where it
    does not apply. Texts, or lists of messages for conversations, come as the data holds them;
    `completion_text` gives the text of either. Functions written for TRL carry over, async ones
    too.

    Each function runs in a worker process that starts with the first batch: it prints to standard
    error, sees no GPU, and what it changes stays in the worker. Anything that can be pickled works,
    lambdas and functions of a notebook among them, as it stands at the first batch; for the rest
    there is `in_process`. The deadline is against accidents: a worker may read and write
    whatever the trainer may.

    A failure is an exception, a call beyond the timeout, a process that ends, a list of the wrong
    length, or a score that is no finite number. With `on_error="raise"` it ends the run. Otherwise
    a batch that failed is halved until only completions to blame go without a score: half a batch
    has half the time, at least an eighth of the timeout, and all calls of one function for one
    batch together have four timeouts, plus a minute for workers to start again; what is not scored
    by then has failed. A function that returns the wrong length fails for the whole batch. A
    `UserError`, from a function or about one, is a mistake of the set-up and is always raised.

    Args:
        functions: by the names under which they are logged.
        weights: of the functions in the total, 1.0 for each that is not named. A function of
            weight 0 is measured and does not count.
        on_error: "raise", or "zero" (a failed completion gets 0.0), or "skip" (it gets None).
        timeout: seconds that one call of one function over a batch may take.
        workers: processes, that is functions that may run at once.

    Raises:
        UserError: if there is no function, one cannot be called, or an option makes no sense.
    """

    def __init__(
        self,
        functions: Mapping[str, RewardFunction],
        weights: Mapping[str, float] | None = None,
        on_error: str = "raise",
        timeout: float = 30.0,
        workers: int = 1,
    ) -> None:
        _check_functions(functions)
        _check_options(on_error, timeout, workers)
        self.functions = dict(functions)
        self.weights = _checked_weights(weights or {}, functions)
        self.on_error = on_error
        self.timeout = float(timeout)
        self.workers = workers
        self._open()

    def _open(self) -> None:
        self._packed = {name: Packed(name, fn) for name, fn in self.functions.items()}
        self._told: set[str] = set()
        self._pool = Pool(self.workers)
        # Also at exit, and when the suite is forgotten.
        weakref.finalize(self, self._pool.close)

    def __getstate__(self) -> dict[str, Any]:
        # A copy has workers of its own.
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open()

    def close(self) -> None:
        """End the workers now. Scoring again starts new ones."""
        self._pool.close()

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
    ) -> Scores:
        """Score a batch; any thread may call this.

        Args:
            prompts: texts or lists of messages, one per completion.
            completions: texts or lists of messages.
            completion_ids: the tokens of each completion.
            columns: the other columns of the data by name, one entry per completion. Functions
                cannot see a column that has the name of one of the three above.

        Raises:
            UserError: if the lists differ in length, or a function fails and `on_error` is "raise".
        """
        batch: Columns = {
            **columns,
            "prompts": prompts,
            "completions": completions,
            "completion_ids": completion_ids,
        }
        count = len(completions)
        for name, values in batch.items():
            if len(values) != count:
                raise UserError(f"{count} completions, but {len(values)} entries of '{name}'")
        results = self._all(batch, count) if count else dict.fromkeys(self.functions, ([], 0.0))
        instead = INSTEAD.get(self.on_error)
        by_name = {
            name: [instead if isinstance(mark, str) else mark for mark in results[name][0]]
            for name in self.functions
        }
        return Scores(
            total=[self._total(by_name, position) for position in range(count)],
            by_name=by_name,
            failed={
                name: [isinstance(mark, str) for mark in results[name][0]]
                for name in self.functions
            },
            seconds={name: results[name][1] for name in self.functions},
        )

    def _total(self, by_name: Mapping[str, Sequence[float | None]], position: int) -> float | None:
        parts = [
            self.weights[name] * score
            for name, scores in by_name.items()
            if (score := scores[position]) is not None and self.weights[name]
        ]
        return math.fsum(parts) if parts else None

    def _all(self, batch: Columns, count: int) -> dict[str, tuple[list[Mark], float]]:
        """Marks and seconds of every function."""
        # In this thread, for which the caller may have switched gradients off.
        here = [name for name, packed in self._packed.items() if packed.stays or self.workers == 1]
        threads = ThreadPoolExecutor(self.workers, "reward")
        try:
            elsewhere = {
                name: threads.submit(self._one, packed, batch, count)
                for name, packed in self._packed.items()
                if name not in here
            }
            results = {name: self._one(self._packed[name], batch, count) for name in here}
            return results | {name: future.result() for name, future in elsewhere.items()}
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    def _one(self, packed: Packed, batch: Columns, count: int) -> tuple[list[Mark], float]:
        """One function over the batch, halved where it fails."""
        names = wanted(packed.function, batch)
        start = time.monotonic()
        with nullcontext(Here()) if packed.stays else self._pool.worker() as runner:

            def call(part: range, seconds: float) -> list[Mark] | Failed:
                arguments = {name: [batch[name][i] for i in part] for name in names}
                return runner.call(packed, arguments, len(part), seconds)

            marks = halved(
                call,
                count,
                self.timeout,
                ready=partial(runner.ready, packed),
                note=partial(self._note, packed),
            )
        return marks, time.monotonic() - start

    def _note(self, packed: Packed, failure: Failed, count: int) -> None:
        """Raise, or say it once."""
        if failure.is_setup:
            raise UserError(f"{packed.title}: {failure.what}")
        message = f"{packed.title} {failure.what} (called for {_counted(count)})"
        if self.on_error == "raise":
            raise UserError(
                f"{message}: mend the function, or give it more time by `timeout`, or go on "
                "without such scores by on_error=zero or on_error=skip"
            )
        if packed.name not in self._told:
            self._told.add(packed.name)
            log.warning("%s. Its further failures are only counted.", message)


def _counted(count: int) -> str:
    return "1 completion" if count == 1 else f"{count} completions"


def _check_functions(functions: Mapping[str, RewardFunction]) -> None:
    if not functions:
        raise UserError("a RewardSuite needs at least one reward function")
    for name, function in functions.items():
        if not callable(function):
            raise UserError(f"reward '{name}' is {function!r}, which cannot be called")


def _check_options(on_error: str, timeout: float, workers: int) -> None:
    if on_error not in {"raise", *INSTEAD}:
        raise UserError(f"on_error must be raise, zero or skip, not {on_error!r}")
    if not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
        raise UserError(f"timeout must be a number of seconds above 0, not {timeout!r}")
    if not isinstance(workers, int) or workers < 1:
        raise UserError(f"workers must be a whole number, at least 1, not {workers!r}")


def _checked_weights(weights: Mapping[str, float], names: Collection[str]) -> dict[str, float]:
    """The weight of every function, in their order."""
    if unknown := sorted(set(weights) - set(names)):
        raise UserError(
            f"weights name '{unknown[0]}', which is no reward: there are {', '.join(names)}"
        )
    for name, weight in weights.items():
        if not isinstance(weight, int | float) or not math.isfinite(weight):
            raise UserError(f"the weight of reward '{name}' must be a number, not {weight!r}")
    return {name: float(weights.get(name, 1.0)) for name in names}
