"""Surrogates whose trust region is a distance of probabilities, where the clip's is a ratio.

A ratio of 2 is much for a token of probability 0.4 and nothing for one of 0.0004. Both functions
leave out the tokens that have already gone where their advantage points, and there too far.
"""

from typing import Annotated

import torch
from torch import Tensor

from lit_align.losses.numerics import full_precision
from lit_align.losses.policy import SURROGATES, PolicyLoss
from lit_align.losses.ratio import bounded_exp, log_ratios
from lit_align.losses.variants import Range
from lit_align.ops import check_same_shape

Distance = Annotated[float, Range(least=0)]
WeightCap = Annotated[float, Range(least=1)]


@SURROGATES.register("dppo_tv")
def dppo_tv_loss(
    new_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    divergence_lower: Distance = 0.2,
    divergence_higher: Distance = 0.2,
    weight_cap: WeightCap = 20.0,
) -> PolicyLoss:
    """Divergence proximal policy optimization, with the total variation of token or no token.

        loss = -keep * sg(min(ratio, weight_cap)) * advantage * new_logprobs
        keep = 0 where advantage > 0, ratio > 1 and |p - q| > divergence_higher,
                 where advantage <= 0, ratio < 1 and |p - q| > divergence_lower, else 1
        p, q: the token's probability under the new and the old policy

    Only the gradient of this loss has a meaning, not its value.

    Args:
        new_logprobs: under the policy in training, (B, T), nats.
        old_logprobs: under the policy that the tokens were sampled from, (B, T), nats. The paper
            takes the sampler's own log-probs, which makes a correction of its mismatch redundant.
        advantages: per token, (B, T), constant.
        mask: trained tokens, (B, T) bool.
        divergence_lower: how much less probable a bad token may be made, >= 0, a probability.
        divergence_higher: how much more probable a good token may be made, >= 0, a probability.
        weight_cap: largest weight of a token, dimensionless, >= 1.

    Returns:
        `unclipped` has neither mask nor cap, `clipped` and `losses` have both. The flags say where
        a token was left out.

    Raises:
        ValueError: if the shapes differ, or a log-prob on the mask is not finite.

    Elsewhere:
        prime-rl takes the ratio where the log-prob times a constant weight stands here, with the
        same gradient, has no cap, and adds a squared log-ratio.

    Source:
        Qi et al. 2026 (DPPO), arXiv:2602.04879, eq. 12; distances: prime-rl; weight_cap: verl.
    """
    moved = log_ratios(new_logprobs, old_logprobs, mask).detach()
    p, q = (_probability(logprobs) for logprobs in (new_logprobs, old_logprobs))
    far = (p - q).abs()
    outside = far > divergence_lower, far > divergence_higher
    return _masked(new_logprobs, moved, advantages, outside, weight_cap)


@SURROGATES.register("dppo_kl")
def dppo_kl_loss(
    new_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    divergence_lower: Distance = 0.05,
    divergence_higher: Distance = 0.05,
    weight_cap: WeightCap = 20.0,
) -> PolicyLoss:
    """Divergence proximal policy optimization, with the KL of token or no token.

        as `dppo_tv`, with q log(q / p) + (1 - q) log((1 - q) / (1 - p)) in the place of |p - q|

    Args:
        new_logprobs: under the policy in training, (B, T), nats.
        old_logprobs: under the policy that the tokens were sampled from, (B, T), nats.
        advantages: per token, (B, T), constant.
        mask: trained tokens, (B, T) bool.
        divergence_lower: how far down a bad token may be moved, nats, >= 0.
        divergence_higher: how far up a good token may be moved, nats, >= 0.
        weight_cap: largest weight of a token, dimensionless, >= 1.

    Returns:
        As `dppo_tv`.

    Raises:
        ValueError: if the shapes differ, or a log-prob on the mask is not finite.

    Source:
        Qi et al. 2026 (DPPO), arXiv:2602.04879, eq. 14; weight_cap: verl.
    """
    moved = log_ratios(new_logprobs, old_logprobs, mask).detach()
    p, q = (_probability(logprobs) for logprobs in (new_logprobs, old_logprobs))
    least = torch.finfo(p.dtype).tiny
    others = (1 - q) * ((1 - q).clamp(min=least).log() - (1 - p).clamp(min=least).log())
    far = others - q * moved
    outside = far > divergence_lower, far > divergence_higher
    return _masked(new_logprobs, moved, advantages, outside, weight_cap)


def _probability(logprobs: Tensor) -> Tensor:
    """Of log-probs, which rounding may have put above 0."""
    return full_precision(logprobs.detach()).clamp(max=0).exp()


def _masked(
    new_logprobs: Tensor,
    moved: Tensor,
    advantages: Tensor,
    outside: tuple[Tensor, Tensor],
    weight_cap: float,
) -> PolicyLoss:
    """Capped importance weights, and none for tokens that are outside on the way they went."""
    check_same_shape(new_logprobs=new_logprobs, advantages=advantages)
    gains, weights = full_precision(advantages), bounded_exp(moved)
    low = (gains <= 0) & (moved < 0) & outside[0]
    high = (gains > 0) & (moved > 0) & outside[1]
    slope = -gains * full_precision(new_logprobs)
    losses = (slope * weights.clamp(max=weight_cap)).masked_fill(low | high, 0.0)
    return PolicyLoss(slope * weights, losses, losses, low, high)
