"""Surrogates that look at whole completions, with a ratio of their own.

They read old log-probs and a mask, so that which `ratio_level` is chosen does not matter to them.
"""

import math
from typing import Annotated

import torch
from torch import Tensor

from lit_align.losses.numerics import full_precision
from lit_align.losses.policy import SURROGATES, PolicyLoss
from lit_align.losses.ratio import MAX_LOG_RATIO, bounded_exp, log_ratios
from lit_align.losses.variants import Range
from lit_align.ops import check_same_shape, masked_mean

# A completion that has become 10^8 times less likely weighs nothing, however long it is.
MIN_LOG_WEIGHT = math.log(1e-8)

Exponent = Annotated[float, Range(least=0)]
LogClip = Annotated[float, Range(least=0)]


@SURROGATES.register("gmpo")
def gmpo_loss(
    new_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    log_clip_lower: LogClip = 0.4,
    log_clip_higher: LogClip = 0.4,
) -> PolicyLoss:
    """Geometric-mean policy optimization: clip each token's log-ratio, then take their mean.

        loss of every token of a completion = -advantage * exp(mean over its tokens of x)
        x = min(d, clip(d)) where advantage > 0, max(d, clip(d)) elsewhere
        d = new_logprobs - old_logprobs;  clip to [-log_clip_lower, log_clip_higher]

    One token that ran away moves a geometric mean little, so that the range may be wider than that
    of a clip of ratios: 0.4 lets them go from 0.67 to 1.49.

    Args:
        new_logprobs: under the policy in training, (B, T), nats.
        old_logprobs: under the policy as it was when the completions were sampled, (B, T), nats.
        advantages: per token, (B, T), constant.
        mask: trained tokens, (B, T) bool.
        log_clip_lower: how far below 0 a log-ratio counts, nats, >= 0.
        log_clip_higher: how far above 0 it counts, nats, >= 0.

    Returns:
        In the unit of the advantages, one value per row where they are; to be averaged by
        `sequence_mean`. The flags are those of tokens.

    Raises:
        ValueError: if the shapes differ, or a log-prob on the mask is not finite.

    Elsewhere:
        TRL and verl take their bounds of ratios, 0.2, for this range. A completion without tokens
        costs its advantage in TRL; verl averages micro-batch by micro-batch.

    Source:
        Zhao et al. 2025 (GMPO), arXiv:2507.20673, eq. 3 and 4; the range: theirs.
    """
    check_same_shape(new_logprobs=new_logprobs, advantages=advantages)
    gains, moved = full_precision(advantages), log_ratios(new_logprobs, old_logprobs, mask)
    low = (moved < -log_clip_lower) & (gains <= 0)
    high = (moved > log_clip_higher) & (gains > 0)
    kept = torch.where(gains > 0, moved.clamp(max=log_clip_higher), moved.clamp(-log_clip_lower))
    unclipped, clipped = (
        -gains * bounded_exp(masked_mean(log_ratio, mask)).unsqueeze(-1)
        for log_ratio in (moved, kept)
    )
    return PolicyLoss(unclipped, clipped, clipped, low, high)


@SURROGATES.register("vespo")
def vespo_loss(
    new_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    tis_weights: Tensor | None = None,
    *,
    k_positive: Exponent = 2.0,
    lambda_positive: Exponent = 3.0,
    k_negative: Exponent = 3.0,
    lambda_negative: Exponent = 2.0,
) -> PolicyLoss:
    """Variational sequence-level soft policy optimization: a smooth weight of each completion.

        loss = -sg(phi(w)) * advantage * new_logprobs
        w = product over the completion's tokens of (new / old probability) * tis_weights
        phi(w) = w^k * exp(lambda * (1 - w))

    phi(1) is 1; it vanishes where w is 0 or large, without an edge. k and lambda are the positive
    ones where advantage >= 0. Only the gradient of this loss has a meaning, not its value.

    Args:
        new_logprobs: under the policy in training, (B, T), nats.
        old_logprobs: under the policy as it was when the completions were sampled, (B, T), nats.
        advantages: per token, (B, T), constant.
        mask: trained tokens, (B, T) bool.
        tis_weights: weights per token of the sampler's mismatch, (B, T), >= 0; a part of w, which
            compares with the policy that sampled, and no factor besides. 1 outside the mask.
        k_positive: how fast phi falls towards w = 0, dimensionless, >= 0.
        lambda_positive: how fast it falls as w grows, dimensionless, >= 0.
        k_negative: the same for bad completions.
        lambda_negative: the same for bad completions.

    Returns:
        `unclipped`, `clipped` and `losses` are one tensor.

    Raises:
        ValueError: if the shapes differ, or a log-prob on the mask is not finite.

    Source:
        Shen et al. 2026 (VESPO), arXiv:2602.10693, eq. 20; defaults: section 4.1; bounds: TRL.
    """
    check_same_shape(new_logprobs=new_logprobs, advantages=advantages)
    gains = full_precision(advantages)
    moved = log_ratios(new_logprobs, old_logprobs, mask).detach()
    log_weight = moved.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).sum(-1, keepdim=True)
    if tis_weights is not None:
        log_weight = log_weight + full_precision(tis_weights).log().sum(-1, keepdim=True)
    log_weight = log_weight.clamp(MIN_LOG_WEIGHT, MAX_LOG_RATIO)
    decay = 1 - log_weight.exp()
    good, bad = (
        bounded_exp(k * log_weight + lambda_ * decay)
        for k, lambda_ in ((k_positive, lambda_positive), (k_negative, lambda_negative))
    )
    return PolicyLoss.of(-torch.where(gains >= 0, good, bad) * gains * full_precision(new_logprobs))
