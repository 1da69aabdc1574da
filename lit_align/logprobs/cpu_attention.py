"""Scaled dot-product attention of a packed sequence on the CPU, by matrix products.

Torch's own kernel for the CPU multiplies small tiles at a fraction of the speed that the machine
has for matrices. Here all query heads of a key head stand above each other in one matrix, a block
of tokens at a time: few, large products, and between them as few passes over the scores as the
softmax needs. The backward pass computes the scores again from what the forward pass keeps of each
row, as Dao et al. 2022 do (FlashAttention, arXiv:2205.14135, algorithm 4); nothing is padded, no
mask is kept, and keys of a shared prefix are not copied for later.
"""

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Rows of scores that are made at once: enough for fast products, few enough for the cache.
ROWS = 576
# exp2 is several times as fast as exp on the CPU.
LOG2_E = math.log2(math.e)


class Part(NamedTuple):
    """What one segment means to one key head.

    Attributes:
        head: the key head.
        heads: the query heads that read it.
        own: the segment's tokens.
        prefix: those that come before.
    """

    head: int
    heads: slice
    own: slice
    prefix: slice

    @property
    def before(self) -> int:
        """How many tokens come before."""
        return int(self.prefix.stop - self.prefix.start)

    def gathered(self, states: Tensor) -> Tensor:
        """Keys or values of prefix and segment: (Hk, S, D) to (m, D)."""
        return torch.cat([states[self.head, self.prefix], states[self.head, self.own]])

    def scatter_add(self, states: Tensor, gathered: Tensor) -> None:
        """Add to (Hk, S, D) what `gathered`, (m, D), is of prefix and segment."""
        states[self.head, self.prefix] += gathered[: self.before]
        states[self.head, self.own] += gathered[self.before :]

    def blocks(self) -> Iterator["Block"]:
        """The segment's tokens in blocks."""
        at_once = max(1, ROWS // (self.heads.stop - self.heads.start))
        for start in range(self.own.start, self.own.stop, at_once):
            stop = min(self.own.stop, start + at_once)
            yield Block(self.heads, slice(start, stop), self.before + stop - self.own.start)


class Block(NamedTuple):
    """Tokens whose scores are made at once: `heads` heads times `tokens`, n rows.

    The last of them reads `keys` keys, each before it one fewer.
    """

    heads: slice
    tokens: slice
    keys: int

    def rows(self, states: Tensor) -> Tensor:
        """(H, S, D) or (H, S, 1) to one row per head and token, (n, D)."""
        return states[self.heads, self.tokens].flatten(0, 1)

    def put(self, states: Tensor, rows: Tensor) -> None:
        """The way back."""
        states[self.heads, self.tokens] = rows.view_as(states[self.heads, self.tokens])


def segmented_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Iterable[tuple[int, int, int, int]],
    scaling: float,
) -> Tensor:
    """Attention of each segment to its prefix and, causally, to itself.

        out_i = sum_j softmax_j(scaling * q_i k_j) v_j,  j in the prefix or j <= i in the segment

    Args:
        query: (1, H, S, D), float32, float64 or half precision.
        key: (1, Hk, S, D); H is a multiple of Hk.
        value: (1, Hk, S, Dv).
        segments: (start, stop, prefix_start, prefix_stop) each, covering all S tokens in order.
        scaling: of the scores.

    Returns:
        (1, S, H, Dv), in the values' dtype. Scores and sums are in float32 or better.
    """
    out: Tensor = _SegmentedAttention.apply(  # type: ignore[no-untyped-call]
        query, key, value, list(segments), scaling
    )
    return out


