"""Losses of single completions, each of which is only known to be desirable or undesirable.

Every function takes one number per completion, (B,), and returns one loss per completion: nothing
is averaged over the batch here. Half-precision input is computed in float32. Values and gradients
are finite wherever the log-probs are.
"""

from typing import Annotated, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_align.losses.numerics import full_precision
from lit_align.losses.pairs import Beta
from lit_align.losses.variants import Range, Variants
from lit_align.ops import check_same_shape

UNPAIRED_LOSSES = Variants()

Weight = Annotated[float, Range(least=0)]


class UnpairedLoss(NamedTuple):
    """What a loss says of each completion, (B,) each, float32 or better.

    The rewards are those inside the loss, detached.
    """

    losses: Tensor
    rewards: Tensor


@UNPAIRED_LOSSES.register("apo_zero_unpaired")
def apo_zero_unpaired_loss(
    policy_logps: Tensor,
    reference_logps: Tensor,
    labels: Tensor,
    *,
    beta: Beta = 0.1,
    desirable_weight: Weight = 1.0,
    undesirable_weight: Weight = 1.0,
) -> UnpairedLoss:
    """Anchored preference optimization, each answer of a pair by itself.

        reward = beta * (policy - reference)
        loss = desirable_weight * (1 - sigmoid(reward))    if desirable
        loss = undesirable_weight * sigmoid(reward)        if not

    Of the two answers of a pair, with weights of 1, it adds up to `apo_zero`.

    Args:
        policy_logps: of the completions under the policy, sums, (B,), nats.
        reference_logps: of the completions under the frozen reference, sums, (B,), nats.
        labels: which completions are desirable, (B,), bool.
        beta: strength of the pull towards the reference, per nat, > 0 (the paper: 0.1).
        desirable_weight: of desirable completions, >= 0; raise it if they are few.
        undesirable_weight: of the others, >= 0.

    Returns:
        Losses, in (0, weight); rewards are beta * (policy - reference), detached.

    Raises:
        ValueError: if the shapes differ, or the labels are not bool.

    Source:
        D'Oosterlinck et al. 2024 (APO), arXiv:2408.06266, eq. 7, its two terms apart.
    """
    rewards = _rewards(policy_logps, reference_logps, labels, beta)
    losses = (-_lead(rewards, labels)).sigmoid()
    return _weighted(losses, rewards, labels, desirable_weight, undesirable_weight)


@UNPAIRED_LOSSES.register("bco")
def bco_loss(
    policy_logps: Tensor,
    reference_logps: Tensor,
    labels: Tensor,
    delta: Tensor | None = None,
    *,
    beta: Beta = 0.01,
    desirable_weight: Weight = 1.0,
    undesirable_weight: Weight = 1.0,
) -> UnpairedLoss:
    """Binary classifier optimization: the reward as the logit of "desirable".

        reward = beta * (policy - reference)
        loss = -desirable_weight * log sigmoid(reward - delta)      if desirable
        loss = -undesirable_weight * log sigmoid(delta - reward)    if not

    Args:
        policy_logps: of the completions under the policy, sums, (B,), nats.
        reference_logps: of the completions under the frozen reference, sums, (B,), nats.
        labels: which completions are desirable, (B,), bool.
        delta: where the two classes meet, a running mean of the rewards, (), nats times beta,
            constant; None stands for 0.
        beta: strength of the pull towards the reference, per nat, > 0 (the paper: 0.01).
        desirable_weight: of desirable completions, >= 0; raise it if they are few.
        undesirable_weight: of the others, >= 0.

    Returns:
        Losses in nats; rewards are beta * (policy - reference), detached.

    Raises:
        ValueError: if the shapes differ, delta is not one number, or the labels are not bool.

    Source:
        Jung et al. 2024 (BCO), arXiv:2404.04656, with its reward shift and without its density
        ratio, which asks for a model of where the two kinds of prompts come from.
    """
    rewards = _rewards(policy_logps, reference_logps, labels, beta)
    shift = rewards.new_zeros(()) if delta is None else delta.detach()
    check_same_shape(delta=shift, one_number=rewards.new_zeros(()))
    losses = -F.logsigmoid(_lead(rewards - shift, labels))
    return _weighted(losses, rewards, labels, desirable_weight, undesirable_weight)


