"""Tasks whose rows are made, not read: the bundled sums, and those of reasoning-gym.

Each is a source of rows as a file is, and has a second one of held-out rows that the first never
asks. Rows come in a mixed order, so that the first few stand for all.
"""

import json
import random
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from itertools import islice
from types import ModuleType
from typing import Any

from lit_align.data.sources import Placed
from lit_align.errors import UserError, missing_extra
from lit_align.resources.arithmetic import SPLIT_SEED, Sum, held_out_sums, training_sums

Row = dict[str, Any]
# How often a task is asked for each held-out row that is wanted.
TRIES = 20


@dataclass(frozen=True)
class Arithmetic:
    """The bundled sums that a model may learn from: columns `prompt` and `answer`.

    Args:
        split_seed: names the split; the bundled model has seen the held-out sums of any other.
    """

    split_seed: int = SPLIT_SEED

    @property
    def name(self) -> str:
        return "arithmetic"

    def __iter__(self) -> Placed:
        return _placed(_mixed(training_sums(self.split_seed)))


@dataclass(frozen=True)
class HeldOutArithmetic:
    """The sums kept for measuring, none of them a training sum read backwards.

    Args:
        split_seed: as in `Arithmetic`.
    """

    split_seed: int = SPLIT_SEED

    @property
    def name(self) -> str:
        return "arithmetic (held out)"

    def __iter__(self) -> Placed:
        return _placed(_mixed(held_out_sums(self.split_seed)))


@dataclass(frozen=True)
class ReasoningGym:
    """Questions of a reasoning-gym task.

    Columns: `prompt`, the question; `answer`; `task`, its name; `entry`, the whole item as JSON
    text, which the scorer of the task reads.

    Args:
        task: its name in reasoning-gym, such as `chain_sum`.
        size: questions; some may be equal.
        seed: of the first of them. Question i of seed s is that of seed s + i, so that
            neighbouring seeds share nearly all questions.
        config: further options of the task, such as `{"min_terms": 2}`.
    """

    task: str
    size: int = 1000
    seed: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.task

    def __iter__(self) -> Placed:
        return _placed(self.rows(self.seed, self.size))

    def rows(self, seed: int, size: int) -> Iterator[Row]:
        """So many rows from a seed on.

        Raises:
            UserError: for an unknown task, or options that it refuses.
        """
        for item in _dataset(self.task, seed=seed, size=size, **self.config):
            yield {
                "prompt": item["question"],
                "answer": item["answer"],
                "task": self.task,
                "entry": json.dumps(item),
            }


@dataclass(frozen=True)
class HeldOutReasoningGym:
    """Different questions of the same task, none of which is asked in training.

    Args:
        of: the task that is trained on.
        size: questions; fewer if the task has not so many different ones.
    """

    of: ReasoningGym
    size: int = 200

    @property
    def name(self) -> str:
        return f"{getattr(self.of, 'name', self.of)} (held out)"

    def __iter__(self) -> Placed:
        if not isinstance(self.of, ReasoningGym):
            raise UserError(
                f"held-out questions are of a reasoning-gym task, not of {self.of}: with "
                "data.path set to a file, name another for data.val_path, or use data=prompts"
            )
        return _placed(islice(self._unseen(self.of), self.size))

    def _unseen(self, task: ReasoningGym) -> Iterator[Row]:
        seen = {row["prompt"] for row in task.rows(task.seed, task.size)}
        count = len(seen)
        for row in task.rows(task.seed + task.size, TRIES * self.size):
            if row["prompt"] not in seen:
                seen.add(row["prompt"])
                yield row
        if len(seen) == count:
            raise UserError(
                f"all questions of the task '{task.task}' occur in training: make "
                f"data.path.size smaller than {task.size}, or set data.val_path to null"
            )


def _placed(rows: Iterable[Row]) -> Placed:
    return ((f"item {number}", row) for number, row in enumerate(rows, 1))


def _mixed(sums: list[Sum]) -> Iterator[Row]:
    order = random.Random(0).sample(sums, len(sums))
    return ({"prompt": question.prompt, "answer": question.answer} for question in order)


def _dataset(task: str, **options: Any) -> Any:
    gym = _reasoning_gym()
    known = gym.factory.DATASETS
    if task not in known:
        near = ", ".join(get_close_matches(task, known, cutoff=0.4)) or ", ".join(sorted(known))
        raise UserError(f"reasoning-gym has no task '{task}' (it has, for example: {near})")
    try:
        return gym.create_dataset(task, **options)
    # Tasks check their options with assertions, constructors and errors of their own.
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(
            f"the reasoning-gym task '{task}' refuses its options {options}: {error}"
        ) from error


def _reasoning_gym() -> ModuleType:
    try:
        with warnings.catch_warnings():
            # One of its packages leaves files open.
            warnings.simplefilter("ignore", ResourceWarning)
            return import_module("reasoning_gym")
    except ModuleNotFoundError as error:
        raise missing_extra("reasoning-gym", "gym") from error