class _SegmentedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        segments: list[tuple[int, int, int, int]],
        scaling: float,
    ) -> Tensor:
        _, heads, tokens, _ = query.shape
        out = value.new_empty(tokens, heads, value.shape[-1])
        # Of each row of scores the logarithm, to base 2, of its sum.
        totals = query.new_empty(heads, tokens, 1, dtype=_wide(query))
        with torch.autocast("cpu", enabled=False):
            scaled = _scaled(query[0], scaling)
            for part in _parts(segments, heads, key.shape[1]):
                keys, values = part.gathered(key[0]), part.gathered(value[0])
                for block in part.blocks():
                    weights = _scores(block, scaled, keys)
                    highest = weights.amax(-1, keepdim=True)
                    weights.sub_(highest).exp2_()
                    total = weights.sum(-1, keepdim=True)
                    rows = (weights.to(value.dtype) @ values[: block.keys]).div_(total)
                    block.put(out.transpose(0, 1), rows)
                    block.put(totals, total.log2_().add_(highest))
        ctx.save_for_backward(query, key, value, out, totals)
        ctx.segments, ctx.scaling = segments, scaling
        return out.unsqueeze(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, totals = ctx.saved_tensors
        grad_query = torch.empty_like(query)
        grad_key, grad_value = (torch.zeros_like(s, dtype=_wide(s)) for s in (key, value))
        grad_rows = grad_out[0].transpose(0, 1)
        # What a row's weights have to lose together, so that they go on summing to 1.
        means = (grad_rows.to(_wide(out)) * out.transpose(0, 1)).sum(-1, keepdim=True)
        with torch.autocast("cpu", enabled=False):
            scaled = _scaled(query[0], ctx.scaling)
            for part in _parts(ctx.segments, query.shape[1], key.shape[1]):
                keys, values = part.gathered(key[0]), part.gathered(value[0])
                to_keys, to_values = (torch.zeros_like(s, dtype=_wide(s)) for s in (keys, values))
                for block in part.blocks():
                    grads = block.rows(grad_rows)
                    weights = _scores(block, scaled, keys)
                    weights.sub_(block.rows(totals)).exp2_()
                    to_values[: block.keys] += weights.to(value.dtype).t() @ grads
                    to_scores = _product(grads, values[: block.keys].t())
                    to_scores.sub_(block.rows(means)).mul_(weights)
                    to_scores = to_scores.to(query.dtype)
                    to_keys[: block.keys] += to_scores.t() @ block.rows(query[0])
                    block.put(grad_query[0], to_scores @ keys[: block.keys])
                part.scatter_add(grad_key[0], to_keys)
                part.scatter_add(grad_value[0], to_values)
        grad_key, grad_value = grad_key.mul_(ctx.scaling).to(key.dtype), grad_value.to(value.dtype)
        return grad_query.mul_(ctx.scaling), grad_key, grad_value, None, None


def _parts(
    segments: Iterable[tuple[int, int, int, int]], heads: int, key_heads: int
) -> Iterator[Part]:
    readers = heads // key_heads
    for start, stop, prefix_start, prefix_stop in segments:
        for head in range(key_heads):
            whose = slice(head * readers, (head + 1) * readers)
            yield Part(head, whose, slice(start, stop), slice(prefix_start, prefix_stop))


def _scaled(query: Tensor, scaling: float) -> Tensor:
    """Queries whose products with keys are scores to base 2."""
    return query.to(_wide(query)) * (scaling * LOG2_E)


def _scores(block: Block, scaled: Tensor, keys: Tensor) -> Tensor:
    """Scores of a block to base 2, (n, keys), with -inf for what comes later."""
    scores = _product(block.rows(scaled), keys[: block.keys].t())
    tokens = block.tokens.stop - block.tokens.start
    scores.view(-1, tokens, block.keys)[..., -tokens:] += _later(tokens, scores.dtype)
    return scores


@lru_cache(maxsize=16)
def _later(tokens: int, dtype: torch.dtype) -> Tensor:
    """-inf at the tokens after each, 0 elsewhere."""
    return torch.full((tokens, tokens), -torch.inf, dtype=dtype).triu_(1)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """A matrix product in float32 or better."""
    return left.to(_wide(left)) @ right.to(_wide(right))


def _wide(states: Tensor) -> torch.dtype:
    return torch.promote_types(states.dtype, torch.float32)
