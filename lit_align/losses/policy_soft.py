"""Surrogates without an edge: what fades a token out as its ratio leaves 1, and penalties."""

from typing import Annotated

import torch
from torch import Tensor

from lit_align.losses.numerics import full_precision
from lit_align.losses.policy import SURROGATES, PolicyLoss, bounded
from lit_align.losses.ratio import log_ratios
from lit_align.losses.variants import Range
from lit_align.ops import check_same_shape

Temperature = Annotated[float, Range(above=0)]
DroBeta = Annotated[float, Range(least=0)]


@SURROGATES.register("sapo")
def sapo_loss(
    ratio: Tensor,
    advantages: Tensor,
    *,
    tau_positive: Temperature = 1.0,
    tau_negative: Temperature = 1.05,
) -> PolicyLoss:
    """Soft adaptive policy optimization: a gate that closes gradually takes the place of the clip.

        loss = -advantage * sigmoid(tau * (ratio - 1)) * 4 / tau
        tau = tau_positive where advantage > 0, tau_negative elsewhere

    At ratio 1 the gradient is that of the plain policy gradient and largest; to both sides it
    decays. The value there is -2 * advantage / tau, so that it compares with no other loss's.

    Args:
        ratio: of new to old probabilities, (B, T), dimensionless.
        advantages: per token, (B, T), constant.
        tau_positive: how fast the gate closes for good tokens, dimensionless, > 0.
        tau_negative: the same for bad ones; larger, because these are what drifts.

    Returns:
        In the unit of the advantages; `unclipped`, `clipped` and `losses` are one tensor.

    Raises:
        ValueError: if the shapes differ.

    Elsewhere:
        verl averages it by completion whatever its aggregation says.

    Source:
        Gao et al. 2025 (SAPO), arXiv:2511.20347, eq. 5 and 6; the defaults are theirs.
    """
    check_same_shape(ratio=ratio, advantages=advantages)
    gains = full_precision(advantages)
    tau = torch.full_like(gains, tau_negative).masked_fill(gains > 0, tau_positive)
    gate = torch.sigmoid(tau * (bounded(ratio) - 1)) * 4 / tau
    return PolicyLoss.of(-gains * gate)


@SURROGATES.register("dro")
def dro_loss(
    new_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    dro_beta: DroBeta = 0.1,
) -> PolicyLoss:
    """Direct reward optimization: the plain policy gradient, and a square that holds it back.

        loss = -advantage * new_logprobs + dro_beta / 2 * (new_logprobs - old_logprobs)^2

    The gradient is that of the paper's regression of advantages on log-ratios. It has no ratio, and
    so nothing that could explode; a policy that has moved is pulled back rather than masked.

    Args:
        new_logprobs: under the policy in training, (B, T), nats.
        old_logprobs: under the policy as it was when the completions were sampled, (B, T), nats.
        advantages: per token, (B, T), constant.
        mask: trained tokens, (B, T) bool.
        dro_beta: strength of the pull back, in the advantages' unit per nat, >= 0.

    Returns:
        `unclipped`, `clipped` and `losses` are one tensor.

    Raises:
        ValueError: if the shapes differ, or a log-prob on the mask is not finite.

    Source:
        Richemond et al. 2024 (DRO), arXiv:2405.19107, the policy's loss, with a
        group's baseline in the place of the learnt value; token by token, and the default: verl.
    """
    check_same_shape(new_logprobs=new_logprobs, advantages=advantages)
    moved = log_ratios(new_logprobs, old_logprobs, mask)
    gains = full_precision(advantages)
    return PolicyLoss.of(-gains * full_precision(new_logprobs) + dro_beta / 2 * moved.square())
