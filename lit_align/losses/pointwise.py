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
        delta: where the two classes meet, the mean reward of both responses over the steps before,
            (), nats times beta, constant; None stands for 0, as before the first step.
        beta: strength of the pull towards the reference, per nat, > 0 (the paper: 0.01).

    Returns:
        Losses in nats, the sum of both responses' terms; rewards are beta * (policy - reference),
        without delta, detached.

    Raises:
        ValueError: if the four shapes differ, or delta is not one number.

    Elsewhere:
        TRL's DPOTrainer and Liger have no delta; LLaMA-Factory has a running mean.

    Source:
        Jung et al. 2024 (BCO), arXiv:2404.04656, whose delta is an expectation: `DPOModule` takes
        the mean over all steps before the present one, TRL's BCOTrainer over the present batch as
        well.
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
