"""Surrogates: from ratios and advantages to one loss a token.

Every function takes tensors of one shape, (B, T), and averages nothing: which tokens count, and for
how much, is said by an aggregation. Half-precision input is computed in float32. Advantages are
constants, one per token: of a completion its own, repeated. Here are the clips; in `policy_soft`
and `policy_divergence` is what takes their place token by token, in `policy_sequence` what looks at
whole completions, and in `policy_covariance` what looks at the whole batch.

A ratio is bounded by exp(20), as those of `RATIOS` are, so that an infinite one times an advantage
of 0 is 0. The gradient by the ratio is finite, too; what the caller's own exp makes of it, if that
overflowed, is beyond reach: take ratios from `RATIOS`.
"""

import math
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from lit_align.errors import UserError
from lit_align.losses.numerics import full_precision
from lit_align.losses.ratio import MAX_LOG_RATIO
from lit_align.losses.variants import Range, Variants
from lit_align.ops import check_same_shape

SURROGATES = Variants(
    aliases={"dapo": "clip", "geo_mean": "gmpo", "gpg": "reinforce", "vanilla": "dual_clip"},
    noun="loss_fn",
)

ClipLower = Annotated[float, Range(least=0, most=1)]
ClipHigher = Annotated[float, Range(least=0)]
DualClip = Annotated[float, Range(above=1)]
Delta = Annotated[float, Range(above=1)]
WeightFloor = Annotated[float, Range(least=0, most=1)]


class PolicyLoss(NamedTuple):
    """What a surrogate says of each token, (B, T) each.

    Attributes:
        unclipped: the loss as it would be without a clip, float32 or better.
        clipped: the loss as the clip makes it.
        losses: to be minimised; the larger of the two unless the surrogate says otherwise.
        clipped_low: bool, where the ratio is too small and the clip acts: it takes the token's
            gradient (or, of `cispo`, changes its weight).
        clipped_high: bool, the same where the ratio is too large.
    """

    unclipped: Tensor
    clipped: Tensor
    losses: Tensor
    clipped_low: Tensor
    clipped_high: Tensor

    @classmethod
    def of(
        cls, losses: Tensor, *, low: Tensor | None = None, high: Tensor | None = None
    ) -> "PolicyLoss":
        """One loss for all three, of a surrogate without two of them; None: nothing is clipped."""
        nowhere = torch.zeros_like(losses, dtype=torch.bool)
        return cls(
            unclipped=losses,
            clipped=losses,
            losses=losses,
            clipped_low=nowhere if low is None else low,
            clipped_high=nowhere if high is None else high,
        )

    def weighted(self, weights: Tensor | None) -> "PolicyLoss":
        """Every loss times its token's weight, >= 0, (B, T); None: as it is.

        Of a token without weight there is nothing that a clip could take.
        """
        if weights is None:
            return self
        counts = weights != 0
        return PolicyLoss(
            unclipped=weights * self.unclipped,
            clipped=weights * self.clipped,
            losses=weights * self.losses,
            clipped_low=self.clipped_low & counts,
            clipped_high=self.clipped_high & counts,
        )


