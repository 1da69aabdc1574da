"""Losses that say of each response by itself where its reward should be, with a reference.

Where a loss of the margin alone lets both responses become unlikely together, these do not. With
`reward = beta * (policy - reference)`, w the preferred and l the other response.
"""

from torch import Tensor

from lit_align.losses.pairs import (
    PREFERENCE_LOSSES,
    Beta,
    PairLoss,
    implicit_rewards,
    log_ratios,
    smoothed_logistic,
)
from lit_align.ops import check_same_shape


@PREFERENCE_LOSSES.register("apo_down")
def apo_down_loss(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    reference_chosen_logps: Tensor,
    reference_rejected_logps: Tensor,
    *,
    beta: Beta = 0.1,
) -> PairLoss:
    """Anchored preference optimization for a policy that is better than its data.

        loss = sigmoid(reward_w) + 1 - sigmoid(reward_w - reward_l)

    The lead is to grow while both responses become less likely, the preferred one as well.

    Args:
        policy_chosen_logps: of the preferred responses under the policy, sums, (B,), nats.
        policy_rejected_logps: of the other responses under the policy, sums, (B,), nats.
        reference_chosen_logps: of the preferred responses under the frozen reference, (B,), nats.
        reference_rejected_logps: of the other responses under the frozen reference, (B,), nats.
        beta: strength of the pull towards the reference, per nat, > 0 (the paper: 0.1).

    Returns:
        Losses, in (0, 2); rewards are beta * (policy - reference), detached.

    Raises:
        ValueError: if the four shapes differ.

    Source:
        D'Oosterlinck et al. 2024 (APO), arXiv:2408.06266, eq. 8.
    """
    chosen_rewards, rejected_rewards = implicit_rewards(
        policy_chosen_logps,
        policy_rejected_logps,
        reference_chosen_logps,
        reference_rejected_logps,
        beta,
    )
    losses = chosen_rewards.sigmoid() + (rejected_rewards - chosen_rewards).sigmoid()
    return PairLoss(losses, chosen_rewards.detach(), rejected_rewards.detach())


@PREFERENCE_LOSSES.register("apo_zero")
def apo_zero_loss(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    reference_chosen_logps: Tensor,
    reference_rejected_logps: Tensor,
    *,
    beta: Beta = 0.1,
) -> PairLoss:
    """Anchored preference optimization for a policy that is worse than its data.

        loss = 1 - sigmoid(reward_w) + sigmoid(reward_l)

    The preferred response is to become likelier than under the reference, the other one less.

    Args:
        policy_chosen_logps: of the preferred responses under the policy, sums, (B,), nats.
        policy_rejected_logps: of the other responses under the policy, sums, (B,), nats.
        reference_chosen_logps: of the preferred responses under the frozen reference, (B,), nats.
        reference_rejected_logps: of the other responses under the frozen reference, (B,), nats.
        beta: strength of the pull towards the reference, per nat, > 0 (the paper: 0.1).

    Returns:
        Losses, in (0, 2); rewards are beta * (policy - reference), detached.

    Raises:
        ValueError: if the four shapes differ.

    Source:
        D'Oosterlinck et al. 2024 (APO), arXiv:2408.06266, eq. 7.
    """
    chosen_rewards, rejected_rewards = implicit_rewards(
        policy_chosen_logps,
        policy_rejected_logps,
        reference_chosen_logps,
        reference_rejected_logps,
        beta,
    )
    losses = (-chosen_rewards).sigmoid() + rejected_rewards.sigmoid()
    return PairLoss(losses, chosen_rewards.detach(), rejected_rewards.detach())


@PREFERENCE_LOSSES.register("bco_pair")
def bco_pair_loss(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    reference_chosen_logps: Tensor,
    reference_rejected_logps: Tensor,
    delta: Tensor | None = None,
    *,
    beta: Beta = 0.01,
) -> PairLoss:
    """Binary classifier optimization: rewards as the logits of "preferred".

        loss = -log sigmoid(reward_w - delta) - log sigmoid(-(reward_l - delta))

    Args:
        policy_chosen_logps: of the preferred responses under the policy, sums, (B,), nats.
        policy_rejected_logps: of the other responses under the policy, sums, (B,), nats.
        reference_chosen_logps: of the preferred responses under the frozen reference, (B,), nats.
        reference_rejected_logps: of the other responses under the frozen reference, (B,), nats.
        delta: where the two classes meet, a running mean of the rewards of both responses, (), nats
            times beta, constant; None stands for 0.
        beta: strength of the pull towards the reference, per nat, > 0 (the paper: 0.01).

    Returns:
        Losses in nats, the sum of both responses' terms; rewards are beta * (policy - reference),
        without delta, detached.

    Raises:
        ValueError: if the four shapes differ, or delta is not one number.

    Source:
        Jung et al. 2024 (BCO), arXiv:2404.04656; a sum per pair, and delta 0: TRL and Liger.
    """
    chosen_rewards, rejected_rewards = implicit_rewards(
        policy_chosen_logps,
        policy_rejected_logps,
        reference_chosen_logps,
        reference_rejected_logps,
        beta,
    )
    shift = chosen_rewards.new_zeros(()) if delta is None else delta.detach()
    check_same_shape(delta=shift, one_number=chosen_rewards.new_zeros(()))
    losses = smoothed_logistic(chosen_rewards - shift) + smoothed_logistic(shift - rejected_rewards)
    return PairLoss(losses, chosen_rewards.detach(), rejected_rewards.detach())


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


@PREFERENCE_LOSSES.register("nca_pair")
def nca_pair_loss(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    reference_chosen_logps: Tensor,
    reference_rejected_logps: Tensor,
    *,
    beta: Beta = 0.01,
) -> PairLoss:
    """Noise contrastive alignment: the preferred response must gain, not only lead.

        loss = -log sigmoid(reward_w) - log sigmoid(-reward_w) / 2 - log sigmoid(-reward_l) / 2

    Args:
        policy_chosen_logps: of the preferred responses under the policy, sums, (B,), nats.
        policy_rejected_logps: of the other responses under the policy, sums, (B,), nats.
        reference_chosen_logps: of the preferred responses under the frozen reference, (B,), nats.
        reference_rejected_logps: of the other responses under the frozen reference, (B,), nats.
        beta: strength of the pull towards the reference, per nat, > 0 (the paper: 0.01).

    Returns:
        Losses in nats; rewards are beta * (policy - reference), detached.

    Raises:
        ValueError: if the four shapes differ.

    Source:
        Chen et al. 2024 (NCA), arXiv:2402.05369, for pairs, where the preferred response's label
        is 1 and the other's 0.
    """
    chosen_rewards, rejected_rewards = implicit_rewards(
        policy_chosen_logps,
        policy_rejected_logps,
        reference_chosen_logps,
        reference_rejected_logps,
        beta,
    )
    noise = smoothed_logistic(-chosen_rewards) + smoothed_logistic(-rejected_rewards)
    losses = smoothed_logistic(chosen_rewards) + noise / 2
    return PairLoss(losses, chosen_rewards.detach(), rejected_rewards.detach())


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


def _squares(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """How far log-ratios are from where they make rewards of 1/2 and -1/2, squared."""
    goal = 1 / (2 * beta)
    return (chosen - goal).square() + (rejected + goal).square()
