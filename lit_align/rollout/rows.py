"""What a rollout is made of: completions, grouped by the prompt they answer.

A group is told by its number, never by a text or a position: two rows may hold the same words, and
a group may be spread over ranks and micro-batches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

Ids = list[int]
# The number of a prompt's greedy completion, which is no member of its group.
GREEDY = -1
PER_TOKEN = ("sampler_logprobs", "old_logprobs", "ref_logprobs", "token_advantages")
# What a checkpoint keeps of each sample beside lists.
DTYPES = {
    "group": torch.int64,
    "row": torch.int64,
    "number": torch.int64,
    "is_trained": torch.bool,
    "reward": torch.float64,
    "advantage": torch.float64,
}


class Drawn(NamedTuple):
    """A prompt in its turn.

    Attributes:
        group: its number among all prompts drawn in this run; what its completions are known by.
        draw: how often the data had been gone through before.
        prompt: row number, prompt, token ids and further columns (`lit_align.data.Prompt`).
    """

    group: int
    draw: int
    prompt: Any


@dataclass
class Sample:
    """One completion and what became of it.

    Attributes:
        group: see `Drawn`.
        row: of the data.
        number: within the group; `GREEDY` of the greedy one, which is compared with and no more.
        prompt_ids: token ids of the prompt.
        completion_ids: token ids of the completion, with the stop token if there was one.
        finish_reason: "stop", or "length" for a completion that was cut.
        is_trained: whether its tokens count in the loss.
        reward: weighted sum of the rewards, without the KL; NaN if no reward applied.
        advantage: set once the whole group is known.
        greedy_reward: of the prompt's greedy completion, if the advantage wants it; not kept in
            checkpoints, which hold the advantage.
        sampler_logprobs: of the completion's tokens as the engine reports them, nats.
        old_logprobs: under the policy that the rollout was made with, by the trainer's own path.
        ref_logprobs: under the reference.
        token_advantages: if they differ within the completion; then `advantage` is their mean.
        alignment: of the policy that the rollout was made with, if the advantage wants it, nats;
            not kept in checkpoints either.
        prompt: text or messages; what people read. Not kept in checkpoints.
        completion: text; not kept in checkpoints.
        rewards: by name; not kept in checkpoints.
        failed: names of rewards that failed here and gave no score of their own; not kept either.
    """

    group: int
    row: int
    number: int
    prompt_ids: Ids
    completion_ids: Ids
    finish_reason: str
    is_trained: bool = True
    reward: float = float("nan")
    advantage: float = 0.0
    greedy_reward: float = float("nan")
    sampler_logprobs: list[float] | None = None
    old_logprobs: list[float] | None = None
    ref_logprobs: list[float] | None = None
    token_advantages: list[float] | None = None
    alignment: list[float] | None = None
    prompt: Any = None
    completion: str = ""
    rewards: dict[str, float | None] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    @property
    def trained_tokens(self) -> int:
        """Tokens that count in the loss."""
        return len(self.completion_ids) if self.is_trained else 0

    @property
    def length(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass
class Rollout:
    """The completions that some optimizer steps are made of, the same on every rank.

    Attributes:
        number: of rollouts in this run before it.
        version: optimizer steps that the policy had made when it wrote the completions.
        samples: those to train on, group by group.
        metrics: numbers about all completions, those that were filtered out included.
        left_out: completions of groups that were filtered out, for people to read.
        greedy: the greedy completions of the prompts, if an advantage wants them; likewise.
    """

    number: int
    version: int
    samples: list[Sample]
    metrics: dict[str, float] = field(default_factory=dict)
    left_out: list[Sample] = field(default_factory=list)
    greedy: list[Sample] = field(default_factory=list)

    def groups(self) -> list[list[Sample]]:
        """The samples by group, in their order."""
        return grouped(self.samples)

    def state_dict(self) -> dict[str, Any]:
        """Everything that training still needs of a finished rollout, as tensors and plain values.

        Made once and then the same object: the loader is saved by two parts of a checkpoint, and
        what both hold is written once.
        """
        return self._state

    @cached_property
    def _state(self) -> dict[str, Any]:
        samples = self.samples
        columns: dict[str, Any] = {"finish_reason": [s.finish_reason for s in samples]}
        for name, dtype in DTYPES.items():
            columns[name] = torch.tensor([getattr(s, name) for s in samples], dtype=dtype)
        for name in ("prompt_ids", "completion_ids"):
            columns[name] = flat([getattr(s, name) for s in samples], np.int64)
        for name in known(samples):
            # As wide as the widest they may have been computed in: nothing is rounded.
            columns[name] = flat([getattr(s, name) for s in samples], np.float64)
        return {"number": self.number, "version": self.version, "samples": columns}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Rollout":
        """The rollout that gave this state, without texts, metrics and what is not trained on."""
        columns = {name: _rows(column) for name, column in state["samples"].items()}
        rows = zip(*columns.values(), strict=True)
        samples = [Sample(**dict(zip(columns, row, strict=True))) for row in rows]
        return cls(state["number"], state["version"], samples)


def grouped(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Samples that follow each other and are of one group, together."""
    return [list(group) for _, group in groupby(samples, key=lambda sample: sample.group)]


def known(samples: Sequence[Sample]) -> list[str]:
    """Which of the numbers `PER_TOKEN` every one of the samples has."""
    return [
        name for name in PER_TOKEN if all(getattr(sample, name) is not None for sample in samples)
    ]


def flat(lists: Sequence[Sequence[float]], dtype: type[np.generic]) -> dict[str, Tensor]:
    """Lists of unequal length as one tensor and their lengths."""
    lengths = torch.tensor([len(values) for values in lists], dtype=torch.int64)
    # numpy takes a third of torch's time for this, and there may be millions of values.
    values = np.fromiter(chain.from_iterable(lists), dtype, int(lengths.sum()))
    return {"values": torch.from_numpy(values), "lengths": lengths}


def unflat(state: Mapping[str, Tensor]) -> list[Any]:
    """The lists again."""
    parts = torch.split(state["values"], state["lengths"].tolist())
    return [part.tolist() for part in parts]


def _rows(column: Any) -> list[Any]:
    """One value, or one list, for each sample."""
    if isinstance(column, Mapping):
        return unflat(column)
    return column.tolist() if isinstance(column, Tensor) else list(column)