@SURROGATES.register("clip")
def clip_loss(
    ratio: Tensor,
    advantages: Tensor,
    *,
    clip_lower: ClipLower = 0.2,
    clip_higher: ClipHigher = 0.28,
) -> PolicyLoss:
    """Clipped importance sampling: PPO's loss, with a bound of its own on each side.

        loss = max(-advantage * ratio, -advantage * clip(ratio, 1 - clip_lower, 1 + clip_higher))

    A token whose ratio has already gone where its advantage points, and beyond the bound, has no
    gradient. With the upper bound the higher, unlikely tokens can gain (DAPO's clip-higher).

    Args:
        ratio: of new to old probabilities, (B, T), dimensionless.
        advantages: per token, (B, T), constant.
        clip_lower: how far below 1 the ratio counts, in [0, 1]; usually 0.2.
        clip_higher: how far above 1 the ratio counts, >= 0; usually 0.2 (PPO) or 0.28 (DAPO).

    Returns:
        In the unit of the advantages.

    Raises:
        ValueError: if the shapes differ.

    Elsewhere:
        open-instruct, TRL and Liger do not bound the log-ratio, so that one which overflows makes
        NaN of an advantage of 0; verl and OpenRLHF bound it by 20, as here. In TRL `dapo` names an
        aggregation and sets no bounds.

    Source:
        Schulman et al. 2017, arXiv:1707.06347, eq. 7; two bounds: Yu et al. 2025 (DAPO),
        arXiv:2503.14476, eq. 8.
    """
    check_same_shape(ratio=ratio, advantages=advantages)
    ratio = bounded(ratio)
    return _clipped(ratio, ratio, advantages, 1 - clip_lower, 1 + clip_higher)


@SURROGATES.register("dual_clip")
def dual_clip_loss(
    ratio: Tensor,
    advantages: Tensor,
    *,
    clip_lower: ClipLower = 0.2,
    clip_higher: ClipHigher = 0.28,
    dual_clip: DualClip = 3.0,
) -> PolicyLoss:
    """PPO's loss, and no token costs more than a multiple of its advantage.

        loss = min(clip's, -advantage * dual_clip) where advantage < 0, clip's elsewhere

    `clip` bounds what a bad token's ratio may gain by falling, and not what a large one costs.

    Args:
        ratio: of new to old probabilities, (B, T), dimensionless.
        advantages: per token, (B, T), constant.
        clip_lower: how far below 1 the ratio counts, in [0, 1].
        clip_higher: how far above 1 the ratio counts, >= 0.
        dual_clip: largest ratio that a negative advantage is charged for, > 1; usually 3.

    Returns:
        In the unit of the advantages; `unclipped` and `clipped` are those of `clip`.

    Raises:
        ValueError: if the shapes differ.

    Elsewhere:
        verl has it in every run of its `vanilla` loss, OpenRLHF as an option, TRL and open-instruct
        not at all.

    Source:
        Ye et al. 2020, arXiv:1912.09729, "dual-clip PPO"; the default is theirs.
    """
    pair = clip_loss(ratio, advantages, clip_lower=clip_lower, clip_higher=clip_higher)
    ceiling = -dual_clip * full_precision(advantages)
    losses = torch.minimum(pair.losses, ceiling).where(advantages < 0, pair.losses)
    cut = losses < pair.losses
    return pair._replace(losses=losses, clipped_high=pair.clipped_high | cut)


@SURROGATES.register("two_sided")
def two_sided_loss(
    ratio: Tensor,
    advantages: Tensor,
    *,
    clip_lower: ClipLower = 0.2,
    clip_higher: ClipHigher = 0.28,
    delta: Delta = 4.0,
) -> PolicyLoss:
    """PPO's loss, with a bound on the ratio that holds whatever the advantage's sign.

        loss = max(-advantage * min(ratio, delta), -advantage * clip(ratio, ...))

    Args:
        ratio: of new to old probabilities, (B, T), dimensionless.
        advantages: per token, (B, T), constant.
        clip_lower: how far below 1 the ratio counts, in [0, 1].
        clip_higher: how far above 1 the ratio counts, >= 0.
        delta: largest ratio there is, > 1 + clip_higher.

    Returns:
        In the unit of the advantages.

    Raises:
        ValueError: if the shapes differ.
        UserError: if delta does not leave clip_higher something to do.

    Elsewhere:
        TRL counts the inner clip alone as clipping. With `cispo`, `sapo` and `vespo` Liger refuses
        delta and TRL ignores it.

    Source:
        Prime Intellect 2025 (INTELLECT-2), arXiv:2505.07291, "two-sided GRPO clipping".
    """
    check_same_shape(ratio=ratio, advantages=advantages)
    if delta <= 1 + clip_higher:
        raise UserError(
            f"delta must be above 1 + clip_higher = {1 + clip_higher:g}, not {delta:g}: "
            "at or below it, it would take the place of the upper clip"
        )
    ratio = bounded(ratio)
    pair = _clipped(ratio.clamp(max=delta), ratio, advantages, 1 - clip_lower, 1 + clip_higher)
    cut = (advantages < 0) & (ratio > delta)
    return pair._replace(clipped_high=pair.clipped_high | cut)


