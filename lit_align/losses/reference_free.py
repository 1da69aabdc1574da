"""Losses of preference pairs that compare the policy with nothing: no reference, no cache.

SimPO itself stands in `preference`.
"""

from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_align.losses.pairs import (
    PREFERENCE_LOSSES,
    Beta,
    GammaBetaRatio,
    LabelSmoothing,
    PairLoss,
    policy_logps,
    power_log,
    required_lead,
    smoothed_logistic,
)
from lit_align.losses.variants import Range

Delta = Annotated[float, Range(above=0)]
# The largest log of a probability whose odds are told from those of 1, which are infinite.
MAX_LOGP = -1e-12


@PREFERENCE_LOSSES.register("alphapo", average_logps=True)
def alphapo_loss(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    *,
    beta: Beta = 2.0,
    gamma_beta_ratio: GammaBetaRatio = 0.5,
    alpha: float = 0.25,
    label_smoothing: LabelSmoothing = 0.0,
) -> PairLoss:
    """SimPO with rewards of another shape.

        reward = beta * (1 - exp(-alpha * policy)) / alpha
        margin = reward_w - reward_l - beta * gamma_beta_ratio
        loss = -(1 - label_smoothing) * log sigmoid(margin) - label_smoothing * log sigmoid(-margin)

    At alpha 0 it is SimPO. Above, rewards fall faster the less likely a response is, which keeps
    the preferred one from becoming unlikely along with the other. Where -alpha * policy passes 50
    the exponential goes on as its tangent.

    Args:
        policy_chosen_logps: of the preferred responses, means per token, (B,), nats.
        policy_rejected_logps: of the other responses, means per token, (B,), nats.
        beta: scale of the reward, > 0; 2 to 10, as of SimPO.
        gamma_beta_ratio: lead the preferred response must have, in units of reward / beta, >= 0.
        alpha: shape of the reward, any number; usually small and positive, 0.1 to 0.5.
        label_smoothing: share of pairs taken to be mislabelled, in [0, 0.5).

    Returns:
        Losses in nats; rewards are those above, detached.

    Raises:
        ValueError: if the shapes differ.

    Elsewhere:
        TRL's default for alpha is 0, with which it is SimPO; it exponentiates before it takes a
        power, and overflows.

    Source:
        Gupta et al. 2025 (AlphaPO), arXiv:2501.03884; beta and gamma_beta_ratio: SimPO.
    """
    chosen, rejected = policy_logps(policy_chosen_logps, policy_rejected_logps)
    chosen_rewards = beta * power_log(chosen, alpha)
    rejected_rewards = beta * power_log(rejected, alpha)
    margin = chosen_rewards - rejected_rewards - beta * gamma_beta_ratio
    losses = smoothed_logistic(margin, label_smoothing)
    return PairLoss(losses, chosen_rewards.detach(), rejected_rewards.detach())


@PREFERENCE_LOSSES.register("cpo_preference")
def cpo_preference_loss(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    margin: Tensor | None = None,
    *,
    beta: Beta = 0.1,
    label_smoothing: LabelSmoothing = 0.0,
) -> PairLoss:
    """Contrastive preference optimization, its preference term alone.

        x = beta * (policy_w - policy_l)
        loss = -(1 - label_smoothing) * log sigmoid(x - margin)
            - label_smoothing * log sigmoid(-x - margin)

    DPO with a reference to which all responses are alike. The paper adds the negative
    log-likelihood of the preferred response, which is `sft`: `cpo` is that sum.

    Args:
        policy_chosen_logps: of the preferred responses, sums, (B,), nats.
        policy_rejected_logps: of the other responses, sums, (B,), nats.
        margin: lead that the preferred response must have, in the unit of the rewards, (B,); a
            column of the data. None stands for 0.
        beta: scale of the reward, per nat, > 0 (the paper: 0.1).
        label_smoothing: share of pairs taken to be mislabelled, in [0, 0.5).

    Returns:
        Losses in nats; rewards are beta * policy, detached.

    Raises:
        ValueError: if the shapes differ.

    Source:
        Xu et al. 2024 (CPO), arXiv:2401.08417, its L_prefer; smoothing: TRL.
    """
    chosen, rejected = policy_logps(policy_chosen_logps, policy_rejected_logps)
    chosen_rewards, rejected_rewards = beta * chosen, beta * rejected
    lead = required_lead(margin, chosen_rewards)
    losses = smoothed_logistic(chosen_rewards - rejected_rewards, label_smoothing, lead)
    return PairLoss(losses, chosen_rewards.detach(), rejected_rewards.detach())


