"""Token filters: which tokens have a policy term.

Each function returns what is kept, (B, T) bool, constant; where it is false, the surrogate's loss
is 0. The KL stays, and denominators count every token, so that a filter makes a step smaller and
changes no other token's part. What stands outside the mask is kept, and means nothing.

Two look at the policy itself, `top_entropy` and `off_policy_sequence`. The others leave out what
the sampler and the trainer disagree on, where a correction weighs it; the two go together. With

    rho = exp(old_logprobs - sampler_logprobs)

`ratio_bounds` and `k3_bound` are what verl's presets of its rollout correction leave out by
(`conf/correction`), and OpenRLHF's seq-mask-tis is `tis` with `ratio_bounds` 0.5 to 5 over
`sequence_mean`.
"""

from collections.abc import Callable
from typing import Annotated

import torch
from torch import Tensor

from lit_align.losses.correction import MAX_LOG_RATIO_SHOWN, Lower, Upper, log_rho, token_rho
from lit_align.losses.numerics import check_finite, full_precision
from lit_align.losses.variants import OneOf, Range, Variants
from lit_align.ops import check_same_shape, masked_mean, masked_sum

FILTERS = Variants(noun="token_filter")

Share = Annotated[float, Range(above=0, most=1)]
Divergence = Annotated[float, Range(above=0)]
TvLower = Annotated[float, Range(least=0)]
# By how many times the precision of a number two entropies may differ that should be equal.
_ROUNDING = 64
LEVELS = ("token", "sequence_sum", "sequence_mean", "sequence_max")
Level = Annotated[str, OneOf(LEVELS)]


@FILTERS.register("none")
def every_token() -> None:
    """Every token counts."""


@FILTERS.register("top_entropy")
def top_entropy(entropy: Tensor, mask: Tensor, *, entropy_share: Share = 0.2) -> Tensor:
    """The tokens at which the policy was least sure: forks, and not the way between them.

        keep = entropy >= the quantile 1 - entropy_share of the entropies on the mask

    Entropies that differ by rounding alone count as equal: all completions of a prompt begin with
    one. The quantile is that of the batch that is passed. For a result that does not depend on how
    a window was cut, that has to be the whole window.

    Args:
        entropy: of the policy's distribution at each token, (B, T), nats.
        mask: trained tokens, (B, T) bool.
        entropy_share: of the tokens that count, in (0, 1]; 1 keeps them all.

    Returns:
        (B, T) bool.

    Raises:
        ValueError: if the shapes differ, or an entropy on the mask is not finite.

    Elsewhere:
        TRL takes the quantile of a micro-batch, in float32.

    Source:
        Wang et al. 2025, "Beyond the 80/20 rule", arXiv:2506.01939, whose objective
        has the indicator; the default is theirs.
    """
    check_same_shape(entropy=entropy, mask=mask)
    check_finite(mask, entropy=entropy)
    entropy = full_precision(entropy.detach())
    ranked = entropy[mask].sort().values
    if not len(ranked):
        return torch.ones_like(mask)
    # torch.quantile stops at 16 million numbers; interpolated linearly, as there.
    place = (1 - entropy_share) * (len(ranked) - 1)
    below, above = ranked[int(place)], ranked[min(int(place) + 1, len(ranked) - 1)]
    quantile = torch.lerp(below, above, place - int(place))
    rounding = _ROUNDING * torch.finfo(entropy.dtype).eps * quantile.clamp(min=1)
    return (entropy >= quantile - rounding) | ~mask


@FILTERS.register("off_policy_sequence")
def off_policy_sequence(
    new_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sampler_logprobs: Tensor | None = None,
    *,
    off_policy_delta: Annotated[float, Range(above=0)] = 0.5,
) -> Tensor:
    """No bad completions that the policy has left behind already.

        keep = 0 where advantage < 0 and
               mean over the completion of (sampler_logprobs - new_logprobs) > off_policy_delta

    Args:
        new_logprobs: under the policy in training, (B, T), nats.
        old_logprobs: under the trainer's policy before the update, (B, T), nats.
        advantages: per token, (B, T).
        mask: trained tokens, (B, T) bool.
        sampler_logprobs: under the policy that sampled, (B, T), nats; None: old_logprobs.
        off_policy_delta: largest mean log-ratio that is learnt from, nats, > 0.

    Returns:
        (B, T) bool.

    Raises:
        ValueError: if the shapes differ, or a log-prob on the mask is not finite.

    Source:
        DeepSeek-V3.2 2025, arXiv:2512.02556, eq. 9; the paper gives no value, TRL suggests 0.5.
    """
    sampled = old_logprobs if sampler_logprobs is None else sampler_logprobs
    check_same_shape(advantages=advantages, mask=mask)
    left_behind = -masked_mean(log_rho(new_logprobs, sampled, mask), mask)
    return ~((advantages < 0) & (left_behind > off_policy_delta).unsqueeze(-1)) | ~mask


