"""Corrections that look at more than a token: at whole completions, or at the mean of all weights.

As in `correction`, what stands outside the mask does not matter, and has weight 1.
"""

from torch import Tensor

from lit_align.losses.correction import (
    CORRECTIONS,
    MAX_LOG_RATIO,
    Cap,
    Floor,
    Lower,
    Upper,
    log_rho,
    tis,
)
from lit_align.ops import masked_mean, masked_sum


@CORRECTIONS.register("tis_sequence")
def tis_sequence(
    old_logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    *,
    tis_cap: Cap = 2.0,
    tis_floor: Floor = 0.0,
) -> Tensor:
    """Truncated importance sampling of whole completions.

        weight of every token of a completion
            = min(max(product of rho over its tokens, tis_floor), tis_cap)

    Unbiased but for the cap, where `tis` is not; and of a variance that grows with the length: a
    thousand tokens off by 0.01 nats each, all to one side, make a factor of 22026 or its inverse.

    Args:
        old_logprobs: under the trainer's policy before the update, (B, T), nats.
        sampler_logprobs: under the policy that sampled, (B, T), nats.
        mask: trained tokens, (B, T) bool. What stands elsewhere does not matter.
        tis_cap: largest weight, dimensionless, >= 1; usually 2 (verl).
        tis_floor: smallest weight, dimensionless, in [0, 1).

    Returns:
        Weights, (B, T), in [tis_floor, tis_cap], one value per row.

    Raises:
        ValueError: if the shapes differ or a log-prob on the mask is not finite.

    Elsewhere:
        TRL and verl take the product, open-instruct the geometric mean.

    Source:
        Yao et al. 2025, see `tis`; Liu et al. 2025, "When speed kills stability",
        https://richardli.xyz/rl-collapse.
    """
    log_ratio = log_rho(old_logprobs, sampler_logprobs, mask)
    # An infinite product meets the cap, so that the sum needs no bound.
    weights = masked_sum(log_ratio, mask).exp().clamp(tis_floor, tis_cap)
    return weights.unsqueeze(-1).where(mask, 1.0)


@CORRECTIONS.register("tis_geometric")
def tis_geometric(
    old_logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    *,
    tis_cap: Cap = 2.0,
    tis_floor: Floor = 0.0,
) -> Tensor:
    """Truncated importance sampling of whole completions, by the geometric mean.

        weight of every token of a completion
            = min(max(geometric mean of rho over its tokens, tis_floor), tis_cap)

    No weight that would make an expectation right, but one that does not grow with the length.

    Args:
        old_logprobs: under the trainer's policy before the update, (B, T), nats.
        sampler_logprobs: under the policy that sampled, (B, T), nats.
        mask: trained tokens, (B, T) bool. What stands elsewhere does not matter.
        tis_cap: largest weight, dimensionless, >= 1.
        tis_floor: smallest weight, dimensionless, in [0, 1).

    Returns:
        Weights, (B, T), in [tis_floor, tis_cap], one value per row.

    Raises:
        ValueError: if the shapes differ or a log-prob on the mask is not finite.

    Source:
        open-instruct, rho_mask_sequence_level, completion by completion and not pack by pack.
    """
    log_ratio = log_rho(old_logprobs, sampler_logprobs, mask)
    bounded = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    weights = masked_mean(bounded, mask).exp().clamp(tis_floor, tis_cap)
    return weights.unsqueeze(-1).where(mask, 1.0)


@CORRECTIONS.register("sequence_mask")
def sequence_mask(
    old_logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    *,
    sequence_lower: Lower = 0.0,
    sequence_upper: Upper = 3.0,
) -> Tensor:
    """Masked importance sampling: IcePop for whole completions.

        weight of every token of a completion
            = w if sequence_lower <= w <= sequence_upper else 0, w = product of rho over its tokens

    Long completions are nearly always outside: a hundred tokens off by 0.012 nats each, to one
    side, make a factor of 3.3.

    Args:
        old_logprobs: under the trainer's policy before the update, (B, T), nats.
        sampler_logprobs: under the policy that sampled, (B, T), nats.
        mask: trained tokens, (B, T) bool. What stands elsewhere does not matter.
        sequence_lower: smallest weight that counts, dimensionless, in [0, 1).
        sequence_upper: largest weight that counts, dimensionless, > 1.

    Returns:
        Weights, (B, T), 0 or in [sequence_lower, sequence_upper], one value per row.

    Raises:
        ValueError: if the shapes differ or a log-prob on the mask is not finite.

    Source:
        Liu et al. 2025, "When speed kills stability", https://richardli.xyz/rl-collapse; bounds:
        TRL, whose default this is.
    """
    log_ratio = log_rho(old_logprobs, sampler_logprobs, mask)
    weights = masked_sum(log_ratio, mask).exp()
    kept = (weights >= sequence_lower) & (weights <= sequence_upper)
    return weights.where(kept, 0.0).unsqueeze(-1).where(mask, 1.0)