@SURROGATES.register("cispo")
def cispo_loss(
    new_logprobs: Tensor,
    ratio: Tensor,
    advantages: Tensor,
    *,
    clip_higher: ClipHigher = 0.28,
    weight_floor: WeightFloor = 0.0,
) -> PolicyLoss:
    """Clipped importance weights: the clip bounds a token's weight and never takes its gradient.

        loss = -sg(clip(ratio, weight_floor, 1 + clip_higher)) * advantage * new_logprobs

    Only the gradient of this loss has a meaning, not its value.

    Args:
        new_logprobs: under the policy in training, (B, T), nats.
        ratio: of new to old probabilities, (B, T), dimensionless; used as a constant.
        advantages: per token, (B, T), constant.
        clip_higher: the largest weight is 1 + clip_higher; >= 0.
        weight_floor: the smallest weight, in [0, 1]; 0: no bound.

    Returns:
        `unclipped`, `clipped` and `losses` are one tensor. `clipped_low` and `clipped_high` say
        where the weight is not the ratio, whatever the advantage.

    Raises:
        ValueError: if the shapes differ.

    Elsewhere:
        The cap is 1 + clip_higher in open-instruct and verl as well; TRL and Liger give the cap
        itself, and TRL's default of 0.2 is below every ratio on policy. verl uses the lower bound
        of the equation, `weight_floor` = 1 - its lower epsilon; the authors did not.

    Source:
        MiniMax-M1 2025, arXiv:2506.13585, eq. 4 and 5.
    """
    check_same_shape(new_logprobs=new_logprobs, ratio=ratio, advantages=advantages)
    ratio = bounded(ratio.detach())
    weights = ratio.clamp(weight_floor, 1 + clip_higher)
    losses = -weights * full_precision(advantages) * full_precision(new_logprobs)
    return PolicyLoss.of(losses, low=ratio < weight_floor, high=ratio > 1 + clip_higher)


@SURROGATES.register("reinforce")
def reinforce_loss(new_logprobs: Tensor, advantages: Tensor) -> PolicyLoss:
    """The plain policy gradient: no ratio, and so nothing to clip.

        loss = -advantage * new_logprobs

    Right for one optimizer step a rollout; after it, the completions are another policy's.

    Args:
        new_logprobs: under the policy in training, (B, T), nats.
        advantages: per token, (B, T), constant.

    Returns:
        `unclipped`, `clipped` and `losses` are one tensor.

    Raises:
        ValueError: if the shapes differ.

    Source:
        Williams 1992, doi:10.1007/BF00992696.
    """
    check_same_shape(new_logprobs=new_logprobs, advantages=advantages)
    return PolicyLoss.of(-full_precision(advantages) * full_precision(new_logprobs))


def bounded(ratio: Tensor) -> Tensor:
    """No larger than a ratio can be."""
    return full_precision(ratio).clamp(max=math.exp(MAX_LOG_RATIO))


def _clipped(
    charged: Tensor, ratio: Tensor, advantages: Tensor, lowest: float, highest: float
) -> PolicyLoss:
    """The larger of two losses: of the ratio that is charged for, and of the clipped one."""
    gains = full_precision(advantages)
    unclipped, clipped = -gains * charged, -gains * ratio.clamp(lowest, highest)
    return PolicyLoss(
        unclipped,
        clipped,
        torch.maximum(unclipped, clipped),
        (ratio < lowest) & (gains < 0),
        (ratio > highest) & (gains > 0),
    )
