"""Surrogates for the tokens whose advantage and log-prob go together: they make entropy collapse.

    covariance of a token = (advantage - mean advantage) * (log-prob - mean log-prob)

The means, and how many tokens are a share of all, are those of the batch that is passed. For a
result that does not depend on how a window was cut, that has to be the whole window.
"""

from typing import Annotated

import torch
from torch import Tensor

from lit_align.losses.numerics import full_precision
from lit_align.losses.policy import (
    SURROGATES,
    ClipHigher,
    ClipLower,
    PolicyLoss,
    bounded,
    clip_loss,
)
from lit_align.losses.ratio import log_ratios
from lit_align.losses.variants import Range
from lit_align.ops import check_same_shape, masked_mean

Share = Annotated[float, Range(above=0, most=1)]
Covariance = Annotated[float, Range()]
Penalty = Annotated[float, Range(least=0)]


@SURROGATES.register("clip_cov")
def clip_cov_loss(
    new_logprobs: Tensor,
    ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    draws: Tensor,
    *,
    clip_lower: ClipLower = 0.2,
    clip_higher: ClipHigher = 0.2,
    cov_share: Share = 2e-4,
    cov_lower: Covariance = 1.0,
    cov_upper: Covariance = 5.0,
) -> PolicyLoss:
    """Clip-Cov: PPO's loss, without a few tokens of high covariance that are drawn by lot.

        loss = 0 for the drawn, clip's elsewhere

    Candidates are tokens that the clip leaves alone and whose covariance is between the bounds. Of
    these, a share of all tokens (but at least one) is drawn: those with the smallest `draws`. The
    lot is an argument and not thrown here, so that the same arguments give the same loss, on any
    device and after any resume.

    Args:
        new_logprobs: under the policy in training, (B, T), nats.
        ratio: of new to old probabilities, (B, T), dimensionless.
        advantages: per token, (B, T), constant.
        mask: trained tokens, (B, T) bool.
        draws: one number per token, (B, T), drawn from any continuous distribution.
        clip_lower: how far below 1 the ratio counts, in [0, 1].
        clip_higher: how far above 1 the ratio counts, >= 0.
        cov_share: drawn tokens as a share of all, in (0, 1].
        cov_lower: candidates have a covariance above it, nats times the advantages' unit.
        cov_upper: and below this.

    Returns:
        `unclipped` and `clipped` are those of `clip`. A drawn token is flagged high if its
        advantage is positive, low if not.

    Raises:
        ValueError: if the shapes differ.

    Elsewhere:
        verl draws from the global generator, and takes means over a micro-batch.

    Source:
        Cui et al. 2025, arXiv:2505.22617, eq. 10 to 12; the share and the bounds of the
        covariance: section 4.3; those of the ratio: the authors' code in verl.
    """
    pair = clip_loss(ratio, advantages, clip_lower=clip_lower, clip_higher=clip_higher)
    check_same_shape(new_logprobs=new_logprobs, advantages=advantages, mask=mask, draws=draws)
    covariance = _covariance(new_logprobs, advantages, mask)
    candidates = mask & (covariance > cov_lower) & (covariance < cov_upper)
    candidates &= ~(pair.clipped > pair.unclipped)
    chosen = _largest(-full_precision(draws), candidates, _share_of(cov_share, mask))
    return pair._replace(
        losses=pair.losses.masked_fill(chosen, 0.0),
        clipped_low=pair.clipped_low | (chosen & (advantages <= 0)),
        clipped_high=pair.clipped_high | (chosen & (advantages > 0)),
    )


@SURROGATES.register("kl_cov")
def kl_cov_loss(
    new_logprobs: Tensor,
    old_logprobs: Tensor,
    ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    cov_share: Share = 2e-4,
    cov_penalty: Penalty = 1.0,
) -> PolicyLoss:
    """KL-Cov: no clip, and a penalty on the few tokens of the highest covariance if they move.

        loss = -advantage * ratio + cov_penalty * |new_logprobs - old_logprobs| for the chosen,
               -advantage * ratio elsewhere

    Chosen is a share of all tokens (but at least one), by rank; of equal covariances the earlier.

    Args:
        new_logprobs: under the policy in training, (B, T), nats.
        old_logprobs: under the policy as it was when the completions were sampled, (B, T), nats.
        ratio: of new to old probabilities, (B, T), dimensionless.
        advantages: per token, (B, T), constant.
        mask: trained tokens, (B, T) bool.
        cov_share: chosen tokens as a share of all, in (0, 1].
        cov_penalty: in the advantages' unit per nat, >= 0.

    Returns:
        `unclipped` is without the penalty, `clipped` and `losses` with it. Nothing is flagged.

    Raises:
        ValueError: if the shapes differ.

    Elsewhere:
        verl takes means and ranks over a micro-batch.

    Source:
        Cui et al. 2025, arXiv:2505.22617, eq. 13 and 14; defaults: the authors' code in
        verl (its configuration file has a cov_penalty of 0.1).
    """
    plain = -full_precision(advantages) * bounded(ratio)
    moved = log_ratios(new_logprobs, old_logprobs, mask)
    check_same_shape(ratio=ratio, advantages=advantages, mask=mask)
    covariance = _covariance(new_logprobs, advantages, mask)
    chosen = _largest(covariance, mask, _share_of(cov_share, mask))
    losses = plain + (cov_penalty * moved.abs()).where(chosen, 0.0)
    return PolicyLoss.of(losses)._replace(unclipped=plain)


def _covariance(new_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Each token's part in the covariance of advantage and log-prob, (B, T), detached."""
    logprobs, gains = (
        values - masked_mean(values.flatten(), mask.flatten())
        for values in (full_precision(new_logprobs.detach()), full_precision(advantages))
    )
    return logprobs * gains


def _share_of(share: float, mask: Tensor) -> int:
    """How many tokens are a share of all: rounded down, and at least one."""
    return max(int(share * int(mask.sum())), 1)


def _largest(values: Tensor, among: Tensor, number: int) -> Tensor:
    """The places of the largest values, as many of those that are `among` them, (B, T) bool."""
    ranked = values.masked_fill(~among, -torch.inf).flatten()
    places = ranked.sort(descending=True, stable=True).indices[:number]
    chosen = torch.zeros_like(among).flatten()
    chosen[places] = True
    return chosen.view(among.shape) & among
