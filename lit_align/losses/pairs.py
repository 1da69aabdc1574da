"""What all losses of preference pairs share: their table, what they return, their arithmetic."""

from typing import Annotated, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_align.losses.numerics import full_precision
from lit_align.losses.variants import Range, Variants
from lit_align.names import LOSS_ALIASES
from lit_align.ops import check_same_shape

# Defaults are ours under either name.
PREFERENCE_LOSSES = Variants(aliases=LOSS_ALIASES)
PREFERENCE_LOSSES.hints["tr_dpo"] = "dpo, and the callback ReferenceRefresh in the Trainer"

Beta = Annotated[float, Range(above=0)]
GammaBetaRatio = Annotated[float, Range(least=0)]
LabelSmoothing = Annotated[float, Range(least=0, below=0.5)]

# Where an exponential goes on as its tangent: e^50 times a log-ratio of 1e4 is far inside float32,
# and a policy that differs by that much on one response was lost before.
MAX_EXPONENT = 50.0


class PairLoss(NamedTuple):
    """What a preference loss says of each pair, (B,) each, float32 or better.

    The rewards are those inside the loss, detached.
    """

    losses: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor


def log_ratios(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    reference_chosen_logps: Tensor,
    reference_rejected_logps: Tensor,
) -> tuple[Tensor, Tensor]:
    """By how much the policy finds each response likelier than the reference does.

        policy - reference

    Returns:
        Of the chosen and of the rejected responses, (B,) each, nats, float32 or better.

    Raises:
        ValueError: if the four shapes differ.
    """
    check_same_shape(
        policy_chosen_logps=policy_chosen_logps,
        policy_rejected_logps=policy_rejected_logps,
        reference_chosen_logps=reference_chosen_logps,
        reference_rejected_logps=reference_rejected_logps,
    )
    return (
        full_precision(policy_chosen_logps) - full_precision(reference_chosen_logps),
        full_precision(policy_rejected_logps) - full_precision(reference_rejected_logps),
    )


def implicit_rewards(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    reference_chosen_logps: Tensor,
    reference_rejected_logps: Tensor,
    beta: float,
) -> tuple[Tensor, Tensor]:
    """DPO's rewards of the chosen and of the rejected responses: `beta` times `log_ratios`."""
    chosen, rejected = log_ratios(
        policy_chosen_logps,
        policy_rejected_logps,
        reference_chosen_logps,
        reference_rejected_logps,
    )
    return beta * chosen, beta * rejected


def policy_logps(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
) -> tuple[Tensor, Tensor]:
    """Both as they are, float32 or better: the input of a loss without a reference.

    Raises:
        ValueError: if the shapes differ.
    """
    check_same_shape(
        policy_chosen_logps=policy_chosen_logps, policy_rejected_logps=policy_rejected_logps
    )
    return full_precision(policy_chosen_logps), full_precision(policy_rejected_logps)


def smoothed_logistic(
    margin: Tensor, label_smoothing: float = 0.0, lead: Tensor | float = 0.0
) -> Tensor:
    """-log sigmoid(margin), for a share of `label_smoothing` of the pairs -log sigmoid(-margin).

    A `lead` is taken off the margin of whichever response is the preferred one.
    """
    kept = (1 - label_smoothing) * F.logsigmoid(margin - lead)
    return -kept - label_smoothing * F.logsigmoid(-margin - lead)


def required_lead(margin: Tensor | None, rewards: Tensor) -> Tensor | float:
    """What each pair asks for by its `margin`, (B,), float32 or better; 0 if none does.

    Raises:
        ValueError: if the shapes differ.
    """
    if margin is None:
        return 0.0
    check_same_shape(rewards=rewards, margin=margin)
    return full_precision(margin)


def tangent_expm1(exponent: Tensor) -> Tensor:
    """exp(exponent) - 1, continued by its tangent above `MAX_EXPONENT`.

    A bound would take the gradient where it is needed most; the tangent keeps its sign.
    """
    inside = exponent.clamp(max=MAX_EXPONENT)
    return torch.expm1(inside) + torch.exp(inside.detach()) * F.relu(exponent - MAX_EXPONENT)


def power_log(logps: Tensor, alpha: float) -> Tensor:
    """The logarithm's relative (1 - p^-alpha) / alpha at p = exp(logps); the logarithm at alpha 0.

    Source:
        Box and Cox 1964, with lambda = -alpha.
    """
    return logps if alpha == 0 else -tangent_expm1(-alpha * logps) / alpha
