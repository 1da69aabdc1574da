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
            ids = logits.argmax(-1)
        else:
            ids = inverse_cdf(warp(None, logits).softmax(-1), uniforms)
        temperature = 1.0 if sampling.is_greedy else sampling.temperature
        return Choice(ids, token_terms(logits, ids, temperature=temperature).logprobs)

    return draw


def inverse_cdf(probs: Tensor, uniforms: Tensor) -> Tensor:
    """The first token at which the cumulative probability exceeds the uniform number.

    A token of probability 0 adds nothing to the sum, so it is never the first.

    Args:
        probs: (N, V), >= 0; rows need not sum to exactly 1.
        uniforms: (N,), float64, in [0, 1).

    Returns:
        (N,), int64, in [0, V).
    """
    cumulative = probs.double().cumsum(-1)
    aims = uniforms * cumulative[:, -1]
    ids = torch.searchsorted(cumulative, aims.unsqueeze(-1), right=True)
    # Only NaN gets past the end; its log-prob tells of it later.
    ids = ids.clamp(max=probs.shape[-1] - 1)
    # A device that sums in parallel may round two equal sums apart.
    possible = probs.gather(-1, ids) > 0
    return ids.where(possible, probs.argmax(-1, keepdim=True)).squeeze(-1)


def uniforms_of(seed: int, count: int) -> Tensor:
    """The numbers in [0, 1) that decide the tokens of one completion: (count,), float64, CPU."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, dtype=torch.float64, generator=generator)


def cut_at_stop(ids: list[int], stops: frozenset[int]) -> tuple[list[int], FinishReason]:
    """Ids up to the first one that ends a completion, with it, and whether there is one."""
    end = next((n for n, token in enumerate(ids, 1) if token in stops), None)
    return (ids, "length") if end is None else (ids[:end], "stop")


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
