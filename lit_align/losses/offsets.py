"""DPO with something added to its margin: a penalty, a lead to reach, the lengths.

margin = beta * ((policy_w - reference_w) - (policy_l - reference_l))
"""

from typing import Annotated

from torch import Tensor
from torch.nn import functional as F

from lit_align.errors import UserError
from lit_align.losses.numerics import full_precision
from lit_align.losses.pairs import (
    PREFERENCE_LOSSES,
    Beta,
    PairLoss,
    implicit_rewards,
    smoothed_logistic,
)
from lit_align.losses.variants import Range
from lit_align.ops import check_same_shape

Weight = Annotated[float, Range(least=0)]


@PREFERENCE_LOSSES.register("dpop")
def dpop_loss(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    reference_chosen_logps: Tensor,
    reference_rejected_logps: Tensor,
    *,
    beta: Beta = 0.3,
    dpop_lambda: Weight = 50.0,
) -> PairLoss:
    """DPO-positive: the preferred response must not become less likely than under the reference.

        loss = -log sigmoid(margin - beta * dpop_lambda * max(0, reference_w - policy_w))

    Args:
        policy_chosen_logps: of the preferred responses under the policy, sums, (B,), nats.
        policy_rejected_logps: of the other responses under the policy, sums, (B,), nats.
        reference_chosen_logps: of the preferred responses under the frozen reference, (B,), nats.
        reference_rejected_logps: of the other responses under the frozen reference, (B,), nats.
        beta: strength of the pull towards the reference, per nat, > 0 (the paper: 0.3).
        dpop_lambda: what a lost nat costs in nats of margin, >= 0 (the paper: 50).

    Returns:
        Losses in nats; rewards are beta * (policy - reference), the chosen ones less the penalty,
        detached.

    Raises:
        ValueError: if the four shapes differ.

    Source:
        Pal et al. 2024 (Smaug), arXiv:2402.13228.
    """
    chosen_rewards, rejected_rewards = implicit_rewards(
        policy_chosen_logps,
        policy_rejected_logps,
        reference_chosen_logps,
        reference_rejected_logps,
        beta,
    )
    # No more than subtracting a penalty: relu, whose slope at 0 is 0, leaves step 0 to DPO.
    chosen_rewards = chosen_rewards - dpop_lambda * F.relu(-chosen_rewards)
    losses = smoothed_logistic(chosen_rewards - rejected_rewards)
    return PairLoss(losses, chosen_rewards.detach(), rejected_rewards.detach())


@PREFERENCE_LOSSES.register("odpo")
def odpo_loss(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    reference_chosen_logps: Tensor,
    reference_rejected_logps: Tensor,
    margin: Tensor,
    *,
    beta: Beta = 0.1,
    alpha: Weight = 1.0,
) -> PairLoss:
    """DPO with an offset: the more a response was preferred, the further it is to lead.

        loss = -log sigmoid(beta * ((policy_w - reference_w) - (policy_l - reference_l))
            - alpha * log(margin))

    Args:
        policy_chosen_logps: of the preferred responses under the policy, sums, (B,), nats.
        policy_rejected_logps: of the other responses under the policy, sums, (B,), nats.
        reference_chosen_logps: of the preferred responses under the frozen reference, (B,), nats.
        reference_rejected_logps: of the other responses under the frozen reference, (B,), nats.
        margin: score of the preferred response minus that of the other, by whoever chose, (B,),
            > 0; a column of the data.
        beta: strength of the pull towards the reference, per nat, > 0; usually 0.1 to 0.5.
        alpha: nats of lead per nat of margin, >= 0 (the paper: 1); 0 is DPO.

    Returns:
        Losses in nats; rewards are beta * (policy - reference), without the offset, detached.

    Raises:
        ValueError: if the shapes differ.
        UserError: if a margin is not above 0: the two responses are then not a pair.

    Source:
        Amini et al. 2024 (ODPO), arXiv:2402.10571, with its logarithm as the scaling function.
    """
    check_same_shape(policy_chosen_logps=policy_chosen_logps, margin=margin)
    lead = full_precision(margin)
    if not (lead > 0).all():
        row = int((~(lead > 0)).nonzero()[0])
        raise UserError(
            f"loss 'odpo' takes the logarithm of margins, and that of pair {row} of the batch is "
            f"{lead[row].item():g}: leave out pairs whose scores do not differ"
        )
    chosen_rewards, rejected_rewards = implicit_rewards(
        policy_chosen_logps,
        policy_rejected_logps,
        reference_chosen_logps,
        reference_rejected_logps,
        beta,
    )
    losses = smoothed_logistic(chosen_rewards - rejected_rewards - alpha * lead.log())
    return PairLoss(losses, chosen_rewards.detach(), rejected_rewards.detach())


@PREFERENCE_LOSSES.register("r_dpo")
def r_dpo_loss(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    reference_chosen_logps: Tensor,
    reference_rejected_logps: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    *,
    beta: Beta = 0.1,
    alpha: Weight = 0.01,
) -> PairLoss:
    """DPO with length as a price: that a response is longer explains part of why it was preferred.

        loss = -log sigmoid(margin + alpha * (length_w - length_l))

    The sign is that of a policy which maximises reward - alpha * length: its optimum has
    beta * (policy - reference) = reward - alpha * length, so the reward that the labels speak of is
    the log-ratio plus alpha * length. A longer preferred response has less left to gain.

    Args:
        policy_chosen_logps: of the preferred responses under the policy, sums, (B,), nats.
        policy_rejected_logps: of the other responses under the policy, sums, (B,), nats.
        reference_chosen_logps: of the preferred responses under the frozen reference, (B,), nats.
        reference_rejected_logps: of the other responses under the frozen reference, (B,), nats.
        chosen_lengths: scored tokens of the preferred responses, (B,).
        rejected_lengths: scored tokens of the other responses, (B,).
        beta: strength of the pull towards the reference, per nat, > 0; usually 0.1.
        alpha: price of a token, nats, >= 0; usually 0.01 to 1. 0 is DPO.

    Returns:
        Losses in nats; rewards are beta * (policy - reference), without the lengths, detached.

    Raises:
        ValueError: if the shapes differ.

    Source:
        Park et al. 2024 (R-DPO), arXiv:2403.19159. SimPO's table of baselines
        (arXiv:2405.14734) prints a minus.
    """
    check_same_shape(
        policy_chosen_logps=policy_chosen_logps,
        chosen_lengths=chosen_lengths,
        rejected_lengths=rejected_lengths,
    )
    chosen_rewards, rejected_rewards = implicit_rewards(
        policy_chosen_logps,
        policy_rejected_logps,
        reference_chosen_logps,
        reference_rejected_logps,
        beta,
    )
    margin = chosen_rewards - rejected_rewards
    longer = (chosen_lengths - rejected_lengths).to(margin.dtype)
    losses = smoothed_logistic(margin + alpha * longer)
    return PairLoss(losses, chosen_rewards.detach(), rejected_rewards.detach())
