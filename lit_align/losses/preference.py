"""Losses of preference pairs: DPO, SimPO, WPO. The others stand beside, by what they read.

Every function takes one number per response, (B,), and returns one loss per pair: nothing is
averaged over the batch here, nor over tokens (a variant with `average_logps` receives means).
Half-precision input is computed in float32. Values and gradients are finite wherever the
log-probs are.
"""

from typing import Annotated

import torch
from torch import Tensor

from lit_align.losses.numerics import full_precision
from lit_align.losses.pairs import (
    PREFERENCE_LOSSES,
    Beta,
    GammaBetaRatio,
    LabelSmoothing,
    PairLoss,
    implicit_rewards,
    policy_logps,
    required_lead,
    smoothed_logistic,
)
from lit_align.losses.variants import OneOf
from lit_align.ops import check_same_shape

Alignment = Annotated[str | None, OneOf((None, "none", "sampled", "greedy"))]


@PREFERENCE_LOSSES.register("dpo")
@PREFERENCE_LOSSES.register("dpo_norm", average_logps=True, beta=5.0)
def dpo_loss(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    reference_chosen_logps: Tensor,
    reference_rejected_logps: Tensor,
    margin: Tensor | None = None,
    *,
    beta: Beta = 0.1,
    label_smoothing: LabelSmoothing = 0.0,
) -> PairLoss:
    """Direct preference optimization.

        x = beta * ((policy_w - reference_w) - (policy_l - reference_l))
        loss = -(1 - label_smoothing) * log sigmoid(x - margin)
            - label_smoothing * log sigmoid(-x - margin)

    As `dpo` the log-probs are sums over the response; as `dpo_norm` they are means per token, so
    that a long response weighs no more than a short one.

    Args:
        policy_chosen_logps: of the preferred responses under the policy, (B,), nats.
        policy_rejected_logps: of the other responses under the policy, (B,), nats.
        reference_chosen_logps: of the preferred responses under the frozen reference, (B,), nats.
        reference_rejected_logps: of the other responses under the frozen reference, (B,), nats.
        margin: lead that the preferred response must have, in the unit of the rewards, (B,); a
            column of the data. None stands for 0.
        beta: strength of the pull towards the reference, per nat, > 0; usually 0.1 to 0.5 (the
            paper: 0.1), of means about as much larger as responses are long (Tulu 3: 5).
        label_smoothing: share of pairs taken to be mislabelled, in [0, 0.5).

    Returns:
        Losses in nats; rewards are beta * (policy - reference), detached.

    Raises:
        ValueError: if the shapes differ.

    Elsewhere:
        TRL and Liger take `label_smoothing` with this loss and ignore it; open-instruct, torchtune,
        OpenRLHF, LLaMA-Factory and the authors apply it. For `dpo_norm` TRL keeps a beta of 0.1 and
        logs rewards of sums; open-instruct has a beta of 5 for every loss.

    Source:
        Rafailov et al. 2023, arXiv:2305.18290, eq. 7; label smoothing: Mitchell 2023, eq. 3 of
        https://ericmitchell.ai/cdpo.pdf; a margin of each pair: Touvron et al. 2023 (Llama 2),
        arXiv:2307.09288, eq. 2, there of rewards that a model gives; `dpo_norm` and its beta:
        Lambert et al. 2024, arXiv:2411.15124.
    """
    chosen_rewards, rejected_rewards = implicit_rewards(
        policy_chosen_logps,
        policy_rejected_logps,
        reference_chosen_logps,
        reference_rejected_logps,
        beta,
    )
    lead = required_lead(margin, chosen_rewards)
    losses = smoothed_logistic(chosen_rewards - rejected_rewards, label_smoothing, lead)
    return PairLoss(losses, chosen_rewards.detach(), rejected_rewards.detach())