@UNPAIRED_LOSSES.register("kto")
def kto_loss(
    policy_logps: Tensor,
    reference_logps: Tensor,
    labels: Tensor,
    kl: Tensor,
    *,
    beta: Beta = 0.1,
    desirable_weight: Weight = 1.0,
    undesirable_weight: Weight = 1.0,
) -> UnpairedLoss:
    """Kahneman-Tversky optimization: gains and losses against what the policy does anyway.

        h = policy - reference
        loss = desirable_weight * (1 - sigmoid(beta * (h - kl)))      if desirable
        loss = undesirable_weight * (1 - sigmoid(beta * (kl - h)))    if not

    Args:
        policy_logps: of the completions under the policy, sums, (B,), nats.
        reference_logps: of the completions under the frozen reference, sums, (B,), nats.
        labels: which completions are desirable, (B,), bool.
        kl: the reference point z0, (), nats, >= 0, see `reference_point`; no gradient passes.
        beta: strength of the pull towards the reference, per nat, > 0 (the paper: 0.1).
        desirable_weight: of desirable completions, >= 0; the paper advises that the desirable
            rows weigh together 1 to 4/3 times what the others do.
        undesirable_weight: of the others, >= 0.

    Returns:
        Losses, in (0, weight); rewards are beta * h, detached.

    Raises:
        ValueError: if the shapes differ, kl is not one number, or the labels are not bool.

    Elsewhere:
        TRL and Liger take the same mean for kl, HALOs that over terms which are not 0. TRL pairs
        each prompt with the completion of the row before, and so does not shuffle.

    Source:
        Ethayarajh et al. 2024 (KTO), arXiv:2402.01306, section 4.1.
    """
    rewards = _rewards(policy_logps, reference_logps, labels, beta)
    check_same_shape(kl=kl, one_number=rewards.new_zeros(()))
    losses = (-_lead(rewards - beta * kl.detach(), labels)).sigmoid()
    return _weighted(losses, rewards, labels, desirable_weight, undesirable_weight)


def reference_point(log_ratios: Tensor) -> Tensor:
    """KTO's estimate of how far the policy is from its reference, on completions of other prompts.

        z0 = max(0, mean(log_ratios))

    Args:
        log_ratios: log-probs of prompts followed by completions of others, under the policy minus
            under the reference, (N,), nats: of all rows that one step is made of.

    Returns:
        (), nats, >= 0, float32 or better, detached; 0 without any rows.

    Source:
        Ethayarajh et al. 2024 (KTO), arXiv:2402.01306, section 4.1.
    """
    values = full_precision(log_ratios.detach())
    return (values.sum() / max(len(values), 1)).clamp(min=0)


def _rewards(policy_logps: Tensor, reference_logps: Tensor, labels: Tensor, beta: float) -> Tensor:
    """The log-ratio times beta, (B,), of tensors that fit together."""
    check_same_shape(policy_logps=policy_logps, reference_logps=reference_logps, labels=labels)
    if labels.dtype != torch.bool:
        raise ValueError(f"labels must be bool, true for desirable, not {labels.dtype}")
    return beta * (full_precision(policy_logps) - full_precision(reference_logps))


def _lead(rewards: Tensor, labels: Tensor) -> Tensor:
    """By how much each reward is on the side that its label wants."""
    return torch.where(labels, rewards, -rewards)


def _weighted(
    losses: Tensor, rewards: Tensor, labels: Tensor, desirable: float, undesirable: float
) -> UnpairedLoss:
    """Losses times the weight of each row's class."""
    weights = torch.where(labels, losses.new_tensor(desirable), losses.new_tensor(undesirable))
    return UnpairedLoss(weights * losses, rewards.detach())
