"""Prompts to completions: each prompt is run once, and its cache shared out to its completions."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

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


class Batch(NamedTuple):
    """Rows in the middle of decoding: what the next pass reads.

    `mask` is (B, P), 1 for what is real of the P cached tokens, `positions` (B,) those of the last
    one, and `logits` (B, V) say what follows it.
    """

    mask: Tensor
    positions: Tensor
    logits: Tensor
    cache: Cache

    def rows(self, index: Tensor) -> "Batch":
        """These rows, which may repeat; the cache itself is moved, so the old batch is void."""
        index = index.to(self.mask.device)
        self.cache.reorder_cache(index)
        return Batch(self.mask[index], self.positions[index], self.logits[index], self.cache)

    def copied(self) -> "Batch":
        """The same with a cache of its own."""
        return self._replace(cache=copy.deepcopy(self.cache))


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
    forward: Forward, prompts: Sequence[Prompt], config: Any, sampling: Sampling, at_once: int
) -> Iterator[tuple[Place, Completion]]:
    """The completions of prompts that are run together, at most `at_once` decoded at a time.

    Args:
        forward: the policy's.
        prompts: at least one.
        config: the model's, which says what a layer caches.
        sampling: how tokens are chosen.
        at_once: rows of a batch; only a single prompt may want more completions.
    """
    batch = _prefill(forward, prompts, config)
    owners = [(n, place) for n, prompt in enumerate(prompts) for place in prompt.places]
    for first in range(0, len(owners), at_once):
        part = owners[first : first + at_once]
        is_last = first + at_once >= len(owners)
        # The part after this one starts from the prompts' cache again.
        own = batch if is_last else batch.copied()
        progress = Progress(
            [place.seed for _, place in part],
            [prompts[n].room for n, _ in part],
            sampling,
            forward.device,
        )
        completions = _continue(forward, own.rows(torch.tensor([n for n, _ in part])), progress)
        yield from zip((place for _, place in part), completions, strict=True)


def _prefill(forward: Forward, prompts: Sequence[Prompt], config: Any) -> Batch:
    """Run each prompt once, padded on the left: a completion begins where its prompt ends."""
    width = max(len(prompt.ids) for prompt in prompts)
    gaps = [width - len(prompt.ids) for prompt in prompts]
    pairs = list(zip(prompts, gaps, strict=True))
    # The padding is told by the mask alone: any id will do.
    ids = torch.tensor([[0] * gap + list(prompt.ids) for prompt, gap in pairs])
    mask = torch.tensor([[0] * gap + [1] * (width - gap) for gap in gaps])
    ids, mask = ids.to(forward.device), mask.to(forward.device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = DynamicCache(config=config)
    logits = forward(ids, mask, positions, cache)
    return Batch(mask, positions[:, -1], logits, cache)


def _continue(forward: Forward, batch: Batch, progress: Progress) -> list[Completion]:
    """Draw token after token until every row has stopped or filled its room."""
    while True:
        tokens = progress.draw(batch.logits)
        if not progress.left:
            return progress.completions()
        stay = progress.leave()
        if stay is not None:
            batch, tokens = batch.rows(stay), tokens[stay]
        batch = _step(forward, batch, tokens, progress.done)


def _step(forward: Forward, batch: Batch, tokens: Tensor, done: Tensor) -> Batch:
    """Add one token to each row; the position of a finished one stays inside the context."""
    going = (~done).long().to(forward.device)
    mask = torch.cat([batch.mask, going.unsqueeze(-1)], -1)
    positions = batch.positions + going
    ids = tokens.to(forward.device).unsqueeze(-1)
    logits = forward(ids, mask, positions.unsqueeze(-1), batch.cache)
    return Batch(mask, positions, logits, batch.cache)
