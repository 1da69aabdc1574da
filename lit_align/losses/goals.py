"""Losses that set each log-ratio a goal and take the square of how far it is from there.

    ratio = policy - reference

w is the preferred and l the other response.
"""

import torch
from torch import Tensor

from lit_align.losses.pairs import (
    PREFERENCE_LOSSES,
    Beta,
    PairLoss,
    log_ratios,
    smoothed_logistic,
)
from lit_align.ops import check_same_shape


@PREFERENCE_LOSSES.register("cal_dpo")
def cal_dpo_loss(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    reference_chosen_logps: Tensor,
    reference_rejected_logps: Tensor,
    *,
    beta: Beta = 1e-3,
) -> PairLoss:
    """DPO at beta 1, and rewards on a scale: the preferred response's is 1/2, the other's -1/2.

        ratio = policy - reference
        loss = -log sigmoid(ratio_w - ratio_l)
            + (ratio_w - 1 / (2 * beta))^2 + (ratio_l + 1 / (2 * beta))^2

    Args:
        policy_chosen_logps: of the preferred responses under the policy, sums, (B,), nats.
        policy_rejected_logps: of the other responses under the policy, sums, (B,), nats.
        reference_chosen_logps: of the preferred responses under the frozen reference, (B,), nats.
        reference_rejected_logps: of the other responses under the frozen reference, (B,), nats.
        beta: reward per nat of log-ratio, > 0; it sets how far the ratios are to go, 1 / (2 * beta)
            nats (the authors' script: 0.001).

    Returns:
        Losses in nats and nats squared; rewards are beta * (policy - reference), detached.

    Raises:
        ValueError: if the four shapes differ.

    Source:
        Xiao et al. 2024 (Cal-DPO), arXiv:2412.14516; the authors' code,
        https://github.com/tengxiao1/Cal-DPO, gives the two squares half of this weight.
    """
    chosen, rejected = log_ratios(
        policy_chosen_logps,
        policy_rejected_logps,
        reference_chosen_logps,
        reference_rejected_logps,
    )
    losses = smoothed_logistic(chosen - rejected) + _squares(chosen, rejected, beta)
    return PairLoss(losses, beta * chosen.detach(), beta * rejected.detach())


@PREFERENCE_LOSSES.register("sppo_hard")
def sppo_hard_loss(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    reference_chosen_logps: Tensor,
    reference_rejected_logps: Tensor,
    *,
    beta: Beta = 1e-3,
) -> PairLoss:
    """Self-play preference optimization: log-ratios as payoffs of a game that the labels decide.

        ratio = policy - reference
        loss = (ratio_w - 1 / (2 * beta))^2 + (ratio_l + 1 / (2 * beta))^2

    Hard: the preferred response is taken to win always. The reference is the policy of the round
    before.

    Args:
        policy_chosen_logps: of the preferred responses under the policy, sums, (B,), nats.
        policy_rejected_logps: of the other responses under the policy, sums, (B,), nats.
        reference_chosen_logps: of the preferred responses under the frozen reference, (B,), nats.
        reference_rejected_logps: of the other responses under the frozen reference, (B,), nats.
        beta: 1 over the paper's eta, per nat, > 0 (the paper: 0.001); the ratios are to be
            1 / (2 * beta) nats.

    Returns:
        Losses in nats squared, the sum of both responses' terms; rewards are
        beta * (policy - reference), detached.

    Raises:
        ValueError: if the four shapes differ.

    Elsewhere:
        TRL and Liger add the two squares; the authors' code takes their mean, half of it.

    Source:
        Wu et al. 2024 (SPPO), arXiv:2405.00675; a sum, as in TRL and Liger: the
        authors' code takes the mean of the two squares, half of it.
    """
    chosen, rejected = log_ratios(
        policy_chosen_logps,
        policy_rejected_logps,
        reference_chosen_logps,
        reference_rejected_logps,
    )
    losses = _squares(chosen, rejected, beta)
    return PairLoss(losses, beta * chosen.detach(), beta * rejected.detach())


@PREFERENCE_LOSSES.register("sppo_soft")
def sppo_soft_loss(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    reference_chosen_logps: Tensor,
    reference_rejected_logps: Tensor,
    label_prob: Tensor | None = None,
    *,
    beta: Beta = 1e-3,
) -> PairLoss:
    """Self-play preference optimization, each response with its own chance to win.

        ratio = policy - reference
        goal = (label_prob - 1/2) / beta
        loss = (ratio_w - goal)^2 + (ratio_l + goal)^2

    A pair whose responses are as good as each other is to stay where the reference has it. Unlike
    the mixture of `sppo_hard` with its sides exchanged, which has the same gradient, it is 0 at
    its least.

    Args:
        policy_chosen_logps: of the preferred responses under the policy, sums, (B,), nats.
        policy_rejected_logps: of the other responses under the policy, sums, (B,), nats.
        reference_chosen_logps: of the preferred responses under the frozen reference, (B,), nats.
        reference_rejected_logps: of the other responses under the frozen reference, (B,), nats.
        label_prob: that the preferred response wins against the other one, (B,), in [0, 1]; a
            column of the data. None stands for 1: then it is `sppo_hard`.
        beta: 1 over the paper's eta, per nat, > 0 (the paper: 0.001).

    Returns:
        Losses in nats squared, the sum of both responses' terms; rewards are
        beta * (policy - reference), detached.

    Raises:
        ValueError: if the shapes differ.

    Source:
        Wu et al. 2024 (SPPO), arXiv:2405.00675, where the chance is that to win against the policy
        of the round before; a sum, as of `sppo_hard`: the authors' code takes the mean.
    """
    chosen, rejected = log_ratios(
        policy_chosen_logps,
        policy_rejected_logps,
        reference_chosen_logps,
        reference_rejected_logps,
    )
    wins = torch.ones_like(chosen) if label_prob is None else label_prob.to(chosen.dtype)
    check_same_shape(policy_chosen_logps=chosen, label_prob=wins)
    losses = _squares(chosen, rejected, beta, wins)
    return PairLoss(losses, beta * chosen.detach(), beta * rejected.detach())


def _squares(chosen: Tensor, rejected: Tensor, beta: float, wins: Tensor | float = 1.0) -> Tensor:
    """How far log-ratios are from where they make rewards of +-(wins - 1/2), squared."""
    goal = (wins - 0.5) / beta
    return (chosen - goal).square() + (rejected + goal).square()
