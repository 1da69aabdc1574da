"""Losses, with a reference, of the preferred response's lead in log-ratio over the other.

    gap = (policy_w - reference_w) - (policy_l - reference_l)

Each is a function of that number alone, and of the lead that a pair's own `margin` asks for where
the loss names one: what both responses gain or lose together does not count.
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
    implicit_rewards,
    log_ratios,
    required_lead,
    smoothed_logistic,
)
from lit_align.losses.variants import Range

TargetSmoothing = Annotated[float, Range(above=0, below=0.5)]
# Above 1 the exponential term would outgrow its own weight.
DiscopopTau = Annotated[float, Range(above=0, most=1)]


@PREFERENCE_LOSSES.register("discopop")
def discopop_loss(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    reference_chosen_logps: Tensor,
    reference_rejected_logps: Tensor,
    *,
    beta: Beta = 0.05,
    discopop_tau: DiscopopTau = 0.05,
) -> PairLoss:
    """A loss that a language model found: logistic or exponential, blended by the gap itself.

        x = beta * gap
        blend = sigmoid(x / discopop_tau)
        loss = (1 - blend) * -log sigmoid(x) + blend * exp(-x)

    The second term is computed as one exponential: at x = -100 its factors are 0 and infinite.

    Args:
        policy_chosen_logps: of the preferred responses under the policy, sums, (B,), nats.
        policy_rejected_logps: of the other responses under the policy, sums, (B,), nats.
        reference_chosen_logps: of the preferred responses under the frozen reference, (B,), nats.
        reference_rejected_logps: of the other responses under the frozen reference, (B,), nats.
        beta: strength of the pull towards the reference, per nat, > 0 (the authors' code: 0.05).
        discopop_tau: width of the blend, in nats, in (0, 1] (the paper: 0.05); above 1 the loss
            would grow without limit as exp(-x (1 - 1 / discopop_tau)).

    Returns:
        Losses in nats; rewards are beta * (policy - reference), detached.

    Raises:
        ValueError: if the shapes differ.

    Elsewhere:
        TRL and Liger multiply the two factors of the second term, and are NaN in float32 where x is
        below -88.

    Source:
        Lu et al. 2024 (DiscoPOP), arXiv:2406.08414, eq. 5.
    """
    chosen_rewards, rejected_rewards = implicit_rewards(
        policy_chosen_logps,
        policy_rejected_logps,
        reference_chosen_logps,
        reference_rejected_logps,
        beta,
    )
    x = chosen_rewards - rejected_rewards
    logistic = (-x / discopop_tau).sigmoid() * -F.logsigmoid(x)
    exponential = (F.logsigmoid(x / discopop_tau) - x).exp()
    return PairLoss(logistic + exponential, chosen_rewards.detach(), rejected_rewards.detach())


@PREFERENCE_LOSSES.register("exo_pair")
def exo_pair_loss(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    reference_chosen_logps: Tensor,
    reference_rejected_logps: Tensor,
    *,
    beta: Beta = 0.1,
    label_smoothing: TargetSmoothing = 1e-3,
) -> PairLoss:
    """Efficient exact optimization: the reverse KL from what the policy prefers to the labels.

        q = sigmoid(beta * gap)
        loss = q * (log q - log(1 - label_smoothing))
            + (1 - q) * (log(1 - q) - log label_smoothing)

    DPO is the same KL the other way round, which spreads over modes where this one picks one.

    Args:
        policy_chosen_logps: of the preferred responses under the policy, sums, (B,), nats.
        policy_rejected_logps: of the other responses under the policy, sums, (B,), nats.
        reference_chosen_logps: of the preferred responses under the frozen reference, (B,), nats.
        reference_rejected_logps: of the other responses under the frozen reference, (B,), nats.
        beta: strength of the pull towards the reference, per nat, > 0; usually 0.1 to 0.5.
        label_smoothing: share of pairs taken to be mislabelled, in (0, 0.5): the labels must leave
            the other response some probability, or every loss would be infinite (TRL: 1e-3; the
            authors' code: e^-10).

    Returns:
        Losses in nats, >= 0; rewards are beta * (policy - reference), detached.

    Raises:
        ValueError: if the shapes differ.

    Elsewhere:
        The authors' code takes log 1 for log(1 - label_smoothing), as if the two labels'
        probabilities summed to more than 1.

    Source:
        Ji et al. 2024 (EXO), arXiv:2402.00856, eq. 16.
    """
    chosen_rewards, rejected_rewards = implicit_rewards(
        policy_chosen_logps,
        policy_rejected_logps,
        reference_chosen_logps,
        reference_rejected_logps,
        beta,
    )
    gap = chosen_rewards - rejected_rewards
    kept = gap.sigmoid() * (F.logsigmoid(gap) - math.log1p(-label_smoothing))
    flipped = (-gap).sigmoid() * (F.logsigmoid(-gap) - math.log(label_smoothing))
    return PairLoss(kept + flipped, chosen_rewards.detach(), rejected_rewards.detach())


@PREFERENCE_LOSSES.register("hinge")
def hinge_loss(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    reference_chosen_logps: Tensor,
    reference_rejected_logps: Tensor,
    margin: Tensor | None = None,
    *,
    beta: Beta = 0.05,
) -> PairLoss:
    """A support vector machine's loss of DPO's gap; nothing is learnt from a lead of 1 / beta.

        loss = max(0, 1 + margin - beta * gap)

    Args:
        policy_chosen_logps: of the preferred responses under the policy, sums, (B,), nats.
        policy_rejected_logps: of the other responses under the policy, sums, (B,), nats.
        reference_chosen_logps: of the preferred responses under the frozen reference, (B,), nats.
        reference_rejected_logps: of the other responses under the frozen reference, (B,), nats.
        margin: lead that the preferred response must have, in the unit of the rewards, (B,); a
            column of the data. None stands for 0.
        beta: strength of the pull towards the reference, per nat, > 0 (the paper's gamma: 0.05).

    Returns:
        Losses, >= 0; rewards are beta * (policy - reference), detached.

    Raises:
        ValueError: if the shapes differ.

    Elsewhere:
        TRL documents it as SLiC's loss; torchtune calls it RSO's.

    Source:
        Liu et al. 2023 (RSO), arXiv:2309.06657, "hinge-norm". Not SLiC-HF's loss,
        which has no reference: that is `slic_hf`. A margin of each pair: the margin rescaling of
        structured support vector machines, Tsochantaridis et al. 2005.
    """
    chosen_rewards, rejected_rewards = implicit_rewards(
        policy_chosen_logps,
        policy_rejected_logps,
        reference_chosen_logps,
        reference_rejected_logps,
        beta,
    )
    lead = 1 + required_lead(margin, chosen_rewards)
    losses = F.relu(lead - (chosen_rewards - rejected_rewards))
    return PairLoss(losses, chosen_rewards.detach(), rejected_rewards.detach())


@PREFERENCE_LOSSES.register("ipo", average_logps=True)
@PREFERENCE_LOSSES.register("ipo_sum")
def ipo_loss(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    reference_chosen_logps: Tensor,
    reference_rejected_logps: Tensor,
    *,
    beta: Beta = 0.1,
) -> PairLoss:
    """Identity preference optimization: a lead to reach, and not to pass.

        loss = (gap - 1 / (2 * beta))^2

    As `ipo` the log-probs are means per token, as `ipo_sum` they are sums over the response.

    Args:
        policy_chosen_logps: of the preferred responses under the policy, (B,), nats.
        policy_rejected_logps: of the other responses under the policy, (B,), nats.
        reference_chosen_logps: of the preferred responses under the frozen reference, (B,), nats.
        reference_rejected_logps: of the other responses under the frozen reference, (B,), nats.
        beta: the paper's tau, per nat, > 0: the lead asked for is 1 / (2 * beta); usually 0.1 to 1.

    Returns:
        Losses in nats squared; rewards are beta * (policy - reference), detached.

    Raises:
        ValueError: if the shapes differ.

    Elsewhere:
        Means: TRL, LLaMA-Factory and HALOs, which counts the tokens whose log-ratio is not 0. Sums:
        OpenRLHF, the code of DPO's authors and TRL's online trainers. Liger offers neither. TRL
        logs rewards of sums beside a loss of means.

    Source:
        Azar et al. 2023 (IPO), arXiv:2310.12036, eq. 17. Read literally its log-probs are sums
        (the DPO authors' code, OpenRLHF); that the paper's authors averaged, they told
        https://github.com/huggingface/trl/pull/1265.
    """
    chosen, rejected = log_ratios(
        policy_chosen_logps,
        policy_rejected_logps,
        reference_chosen_logps,
        reference_rejected_logps,
    )
    losses = (chosen - rejected - 1 / (2 * beta)).square()
    return PairLoss(losses, beta * chosen.detach(), beta * rejected.detach())


@PREFERENCE_LOSSES.register("robust")
def robust_loss(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    reference_chosen_logps: Tensor,
    reference_rejected_logps: Tensor,
    margin: Tensor | None = None,
    *,
    beta: Beta = 0.1,
    label_smoothing: LabelSmoothing = 0.1,
) -> PairLoss:
    """DPO of the true labels, estimated without bias from labels some of which are flipped.

        s(x) = -log sigmoid(beta * x - margin)
        loss = ((1 - label_smoothing) * s(gap) - label_smoothing * s(-gap))
            / (1 - 2 * label_smoothing)

    Without flipped labels it is DPO. Its value may be negative and has no lower bound: a pair with
    a wide gap is worth being surer of. `dpo` with `label_smoothing` adds the second term.

    Args:
        policy_chosen_logps: of the preferred responses under the policy, sums, (B,), nats.
        policy_rejected_logps: of the other responses under the policy, sums, (B,), nats.
        reference_chosen_logps: of the preferred responses under the frozen reference, (B,), nats.
        reference_rejected_logps: of the other responses under the frozen reference, (B,), nats.
        margin: lead that the preferred response must have, in the unit of the rewards, (B,); a
            column of the data. None stands for 0.
        beta: strength of the pull towards the reference, per nat, > 0; usually 0.1 to 0.5.
        label_smoothing: share of pairs known to be flipped, in [0, 0.5) (the paper: 0.1).

    Returns:
        Losses in nats; rewards are beta * (policy - reference), detached.

    Raises:
        ValueError: if the shapes differ.

    Elsewhere:
        TRL's default for `label_smoothing` is 0, with which it is DPO.

    Source:
        Chowdhury et al. 2024 (rDPO), arXiv:2403.00409.
    """
    chosen_rewards, rejected_rewards = implicit_rewards(
        policy_chosen_logps,
        policy_rejected_logps,
        reference_chosen_logps,
        reference_rejected_logps,
        beta,
    )
    gap = chosen_rewards - rejected_rewards
    lead = required_lead(margin, gap)
    kept = (1 - label_smoothing) * smoothed_logistic(gap - lead)
    losses = (kept - label_smoothing * smoothed_logistic(-gap - lead)) / (1 - 2 * label_smoothing)
    return PairLoss(losses, chosen_rewards.detach(), rejected_rewards.detach())