@PREFERENCE_LOSSES.register("simpo", average_logps=True)
def simpo_loss(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    margin: Tensor | None = None,
    *,
    beta: Beta = 2.0,
    gamma_beta_ratio: GammaBetaRatio = 0.5,
    label_smoothing: LabelSmoothing = 0.0,
) -> PairLoss:
    """Simple preference optimization: no reference, and a margin to reach.

        x = beta * (policy_w - policy_l - gamma_beta_ratio) - margin
        loss = -(1 - label_smoothing) * log sigmoid(x) - label_smoothing * log sigmoid(-x)

    The second term is that of the authors' code and of everyone after it. A pair that really is
    mislabelled would have -log sigmoid(beta * (policy_l - policy_w - gamma_beta_ratio) - margin):
    the two agree only without a lead to reach.

    Args:
        policy_chosen_logps: of the preferred responses, means per token, (B,), nats.
        policy_rejected_logps: of the other responses, means per token, (B,), nats.
        margin: further lead that the preferred response must have, in the unit of the rewards,
            (B,); a column of the data. None stands for 0.
        beta: scale of the reward, per nat, > 0; 2 to 10 (the authors' README: start at 2).
        gamma_beta_ratio: lead the preferred response must have, nats per token, >= 0: the paper's
            gamma divided by beta (the authors' README: start at 0.5, search 0 to 1).
        label_smoothing: share of pairs taken to be mislabelled, in [0, 0.5).

    Returns:
        Losses in nats; rewards are beta * policy, detached.

    Raises:
        ValueError: if the shapes differ.

    Elsewhere:
        TRL, Liger and LLaMA-Factory take gamma itself, 0.5 by default with a beta of 0.1, which is
        a lead of 5 nats per token; TRL and Liger add a likelihood term unless told not to. HALOs
        reports rewards without beta.

    Source:
        Meng et al. 2024, arXiv:2405.14734, eq. 6; defaults and smoothing: the authors' code,
        https://github.com/princeton-nlp/SimPO.
    """
    chosen, rejected = policy_logps(policy_chosen_logps, policy_rejected_logps)
    chosen_rewards, rejected_rewards = beta * chosen, beta * rejected
    lead = beta * gamma_beta_ratio + required_lead(margin, chosen_rewards)
    losses = smoothed_logistic(chosen_rewards - rejected_rewards - lead, label_smoothing)
    return PairLoss(losses, chosen_rewards.detach(), rejected_rewards.detach())


@PREFERENCE_LOSSES.register("wpo")
def wpo_loss(  # noqa: PLR0913, a loss shows all that it reads
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    reference_chosen_logps: Tensor,
    reference_rejected_logps: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    chosen_alignment_logps: Tensor | None = None,
    rejected_alignment_logps: Tensor | None = None,
    *,
    beta: Beta = 0.01,
    label_smoothing: LabelSmoothing = 0.0,
    alignment: Alignment = None,
) -> PairLoss:
    """Weighted preference optimization: DPO in which pairs the policy would write count more.

        loss = wpo_weights(...) * dpo_loss(...)

    Args:
        policy_chosen_logps: of the preferred responses under the policy, sums, (B,), nats.
        policy_rejected_logps: of the other responses under the policy, sums, (B,), nats.
        reference_chosen_logps: of the preferred responses under the frozen reference, (B,), nats.
        reference_rejected_logps: of the other responses under the frozen reference, (B,), nats.
        chosen_lengths: scored tokens of the preferred responses, (B,).
        rejected_lengths: scored tokens of the other responses, (B,).
        chosen_alignment_logps: what the policy's own tokens would have had in place of the
            preferred responses, see `wpo_weights`, sums, (B,), nats.
        rejected_alignment_logps: the same for the other responses, (B,), nats.
        beta: strength of the pull towards the reference, per nat, > 0 (the authors' code: 0.01).
        label_smoothing: share of pairs taken to be mislabelled, in [0, 0.5).
        alignment: "sampled" or "greedy": the alignment terms are of this kind and must be there;
            "none": leave them out; None: subtract them if they are there.

    Returns:
        Losses in nats; rewards are beta * (policy - reference), detached and not weighted.

    Raises:
        ValueError: if the shapes differ, or an alignment term is missing.

    Elsewhere:
        TRL has no bound of 1, so that greedy text is weighted up to an order of magnitude. open-
        instruct takes exp of sums, which vanish with length, without terms of alignment, and
        differentiates through it.

    Source:
        Zhou et al. 2024, arXiv:2406.11827; beta: the authors' code.
    """
    pair = dpo_loss(
        policy_chosen_logps,
        policy_rejected_logps,
        reference_chosen_logps,
        reference_rejected_logps,
        beta=beta,
        label_smoothing=label_smoothing,
    )
    if alignment == "none":
        chosen_alignment_logps = rejected_alignment_logps = None
    elif alignment is not None:
        _check_given(
            f"alignment '{alignment}'",
            chosen_alignment_logps=chosen_alignment_logps,
            rejected_alignment_logps=rejected_alignment_logps,
        )
    weights = wpo_weights(
        policy_chosen_logps,
        policy_rejected_logps,
        chosen_lengths,
        rejected_lengths,
        chosen_alignment_logps,
        rejected_alignment_logps,
    )
    return pair._replace(losses=weights * pair.losses)


