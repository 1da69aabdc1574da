"""Corrections of the sampler's mismatch.

Completions are drawn by an engine whose log-probs are not quite the trainer's: other kernels,
another precision, or weights of some steps ago. Each function here returns weights for the terms
of the policy loss, made of

    rho = exp(old_logprobs - sampler_logprobs)

the trainer's probability of a token at the start of the update over that under which it was
sampled. Weights are detached, float32 or better, and exactly 1 outside the mask. All of this holds
for samples of the sampler's whole distribution only: with top-p or top-k, its log-probs are those
of another one.
"""

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from lit_align.losses.numerics import check_finite, full_precision
from lit_align.losses.variants import Range, Variants
from lit_align.ops import check_same_shape

CORRECTIONS = Variants(noun="correction")

# exp(10) is 22026: a token that is so much likelier to one of two copies of one model is an
# accident, and no number for a weight. The bound is open-instruct's.
MAX_LOG_RATIO = 10.0
# What is only looked at may be larger, as long as an average of it is a number.
MAX_LOG_RATIO_SHOWN = 40.0

Cap = Annotated[float, Range(least=1)]
Floor = Annotated[float, Range(least=0, below=1)]
Lower = Annotated[float, Range(least=0, below=1)]
Upper = Annotated[float, Range(above=1)]


class Mismatch(NamedTuple):
    """What sampler and trainer say of the same tokens, (B, T) each, detached, float32 or better.

    Outside the mask: 0, ratio 1.

    Attributes:
        difference: old_logprobs - sampler_logprobs, nats.
        ratio: rho; its logarithm is bounded to +-40.
        k1: estimate of KL(sampler || trainer), nats: no bias, of either sign.
        k3: estimate of the same, nats: never negative, of less variance; from the bounded ratio.
    """

    difference: Tensor
    ratio: Tensor
    k1: Tensor
    k3: Tensor


@CORRECTIONS.register("none")
def no_correction() -> None:
    """No weights: reads no sampler's log-probs. Right where the trainer itself samples."""


@CORRECTIONS.register("tis")
def tis(
    old_logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    *,
    tis_cap: Cap = 2.0,
    tis_floor: Floor = 0.0,
) -> Tensor:
    """Truncated importance sampling, token by token.

        weight = min(max(rho, tis_floor), tis_cap)

    Args:
        old_logprobs: under the trainer's policy before the update, (B, T), nats.
        sampler_logprobs: under the policy that sampled, (B, T), nats.
        mask: trained tokens, (B, T) bool. What stands elsewhere does not matter.
        tis_cap: largest weight, dimensionless, >= 1; usually 2 (open-instruct and verl).
        tis_floor: smallest weight, dimensionless, in [0, 1); 0 in the source, 0.5 in OpenRLHF.

    Returns:
        Weights, (B, T), in [tis_floor, tis_cap].

    Raises:
        ValueError: if the shapes differ or a log-prob on the mask is not finite.

    Elsewhere:
        Log-ratios are bounded by 10 in open-instruct, as here, by 20 in verl and not in TRL, which
        takes a NaN of the sampler for a ratio of 1.

    Source:
        Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training",
        https://fengyao.notion.site/off-policy-rl.
    """
    return token_rho(old_logprobs, sampler_logprobs, mask).clamp(tis_floor, tis_cap)


@CORRECTIONS.register("icepop")
def icepop(
    old_logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    *,
    icepop_lower: Lower = 0.5,
    icepop_upper: Upper = 5.0,
) -> Tensor:
    """IcePop: tokens on which the two disagree too much do not count at all.

        weight = rho if icepop_lower <= rho <= icepop_upper else 0

    Args:
        old_logprobs: under the trainer's policy before the update, (B, T), nats.
        sampler_logprobs: under the policy that sampled, (B, T), nats.
        mask: trained tokens, (B, T) bool. What stands elsewhere does not matter.
        icepop_lower: smallest weight that counts, dimensionless, in [0, 1).
        icepop_upper: largest weight that counts, dimensionless, > 1.

    Returns:
        Weights, (B, T), 0 or in [icepop_lower, icepop_upper].

    Raises:
        ValueError: if the shapes differ or a log-prob on the mask is not finite.

    Source:
        Ling team 2025 (Ring-1T), arXiv:2510.18855; the bounds: OpenRLHF.
    """
    ratio = token_rho(old_logprobs, sampler_logprobs, mask)
    return ratio.where((ratio >= icepop_lower) & (ratio <= icepop_upper), 0.0)


def mismatch(old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> Mismatch:
    """How far sampler and trainer are apart, token by token.

        difference = old_logprobs - sampler_logprobs
        ratio = exp(difference);  k1 = -difference;  k3 = ratio - 1 - difference

    Args:
        old_logprobs: under the trainer's policy before the update, (B, T), nats.
        sampler_logprobs: under the policy that sampled, (B, T), nats.
        mask: trained tokens, (B, T) bool. What stands elsewhere does not matter.

    Returns:
        Four tensors to be averaged over the mask.

    Raises:
        ValueError: if the shapes differ or a log-prob on the mask is not finite.

    Source:
        Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html.
    """
    difference = log_rho(old_logprobs, sampler_logprobs, mask)
    bounded = difference.clamp(-MAX_LOG_RATIO_SHOWN, MAX_LOG_RATIO_SHOWN)
    k3 = torch.expm1(bounded) - bounded
    return Mismatch(difference, bounded.exp(), -difference, k3)


def token_rho(old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> Tensor:
    """The ratio rho of each token, its logarithm bounded; 1 outside the mask."""
    log_ratio = log_rho(old_logprobs, sampler_logprobs, mask)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def log_rho(old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> Tensor:
    """The logarithm of rho, detached, float32 or better; 0 outside the mask."""
    given = {"old_logprobs": old_logprobs, "sampler_logprobs": sampler_logprobs}
    check_same_shape(**given, mask=mask)
    # Taken for a ratio of 1, a NaN would hide that the sampler's numbers are missing or wrong.
    check_finite(mask, **given)
    old, sampler = (full_precision(logprobs.detach()) for logprobs in given.values())
    return (old - sampler).where(mask, 0.0)