@FILTERS.register("total_variation")
def total_variation(
    old_logprobs: Tensor,
    sampler_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    tv_upper: Divergence,
    tv_lower: TvLower = 0.0,
) -> Tensor:
    """In completions that are too far from the sampler's, no token that would go farther.

        keep = 0 where advantage * log rho > 0 and
               mean over the completion of |rho - 1| is not in [tv_lower, tv_upper]

    Args:
        old_logprobs: under the trainer's policy before the update, (B, T), nats.
        sampler_logprobs: under the policy that sampled, (B, T), nats.
        advantages: per token, (B, T).
        mask: trained tokens, (B, T) bool.
        tv_upper: largest distance of a completion that counts whole, dimensionless, > 0.
        tv_lower: smallest one, dimensionless, >= 0.

    Returns:
        (B, T) bool.

    Raises:
        ValueError: if the shapes differ, or a log-prob on the mask is not finite.

    Source:
        VACO 2026, arXiv:2603.01365, as open-instruct reads it, but completion by completion and
        not pack by pack. Neither gives a default.
    """
    check_same_shape(advantages=advantages, mask=mask)
    rho = token_rho(old_logprobs, sampler_logprobs, mask)
    distance = masked_mean((rho - 1).abs(), mask)
    far = (distance < tv_lower) | (distance > tv_upper)
    return ~(far.unsqueeze(-1) & (advantages * rho.log() > 0))


@FILTERS.register("ratio_bounds")
def ratio_bounds(
    old_logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    *,
    bound_over: Level = "token",
    ratio_lower: Lower = 0.5,
    ratio_upper: Upper = 2.0,
) -> Tensor:
    """Rejection by rho: of tokens, or of whole completions.

        keep = ratio_lower <= r <= ratio_upper
        r = rho of the token                               (token)
          = product of rho over the completion             (sequence_sum: of log rho)
          = its geometric mean                             (sequence_mean)
          = rho of each of the completion's tokens, all    (sequence_max)

    Args:
        old_logprobs: under the trainer's policy before the update, (B, T), nats.
        sampler_logprobs: under the policy that sampled, (B, T), nats.
        mask: trained tokens, (B, T) bool.
        bound_over: what is bounded, see above.
        ratio_lower: smallest ratio that is kept, dimensionless, in [0, 1).
        ratio_upper: largest ratio that is kept, dimensionless, > 1.

    Returns:
        (B, T) bool.

    Raises:
        ValueError: if the shapes differ, or a log-prob on the mask is not finite.

    Elsewhere:
        verl calls this k1 and bounds 1 / r where it says r, which only symmetric bounds do not
        show.

    Source:
        Liu et al. 2025, "When speed kills stability", https://richardli.xyz/rl-collapse; bounds:
        verl.
    """
    log_ratio = log_rho(old_logprobs, sampler_logprobs, mask)
    low, high = (_OVER[bound_over](sign * log_ratio, mask) for sign in (-1, 1))
    lower, upper = (torch.tensor(b, dtype=torch.float64).log() for b in (ratio_lower, ratio_upper))
    return ((-low >= lower) & (high <= upper)) | ~mask


@FILTERS.register("k2_bound")
def k2_bound(
    old_logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    *,
    bound_over: Level = "token",
    divergence_bound: Divergence = 0.01,
) -> Tensor:
    """Rejection by half the squared log-ratio: of tokens, or of whole completions.

        keep = x <= divergence_bound, x = (log rho)^2 / 2 of the token, or over the completion its
               sum, mean or largest

    Args:
        old_logprobs: under the trainer's policy before the update, (B, T), nats.
        sampler_logprobs: under the policy that sampled, (B, T), nats.
        mask: trained tokens, (B, T) bool.
        bound_over: "token", "sequence_sum", "sequence_mean" or "sequence_max".
        divergence_bound: largest x that is kept, nats, > 0.

    Returns:
        (B, T) bool.

    Raises:
        ValueError: if the shapes differ, or a log-prob on the mask is not finite.

    Source:
        As `ratio_bounds`.
    """
    log_ratio = log_rho(old_logprobs, sampler_logprobs, mask)
    return _within(log_ratio.square() / 2, mask, bound_over, divergence_bound)


@FILTERS.register("k3_bound")
def k3_bound(
    old_logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    *,
    bound_over: Level = "sequence_mean",
    divergence_bound: Divergence = 0.01,
) -> Tensor:
    """Rejection by the estimate k3 of the KL: of tokens, or of whole completions.

        keep = x <= divergence_bound, x = rho - 1 - log rho of the token, or over the completion
               its sum, mean or largest

    Args:
        old_logprobs: under the trainer's policy before the update, (B, T), nats.
        sampler_logprobs: under the policy that sampled, (B, T), nats.
        mask: trained tokens, (B, T) bool.
        bound_over: "token", "sequence_sum", "sequence_mean" or "sequence_max".
        divergence_bound: largest x that is kept, nats, > 0.

    Returns:
        (B, T) bool.

    Raises:
        ValueError: if the shapes differ, or a log-prob on the mask is not finite.

    Source:
        As `ratio_bounds`; the defaults are those of verl's preset decoupled_k3_rs.
    """
    log_ratio = log_rho(old_logprobs, sampler_logprobs, mask)
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO_SHOWN, MAX_LOG_RATIO_SHOWN)
    return _within(torch.expm1(log_ratio) - log_ratio, mask, bound_over, divergence_bound)


def _largest(values: Tensor, mask: Tensor) -> Tensor:
    """The largest of each row's trained values, (B,)."""
    return values.masked_fill(~mask, -torch.inf).amax(-1)


# What a bound is put on, as wide as a row or as a token, of values and mask.
_OVER: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": lambda values, mask: values,
    "sequence_sum": lambda values, mask: masked_sum(values, mask).unsqueeze(-1),
    "sequence_mean": lambda values, mask: masked_mean(values, mask).unsqueeze(-1),
    "sequence_max": lambda values, mask: _largest(values, mask).unsqueeze(-1),
}


def _within(values: Tensor, mask: Tensor, level: str, bound: float) -> Tensor:
    """Where the values, over what the level says, are not above the bound."""
    return (_OVER[level](values, mask) <= bound) | ~mask