@CORRECTIONS.register("geometric_mask")
def geometric_mask(
    old_logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    *,
    mask_lower: Lower = 0.999,
    mask_upper: Upper = 1.001,
) -> Tensor:
    """Completions on which the two disagree too much do not count at all.

        weight of every token of a completion
            = 1 if mask_lower <= geometric mean of rho over its tokens <= mask_upper else 0

    Unlike the product, the mean does not grow with the length. What is kept is not weighted.

    Args:
        old_logprobs: under the trainer's policy before the update, (B, T), nats.
        sampler_logprobs: under the policy that sampled, (B, T), nats.
        mask: trained tokens, (B, T) bool. What stands elsewhere does not matter.
        mask_lower: smallest geometric mean that counts, dimensionless, in [0, 1).
        mask_upper: largest geometric mean that counts, dimensionless, > 1.

    Returns:
        Weights, (B, T), 0 or 1, one value per row; 1 in a row without tokens.

    Raises:
        ValueError: if the shapes differ or a log-prob on the mask is not finite.

    Source:
        Liu et al. 2025, "When speed kills stability", https://richardli.xyz/rl-collapse; bounds:
        verl.
    """
    log_ratio = log_rho(old_logprobs, sampler_logprobs, mask)
    ratio = masked_mean(log_ratio, mask).exp()
    kept = (ratio >= mask_lower) & (ratio <= mask_upper)
    return kept.to(log_ratio.dtype).unsqueeze(-1).where(mask, 1.0)


@CORRECTIONS.register("tis_normalised")
def tis_normalised(
    old_logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    *,
    tis_cap: Cap = 2.0,
    tis_floor: Floor = 0.0,
) -> Tensor:
    """`tis`, divided by the mean weight of all tokens: self-normalised importance sampling.

        weight = tis / mean of tis over the mask

    The mean is that of the batch that is passed. For a result that does not depend on how a window
    was cut, that has to be the whole window.

    Args:
        old_logprobs: under the trainer's policy before the update, (B, T), nats.
        sampler_logprobs: under the policy that sampled, (B, T), nats.
        mask: trained tokens, (B, T) bool. What stands elsewhere does not matter.
        tis_cap: largest weight before the division, dimensionless, >= 1.
        tis_floor: smallest one, dimensionless, in [0, 1).

    Returns:
        Weights, (B, T), of mean 1 on the mask.

    Raises:
        ValueError: if the shapes differ or a log-prob on the mask is not finite.

    Source:
        verl, rollout_is_batch_normalize; Owen 2013, "Monte Carlo theory, methods and examples",
        section 9.2.
    """
    weights = tis(old_logprobs, sampler_logprobs, mask, tis_cap=tis_cap, tis_floor=tis_floor)
    return _of_mean_1(weights, weights[mask], mask)


@CORRECTIONS.register("tis_sequence_normalised")
def tis_sequence_normalised(
    old_logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    *,
    tis_cap: Cap = 2.0,
    tis_floor: Floor = 0.0,
) -> Tensor:
    """`tis_sequence`, divided by the mean weight of all completions.

        weight = tis_sequence / mean of tis_sequence over the rows

    The mean is that of the batch that is passed, of the rows that have tokens. For a result that
    does not depend on how a window was cut, that has to be the whole window.

    Args:
        old_logprobs: under the trainer's policy before the update, (B, T), nats.
        sampler_logprobs: under the policy that sampled, (B, T), nats.
        mask: trained tokens, (B, T) bool. What stands elsewhere does not matter.
        tis_cap: largest weight before the division, dimensionless, >= 1.
        tis_floor: smallest one, dimensionless, in [0, 1).

    Returns:
        Weights, (B, T), one value per row.

    Raises:
        ValueError: if the shapes differ or a log-prob on the mask is not finite.

    Source:
        As `tis_normalised`.
    """
    weights = tis_sequence(
        old_logprobs, sampler_logprobs, mask, tis_cap=tis_cap, tis_floor=tis_floor
    )
    return _of_mean_1(weights, masked_mean(weights, mask)[mask.any(-1)], mask)


def _of_mean_1(weights: Tensor, counted: Tensor, mask: Tensor) -> Tensor:
    """Weights over the mean of those that are counted; as they are where these have none."""
    mean = counted.sum() / max(len(counted), 1)
    return (weights / mean.where(mean > 0, 1.0)).where(mask, 1.0)