@PREFERENCE_LOSSES.register("orpo_odds_ratio", average_logps=True)
def orpo_odds_ratio_loss(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
) -> PairLoss:
    """Odds ratio preference optimization, its term of the odds ratio alone.

        p = exp(policy)
        loss = -log sigmoid(log(p_w / (1 - p_w)) - log(p_l / (1 - p_l)))

    The paper adds it, times lambda 0.1, to the negative log-likelihood of prompt and preferred
    response, which is `sft_whole`: `orpo` is that sum. Above p = 1 - 1e-12 odds stay as they are.

    Args:
        policy_chosen_logps: of the preferred responses, means per token, (B,), nats.
        policy_rejected_logps: of the other responses, means per token, (B,), nats.

    Returns:
        Losses in nats; rewards are the log-odds, nats, detached.

    Raises:
        ValueError: if the shapes differ.

    Elsewhere:
        Liger and LLaMA-Factory take log1p(-exp(x)), infinite near probability 1; TRL computes in
        float32 and logs the term with the other sign and beta * log-prob as rewards.

    Source:
        Hong et al. 2024 (ORPO), arXiv:2403.07691, eq. 7.
    """
    chosen, rejected = policy_logps(policy_chosen_logps, policy_rejected_logps)
    chosen_odds, rejected_odds = _log_odds(chosen), _log_odds(rejected)
    losses = smoothed_logistic(chosen_odds - rejected_odds)
    return PairLoss(losses, chosen_odds.detach(), rejected_odds.detach())


@PREFERENCE_LOSSES.register("simper", average_logps=True)
def simper_loss(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
) -> PairLoss:
    """Simple alignment by perplexities: nothing to tune.

        loss = exp(policy_l) - exp(policy_w)

    exp of a mean log-prob is 1 over the perplexity. A response that the policy finds unlikely
    has hardly a gradient, whichever side it is on.

    Args:
        policy_chosen_logps: of the preferred responses, means per token, (B,), nats.
        policy_rejected_logps: of the other responses, means per token, (B,), nats.

    Returns:
        Losses, in [-1, 1]; rewards are exp(policy), detached.

    Raises:
        ValueError: if the shapes differ.

    Source:
        Xiao et al. 2025 (SimPER), arXiv:2502.00883.
    """
    chosen, rejected = policy_logps(policy_chosen_logps, policy_rejected_logps)
    # No probability passes 1, whatever rounding says.
    chosen_rewards, rejected_rewards = chosen.clamp(max=0).exp(), rejected.clamp(max=0).exp()
    losses = rejected_rewards - chosen_rewards
    return PairLoss(losses, chosen_rewards.detach(), rejected_rewards.detach())


@PREFERENCE_LOSSES.register("simpo_hinge", average_logps=True)
def simpo_hinge_loss(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    margin: Tensor | None = None,
    *,
    beta: Beta = 2.0,
    gamma_beta_ratio: GammaBetaRatio = 0.5,
) -> PairLoss:
    """SimPO with a hinge: nothing is learnt from a pair that leads by 1 / beta more than it must.

        loss = max(0, 1 + margin - beta * (policy_w - policy_l - gamma_beta_ratio))

    Args:
        policy_chosen_logps: of the preferred responses, means per token, (B,), nats.
        policy_rejected_logps: of the other responses, means per token, (B,), nats.
        margin: further lead that the preferred response must have, in the unit of the rewards,
            (B,); a column of the data. None stands for 0.
        beta: scale of the reward, per nat, > 0; 2 to 10.
        gamma_beta_ratio: lead the preferred response must have, nats per token, >= 0.

    Returns:
        Losses, >= 0; rewards are beta * policy, detached.

    Raises:
        ValueError: if the shapes differ.

    Source:
        Meng et al. 2024 (SimPO), arXiv:2405.14734, the option of its authors' code,
        https://github.com/princeton-nlp/SimPO.
    """
    chosen, rejected = policy_logps(policy_chosen_logps, policy_rejected_logps)
    chosen_rewards, rejected_rewards = beta * chosen, beta * rejected
    lead = 1 + beta * gamma_beta_ratio + required_lead(margin, chosen_rewards)
    losses = F.relu(lead - (chosen_rewards - rejected_rewards))
    return PairLoss(losses, chosen_rewards.detach(), rejected_rewards.detach())


@PREFERENCE_LOSSES.register("slic_calibration")
def slic_calibration_loss(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    margin: Tensor | None = None,
    *,
    delta: Delta = 1.0,
) -> PairLoss:
    """Sequence likelihood calibration, its calibration term alone.

        loss = max(0, delta + margin - policy_w + policy_l)

    The paper adds the negative log-likelihood of a target, for which `sft` stands in `slic_hf`.

    Args:
        policy_chosen_logps: of the preferred responses, sums, (B,), nats.
        policy_rejected_logps: of the other responses, sums, (B,), nats.
        margin: further lead that the preferred response must have, nats, (B,); a column of the
            data. None stands for 0.
        delta: lead the preferred response must have, nats, > 0 (the paper: 1).

    Returns:
        Losses in nats, >= 0; rewards are the log-probs, detached.

    Raises:
        ValueError: if the shapes differ.

    Elsewhere:
        HALOs adds one number per pair to one per token, which broadcasts. TRL's `hinge` has a
        reference and is another loss.

    Source:
        Zhao et al. 2023 (SLiC-HF), arXiv:2305.10425, its calibration term.
    """
    chosen, rejected = policy_logps(policy_chosen_logps, policy_rejected_logps)
    losses = F.relu(delta + required_lead(margin, chosen) - (chosen - rejected))
    return PairLoss(losses, chosen.detach(), rejected.detach())


def _log_odds(logps: Tensor) -> Tensor:
    """log(p / (1 - p)) at p = exp(logps), nats."""
    below_1 = logps.clamp(max=MAX_LOGP)
    return below_1 - torch.log(-torch.expm1(below_1))
