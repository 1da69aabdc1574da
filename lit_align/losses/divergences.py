"""DPO under other divergences than the reverse KL: the log-ratio gives way to a function of it.

    rho = policy - reference
    reward = beta * f'(exp(rho)), plus a constant that makes it 0 where policy and reference agree

The divergence is that of the objective which the policy maximises: reward minus beta times it.
"""

import math
from typing import Annotated

from torch import Tensor
from torch.nn import functional as F

from lit_align.losses.pairs import (
    PREFERENCE_LOSSES,
    Beta,
    LabelSmoothing,
    PairLoss,
    log_ratios,
    power_log,
    smoothed_logistic,
    tangent_expm1,
)
from lit_align.losses.variants import Range

DivergenceAlpha = Annotated[float, Range(least=0, most=1)]
RMax = Annotated[float, Range(above=0)]


@PREFERENCE_LOSSES.register("chi_po")
def chi_po_loss(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    reference_chosen_logps: Tensor,
    reference_rejected_logps: Tensor,
    *,
    beta: Beta = 0.05,
    r_max: RMax = 10.0,
) -> PairLoss:
    """DPO under a mixture of chi-squared divergence and KL, against overoptimization.

        reward = beta * (rho + exp(rho) - 1)
        margin = min(2 * r_max, max(-2 * r_max, reward_w - reward_l))
        loss = -log sigmoid(margin)

    A response that the policy makes likelier than the reference gets its reward at an exponential
    price. Above 50 nats of log-ratio the exponential goes on as its tangent.

    Args:
        policy_chosen_logps: of the preferred responses under the policy, sums, (B,), nats.
        policy_rejected_logps: of the other responses under the policy, sums, (B,), nats.
        reference_chosen_logps: of the preferred responses under the frozen reference, (B,), nats.
        reference_rejected_logps: of the other responses under the frozen reference, (B,), nats.
        beta: strength of the pull towards the reference, > 0 (the paper's experiments: 0.05 and
            0.005).
        r_max: bound of the true rewards, > 0; pairs whose margin is beyond twice as much have no
            gradient. The paper leaves its value open.

    Returns:
        Losses in nats; rewards are those above, detached.

    Raises:
        ValueError: if the four shapes differ.

    Source:
        Huang et al. 2024 (chi-PO), arXiv:2407.13399, algorithm 1.
    """
    chosen, rejected = log_ratios(
        policy_chosen_logps,
        policy_rejected_logps,
        reference_chosen_logps,
        reference_rejected_logps,
    )
    chosen_rewards = beta * (chosen + tangent_expm1(chosen))
    rejected_rewards = beta * (rejected + tangent_expm1(rejected))
    margin = (chosen_rewards - rejected_rewards).clamp(-2 * r_max, 2 * r_max)
    losses = smoothed_logistic(margin)
    return PairLoss(losses, chosen_rewards.detach(), rejected_rewards.detach())


@PREFERENCE_LOSSES.register("dpo_alpha")
def dpo_alpha_loss(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    reference_chosen_logps: Tensor,
    reference_rejected_logps: Tensor,
    *,
    beta: Beta = 0.1,
    alpha: DivergenceAlpha = 0.5,
    label_smoothing: LabelSmoothing = 0.0,
) -> PairLoss:
    """DPO under an alpha-divergence: from the reverse KL (alpha 0) to the forward KL (alpha 1).

        reward = beta * (1 - exp(-alpha * rho)) / alpha
        loss = -log sigmoid(reward_w - reward_l), smoothed as in `dpo`

    Where alpha * rho falls below -50 the exponential goes on as its tangent.

    Args:
        policy_chosen_logps: of the preferred responses under the policy, sums, (B,), nats.
        policy_rejected_logps: of the other responses under the policy, sums, (B,), nats.
        reference_chosen_logps: of the preferred responses under the frozen reference, (B,), nats.
        reference_rejected_logps: of the other responses under the frozen reference, (B,), nats.
        beta: strength of the pull towards the reference, > 0 (the paper: 0.1).
        alpha: the paper's alpha, in [0, 1]; usually 0.3 to 0.7. TRL's `f_alpha_divergence_coef` is
            1 - alpha.
        label_smoothing: share of pairs taken to be mislabelled, in [0, 0.5).

    Returns:
        Losses in nats; rewards are those above, detached.

    Raises:
        ValueError: if the four shapes differ.

    Elsewhere:
        TRL's exponent is alpha - 1, the same at 0.5 alone; it logs beta * log-ratio as rewards. The
        authors' code leaves the constant 1 / alpha out of them, which cancels in the loss.

    Source:
        Wang et al. 2023 (f-DPO), arXiv:2309.16240, table 1.
    """
    chosen, rejected = log_ratios(
        policy_chosen_logps,
        policy_rejected_logps,
        reference_chosen_logps,
        reference_rejected_logps,
    )
    return _logistic(
        beta * power_log(chosen, alpha), beta * power_log(rejected, alpha), label_smoothing
    )


