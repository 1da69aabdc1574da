"""Alignment via optimal transport: whole distributions are compared, not pair by pair.

The batch is the sample. Values of two samples are matched by rank, the smallest with the smallest,
so a loss depends on all pairs that are given together, and the batch given must be the whole
window of an optimizer step: matched within micro-batches it would be another loss. `DPOModule` sees
to that, however a step is cut; in validation, each batch is a sample of its own.
"""

from torch import Tensor

from lit_align.losses.numerics import full_precision
from lit_align.losses.pairs import (
    PREFERENCE_LOSSES,
    Beta,
    LabelSmoothing,
    PairLoss,
    log_ratios,
    smoothed_logistic,
)


@PREFERENCE_LOSSES.register("aot", whole_window=True)
def aot_loss(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    reference_chosen_logps: Tensor,
    reference_rejected_logps: Tensor,
    *,
    beta: Beta = 0.01,
    label_smoothing: LabelSmoothing = 0.0,
) -> PairLoss:
    """Paired alignment via optimal transport: the policy's leads dominate the reference's.

        lead = logp_w - logp_l, of the policy and of the reference
        margin = beta * (lead of the policy - lead of the reference of the same rank)
        loss = -(1 - label_smoothing) * log sigmoid(margin) - label_smoothing * log sigmoid(-margin)

    The batch given must be the whole window of the optimizer step.

    Args:
        policy_chosen_logps: of the preferred responses under the policy, sums, (B,), nats.
        policy_rejected_logps: of the other responses under the policy, sums, (B,), nats.
        reference_chosen_logps: of the preferred responses under the frozen reference, (B,), nats.
        reference_rejected_logps: of the other responses under the frozen reference, (B,), nats.
        beta: scale of the log-ratios, per nat, > 0 (the paper: 0.01).
        label_smoothing: share of pairs taken to be mislabelled, in [0, 0.5).

    Returns:
        Losses in nats, each at the pair whose lead under the policy it is of; rewards are
        beta * (policy - reference) of the pair's own responses, detached.

    Raises:
        ValueError: if the four shapes differ.

    Source:
        Melnyk et al. 2024 (AOT), arXiv:2406.05882, paired.
    """
    chosen, rejected = log_ratios(
        policy_chosen_logps,
        policy_rejected_logps,
        reference_chosen_logps,
        reference_rejected_logps,
    )
    policy = full_precision(policy_chosen_logps) - full_precision(policy_rejected_logps)
    reference = full_precision(reference_chosen_logps) - full_precision(reference_rejected_logps)
    losses = smoothed_logistic(beta * (policy - _matched(reference, policy)), label_smoothing)
    return PairLoss(losses, beta * chosen.detach(), beta * rejected.detach())


@PREFERENCE_LOSSES.register("aot_unpaired", whole_window=True)
def aot_unpaired_loss(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    reference_chosen_logps: Tensor,
    reference_rejected_logps: Tensor,
    *,
    beta: Beta = 0.01,
    label_smoothing: LabelSmoothing = 0.0,
) -> PairLoss:
    """Unpaired alignment via optimal transport: rewards of preferred responses dominate the others.

        margin = beta * (ratio_w - ratio_l of the same rank), ratio = policy - reference
        loss = -(1 - label_smoothing) * log sigmoid(margin) - label_smoothing * log sigmoid(-margin)

    Which rejected response belongs to which chosen one does not matter. The batch given must be the
    whole window of the optimizer step.

    Args:
        policy_chosen_logps: of the preferred responses under the policy, sums, (B,), nats.
        policy_rejected_logps: of the other responses under the policy, sums, (B,), nats.
        reference_chosen_logps: of the preferred responses under the frozen reference, (B,), nats.
        reference_rejected_logps: of the other responses under the frozen reference, (B,), nats.
        beta: scale of the log-ratios, per nat, > 0 (the paper: 0.01).
        label_smoothing: share of pairs taken to be mislabelled, in [0, 0.5).

    Returns:
        Losses in nats, each at the pair whose preferred response it is of; rewards are
        beta * (policy - reference) of the pair's own responses, detached.

    Raises:
        ValueError: if the four shapes differ.

    Source:
        Melnyk et al. 2024 (AOT), arXiv:2406.05882, unpaired.
    """
    chosen, rejected = log_ratios(
        policy_chosen_logps,
        policy_rejected_logps,
        reference_chosen_logps,
        reference_rejected_logps,
    )
    losses = smoothed_logistic(beta * (chosen - _matched(rejected, chosen)), label_smoothing)
    return PairLoss(losses, beta * chosen.detach(), beta * rejected.detach())


def _matched(values: Tensor, others: Tensor) -> Tensor:
    """For each of `others` the one of `values` that has the same rank, (B,)."""
    ranks = others.detach().argsort(stable=True).argsort(stable=True)
    return values.sort(stable=True).values[ranks]
