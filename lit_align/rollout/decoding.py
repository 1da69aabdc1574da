"""Prompts to completions: each prompt is run once, and what was computed serves its completions."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lit_align.rollout.engine import Completion, Sampling
from lit_align.rollout.forward import Forward
from lit_align.rollout.progress import Progress


class Place(NamedTuple):
    """Where a completion belongs, and the seed that decides it."""

    request: int
    sample: int
    seed: int


class Prompt(NamedTuple):
    """A prompt, which completions of it are wanted, and how many tokens each may have."""

    ids: Sequence[int]
    places: list[Place]
    room: int


class Batch(Protocol):
    """Begun in the middle of decoding."""

    @property
    def logits(self) -> Tensor:
        """What follows each row's last token, (B, V)."""

    def rows(self, index: Tensor) -> "Batch":
        """These rows, (B',), ascending; `self` may be void then."""

    def step(self, forward: Forward, tokens: Tensor, done: Tensor) -> "Batch":
        """One token more in each row, (B,); the position of a finished one, (B,), stays."""


class Begun(Protocol):
    """Prompts that have been run."""

    def rows(self, index: Tensor) -> Batch:
        """A row for each completion, by the number of its prompt, (B,), ascending.

        `self` may be void then.
        """

    def copied(self) -> "Begun":
        """The same, which stays whole when `self` becomes void."""


# Runs prompts, given their ids, by a policy's forward.
Start = Callable[[Forward, Sequence[Sequence[int]]], Begun]


def batches(prompts: Sequence[Prompt], at_once: int) -> Iterator[list[Prompt]]:
    """Neighbours with at most `at_once` completions together; a prompt of more is alone."""
    batch: list[Prompt] = []
    size = 0
    for prompt in prompts:
        if batch and size + len(prompt.places) > at_once:
            yield batch
            batch, size = [], 0
        batch.append(prompt)
        size += len(prompt.places)
    if batch:
        yield batch


def decode(
    forward: Forward, prompts: Sequence[Prompt], start: Start, sampling: Sampling, at_once: int
) -> Iterator[tuple[Place, Completion]]:
    """The completions of prompts that are run together, at most `at_once` decoded at a time.

    Args:
        forward: the policy's.
        prompts: at least one.
        start: runs the prompts.
        sampling: how tokens are chosen.
        at_once: rows of a batch; only a single prompt may want more completions.
    """
    begun = start(forward, [prompt.ids for prompt in prompts])
    owners = [(n, place) for n, prompt in enumerate(prompts) for place in prompt.places]
    for first in range(0, len(owners), at_once):
        part = owners[first : first + at_once]
        is_last = first + at_once >= len(owners)
        # The part after this one starts from the prompts again.
        own = begun if is_last else begun.copied()
        progress = Progress(
            [place.seed for _, place in part],
            [prompts[n].room for n, _ in part],
            sampling,
            forward.device,
        )
        completions = _continue(forward, own.rows(torch.tensor([n for n, _ in part])), progress)
        yield from zip((place for _, place in part), completions, strict=True)


def _continue(forward: Forward, batch: Batch, progress: Progress) -> list[Completion]:
    """Draw token after token until every row has stopped or filled its room."""
    while True:
        tokens = progress.draw(batch.logits)
        if not progress.left:
            return progress.completions()
        stay = progress.leave()
        if stay is not None:
            batch, tokens = batch.rows(stay), tokens[stay]
        batch = batch.step(forward, tokens, progress.done)