@PREFERENCE_LOSSES.register("dpo_forward_kl")
def dpo_forward_kl_loss(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    reference_chosen_logps: Tensor,
    reference_rejected_logps: Tensor,
    *,
    beta: Beta = 0.1,
    label_smoothing: LabelSmoothing = 0.0,
) -> PairLoss:
    """DPO under the forward KL, which wants all that the reference may say to stay possible.

        reward = beta * (1 - exp(-rho))
        loss = -log sigmoid(reward_w - reward_l), smoothed as in `dpo`

    Where rho falls below -50 the exponential goes on as its tangent.

    Args:
        policy_chosen_logps: of the preferred responses under the policy, sums, (B,), nats.
        policy_rejected_logps: of the other responses under the policy, sums, (B,), nats.
        reference_chosen_logps: of the preferred responses under the frozen reference, (B,), nats.
        reference_rejected_logps: of the other responses under the frozen reference, (B,), nats.
        beta: strength of the pull towards the reference, > 0 (the paper: 0.1).
        label_smoothing: share of pairs taken to be mislabelled, in [0, 0.5).

    Returns:
        Losses in nats; rewards are those above, detached.

    Raises:
        ValueError: if the four shapes differ.

    Elsewhere:
        TRL logs beta * log-ratio as rewards; the authors' code leaves the constant out of them.

    Source:
        Wang et al. 2023 (f-DPO), arXiv:2309.16240, table 1.
    """
    chosen, rejected = log_ratios(
        policy_chosen_logps,
        policy_rejected_logps,
        reference_chosen_logps,
        reference_rejected_logps,
    )
    return _logistic(beta * power_log(chosen, 1), beta * power_log(rejected, 1), label_smoothing)


@PREFERENCE_LOSSES.register("dpo_js")
def dpo_js_loss(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    reference_chosen_logps: Tensor,
    reference_rejected_logps: Tensor,
    *,
    beta: Beta = 0.1,
    label_smoothing: LabelSmoothing = 0.0,
) -> PairLoss:
    """DPO under the Jensen-Shannon divergence, whose rewards are at most beta * log 2.

        reward = beta * (log 2 + log sigmoid(rho))
        loss = -log sigmoid(reward_w - reward_l), smoothed as in `dpo`

    Args:
        policy_chosen_logps: of the preferred responses under the policy, sums, (B,), nats.
        policy_rejected_logps: of the other responses under the policy, sums, (B,), nats.
        reference_chosen_logps: of the preferred responses under the frozen reference, (B,), nats.
        reference_rejected_logps: of the other responses under the frozen reference, (B,), nats.
        beta: strength of the pull towards the reference, > 0 (the paper: 0.1).
        label_smoothing: share of pairs taken to be mislabelled, in [0, 0.5).

    Returns:
        Losses in nats; rewards are those above, detached.

    Raises:
        ValueError: if the four shapes differ.

    Elsewhere:
        TRL logs beta * log-ratio as rewards; the authors' code, those in the loss.

    Source:
        Wang et al. 2023 (f-DPO), arXiv:2309.16240, table 1.
    """
    chosen, rejected = log_ratios(
        policy_chosen_logps,
        policy_rejected_logps,
        reference_chosen_logps,
        reference_rejected_logps,
    )
    chosen_rewards = beta * (math.log(2) + F.logsigmoid(chosen))
    rejected_rewards = beta * (math.log(2) + F.logsigmoid(rejected))
    return _logistic(chosen_rewards, rejected_rewards, label_smoothing)


def _logistic(chosen_rewards: Tensor, rejected_rewards: Tensor, label_smoothing: float) -> PairLoss:
    """DPO's loss of any rewards."""
    losses = smoothed_logistic(chosen_rewards - rejected_rewards, label_smoothing)
    return PairLoss(losses, chosen_rewards.detach(), rejected_rewards.detach())
