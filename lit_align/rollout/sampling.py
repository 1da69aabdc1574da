"""The next token from logits, by a number in [0, 1) of its own for each completion.

Drawing by inversion makes a completion a function of its logits and its own numbers: neither the
rest of the batch nor any random state of the process has a say.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lit_align.logprobs import token_terms
from lit_align.rollout.engine import FinishReason, Sampling

# Tokens that are summed together at first.
BLOCK = 256
# Rows that are summed at once.
ROWS = 8


class Choice(NamedTuple):
    """The tokens, (N,) int64, and their log-probs, (N,) nats, float32 or better."""

    ids: Tensor
    logprobs: Tensor


def token_sampler(sampling: Sampling) -> Callable[[Tensor, Tensor], Choice]:
    """How `sampling` chooses: a function of logits (N, V) and uniforms (N,) in [0, 1)."""
    warp = _warpers(sampling)

    def draw(logits: Tensor, uniforms: Tensor) -> Choice:
        # Low precision would merge the steps of the cumulative sum.
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if sampling.is_greedy:
            return _scored(logits, logits.argmax(-1), 1.0)
        probs = warp(None, logits).softmax(-1)
        ids = inverse_cdf(probs, uniforms)
        if sampling.is_full:
            # Of the distribution that is reported, which need not be made again.
            return Choice(ids, probs.gather(-1, ids.unsqueeze(-1)).squeeze(-1).log())
        return _scored(logits, ids, sampling.temperature)

    return draw


def inverse_cdf(probs: Tensor, uniforms: Tensor) -> Tensor:
    """The first token at which the cumulative probability exceeds the uniform number.

    A token of probability 0 adds nothing to the sum, so it is never the first. Sums of blocks of
    tokens say in which block it is: those of all tokens are never made.

    Args:
        probs: (N, V), >= 0; rows need not sum to exactly 1.
        uniforms: (N,), float64, in [0, 1).

    Returns:
        (N,), int64, in [0, V).
    """
    vocabulary = probs.shape[-1]
    blocks = probs.unfold(-1, min(BLOCK, vocabulary), min(BLOCK, vocabulary))
    # A few rows at a time: sums in float64 copy what they sum.
    sums = torch.cat([rows.sum(-1, dtype=torch.float64) for rows in torch.split(blocks, ROWS)])
    rest = probs[:, blocks.shape[1] * blocks.shape[2] :].sum(-1, keepdim=True, dtype=torch.float64)
    sums = torch.cat([sums, rest], -1)
    ends = sums.cumsum(-1)
    aims = uniforms.unsqueeze(-1) * ends[:, -1:]
    block = _first_beyond(ends, aims, sums)
    tokens = block * blocks.shape[2] + torch.arange(blocks.shape[2], device=probs.device)
    inside = probs.gather(-1, tokens.clamp(max=vocabulary - 1)).double()
    inside.masked_fill_(tokens >= vocabulary, 0)
    before = (ends - sums).gather(-1, block)
    return tokens.gather(-1, _first_beyond(before + inside.cumsum(-1), aims, inside)).squeeze(-1)


def uniforms_of(seed: int, count: int) -> Tensor:
    """The numbers in [0, 1) that decide the tokens of one completion: (count,), float64, CPU."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, dtype=torch.float64, generator=generator)


def cut_at_stop(ids: list[int], stops: frozenset[int]) -> tuple[list[int], FinishReason]:
    """Ids up to the first one that ends a completion, with it, and whether there is one."""
    end = next((n for n, token in enumerate(ids, 1) if token in stops), None)
    return (ids, "length") if end is None else (ids[:end], "stop")


def _first_beyond(cumulative: Tensor, aims: Tensor, parts: Tensor) -> Tensor:
    """Where cumulative sums of `parts`, (N, M), first exceed the aims, (N, 1): (N, 1)."""
    index = torch.searchsorted(cumulative, aims, right=True)
    # Only NaN, whose log-prob tells of it later, and sums in another order get past the end.
    index = index.clamp(max=parts.shape[-1] - 1)
    # A device that sums in parallel may round two equal sums apart.
    possible = parts.gather(-1, index) > 0
    return index.where(possible, parts.argmax(-1, keepdim=True))


def _scored(logits: Tensor, ids: Tensor, temperature: float) -> Choice:
    return Choice(ids, token_terms(logits, ids, temperature=temperature).logprobs)


def _warpers(sampling: Sampling) -> LogitsProcessorList:
    """What cuts tokens off, in the order in which transformers' own generate applies it."""
    warpers = LogitsProcessorList()
    if sampling.temperature not in {0, 1}:
        warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k > 0:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(float(sampling.top_p)))
    if sampling.min_p > 0:
        warpers.append(MinPLogitsWarper(float(sampling.min_p)))
    return warpers
