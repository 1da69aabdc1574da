"""Decoding as every model of transformers allows it: each row has a cache of all its tokens."""

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from lit_align.rollout.forward import Forward


class CachedBatch(NamedTuple):
    """Rows in the middle of decoding: what the next pass reads.

    `mask` is (B, P), 1 for what is real of the P cached tokens, `positions` (B,) those of the last
    one, and `logits` (B, V) say what follows it.
    """

    mask: Tensor
    positions: Tensor
    logits: Tensor
    cache: Cache

    def rows(self, index: Tensor) -> "CachedBatch":
        """These rows, which may repeat; the cache itself is moved, so the old batch is void."""
        index = index.to(self.mask.device)
        self.cache.reorder_cache(index)
        return CachedBatch(self.mask[index], self.positions[index], self.logits[index], self.cache)

    def copied(self) -> "CachedBatch":
        """The same with a cache of its own."""
        return self._replace(cache=copy.deepcopy(self.cache))

    def step(self, forward: Forward, tokens: Tensor, done: Tensor) -> "CachedBatch":
        """Add one token to each row; the position of a finished one stays inside the context."""
        going = (~done).long().to(forward.device)
        mask = torch.cat([self.mask, going.unsqueeze(-1)], -1)
        positions = self.positions + going
        ids = tokens.to(forward.device).unsqueeze(-1)
        logits = forward.cached(ids, mask, positions.unsqueeze(-1), self.cache)
        return CachedBatch(mask, positions, logits, self.cache)


def start_cached(forward: Forward, prompts: Sequence[Sequence[int]]) -> CachedBatch:
    """Run each prompt once, padded on the left: a completion begins where its prompt ends."""
    width = max(map(len, prompts))
    gaps = [width - len(prompt) for prompt in prompts]
    pairs = list(zip(prompts, gaps, strict=True))
    # The padding is told by the mask alone: any id will do.
    ids = torch.tensor([[0] * gap + list(prompt) for prompt, gap in pairs])
    mask = torch.tensor([[0] * gap + [1] * (width - gap) for gap in gaps])
    ids, mask = ids.to(forward.device), mask.to(forward.device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = DynamicCache(config=forward.config)
    logits = forward.cached(ids, mask, positions, cache)
    return CachedBatch(mask, positions[:, -1], logits, cache)