def wpo_weights(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    chosen_alignment_logps: Tensor | None = None,
    rejected_alignment_logps: Tensor | None = None,
) -> Tensor:
    """How likely the policy is to write a pair, next to what it would write itself.

        mean = (policy - alignment) / length
        weight = min(1, exp(mean_w + mean_l))

    The alignment term of a token is log sum_v p(v)^2 (what a sampled token expects) or
    log max_v p(v) (what a greedy token has); with it, responses of the policy weigh about 1
    however uncertain the policy is.

    Args:
        policy_chosen_logps: of the preferred responses under the policy, sums, (B,), nats.
        policy_rejected_logps: of the other responses under the policy, sums, (B,), nats.
        chosen_lengths: scored tokens of the preferred responses, (B,); 0 counts as a mean of 0.
        rejected_lengths: scored tokens of the other responses, (B,).
        chosen_alignment_logps: alignment terms of the preferred responses, sums, (B,), nats; None
            stands for 0.
        rejected_alignment_logps: the same for the other responses, (B,), nats.

    Returns:
        (B,), in [0, 1], detached.

    Raises:
        ValueError: if the shapes differ, or one alignment term is given and not the other.

    Source:
        Zhou et al. 2024, arXiv:2406.11827. That no weight passes 1 is the authors' choice; else
        text likelier than what the policy samples would count several times.
    """
    alignment = {
        "chosen_alignment_logps": chosen_alignment_logps,
        "rejected_alignment_logps": rejected_alignment_logps,
    }
    given = {name: term for name, term in alignment.items() if term is not None}
    if given:
        _check_given("the other alignment term", **alignment)
    check_same_shape(
        policy_chosen_logps=policy_chosen_logps,
        policy_rejected_logps=policy_rejected_logps,
        chosen_lengths=chosen_lengths,
        rejected_lengths=rejected_lengths,
        **given,
    )
    with torch.no_grad():
        chosen = full_precision(policy_chosen_logps) - given.get("chosen_alignment_logps", 0)
        rejected = full_precision(policy_rejected_logps) - given.get("rejected_alignment_logps", 0)
        # Means per token: summed, they would make every weight vanish with length.
        means = chosen / chosen_lengths.clamp(min=1) + rejected / rejected_lengths.clamp(min=1)
        return means.clamp(max=0).exp()


def _check_given(needed_by: str, **tensors: Tensor | None) -> None:
    """Raise ValueError naming the tensors that are None."""
    if missing := [name for name, tensor in tensors.items() if tensor is None]:
        raise ValueError(f"{needed_by} needs {' and '.join(missing)}")
