"""Losses whose strength follows the pairs of the step.

Such a loss looks at all pairs that are given together, so the batch given must be the whole window
of an optimizer step.
"""

from typing import Annotated

import torch
from torch import Tensor

from lit_align.losses.numerics import full_precision
from lit_align.losses.pairs import (
    PREFERENCE_LOSSES,
    Beta,
    PairLoss,
    log_ratios,
    smoothed_logistic,
)
from lit_align.losses.running import exponential, mean_of, moments, std_of
from lit_align.losses.variants import Range
from lit_align.ops import check_same_shape

# The authors' code: a beta of 0 or below would turn the loss round.
LEAST_BETA = 1e-3
# Nats: leads that differ by less are alike, and rounding is not to say which stands out.
_LEAST_STD = 1e-3

Share = Annotated[float, Range(least=0, below=1)]


@PREFERENCE_LOSSES.register("beta_dpo", whole_window=True)
def beta_dpo_loss(  # noqa: PLR0913, a loss shows all that it reads
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    reference_chosen_logps: Tensor,
    reference_rejected_logps: Tensor,
    draws: Tensor,
    lead_mean: Tensor | None = None,
    lead_std: Tensor | None = None,
    *,
    beta: Beta = 0.1,
    alpha: Annotated[float, Range(least=0)] = 0.6,
    filtered_share: Share = 0.2,
    momentum: Share = 0.9,
) -> PairLoss:
    """DPO with a beta for each step, and without some pairs whose lead is far from the usual one.

        lead = (policy_w - reference_w) - (policy_l - reference_l)
        mean = momentum * lead_mean + (1 - momentum) * mean of the leads; std likewise
        kept = a share of 1 - filtered_share of the pairs, drawn by lot without replacement with
               weights exp(-((lead - mean) / std)^2 / 2)
        beta of the step = max(1e-3, beta * (1 + alpha * (mean lead of the kept - mean)))
        loss = -log sigmoid(beta of the step * lead) * pairs / kept pairs, 0 for the others

    The factor makes the mean over all pairs the mean over those that are kept. The lot is an
    argument and not thrown here, so that the same arguments give the same loss. The batch given
    must be the whole window of the optimizer step.

    Args:
        policy_chosen_logps: of the preferred responses under the policy, sums, (B,), nats.
        policy_rejected_logps: of the other responses under the policy, sums, (B,), nats.
        reference_chosen_logps: of the preferred responses under the frozen reference, (B,), nats.
        reference_rejected_logps: of the other responses under the frozen reference, (B,), nats.
        draws: one number per pair, uniform between 0 and 1, (B,).
        lead_mean: exponential mean of the leads of the steps before, (), nats; None stands for 0.
        lead_std: the same of their standard deviations, (), nats; None stands for 0.
        beta: the one around which that of the step varies, per nat, > 0 (the authors: 0.1).
        alpha: how much it varies, per nat, >= 0 (the authors: 0.6); 0 leaves it alone.
        filtered_share: of the pairs, left out, in [0, 1) (the authors: 0.2); at least one is kept.
        momentum: of the two exponential means, in [0, 1) (the authors: 0.9).

    Returns:
        Losses in nats; rewards are beta * (policy - reference), detached, with the beta that does
        not vary.

    Raises:
        ValueError: if the shapes differ, or one of the two means is not one number.

    Source:
        Wu et al. 2024 (beta-DPO), arXiv:2407.08639. As in the authors' code,
        https://github.com/junkangwu/beta-DPO, leads are without beta, the means begin at 0 and
        hold the present step; they divide by the kept pairs of a micro-batch, not of the step.
    """
    check_same_shape(policy_chosen_logps=policy_chosen_logps, draws=draws)
    chosen, rejected = log_ratios(
        policy_chosen_logps,
        policy_rejected_logps,
        reference_chosen_logps,
        reference_rejected_logps,
    )
    lead, zero = chosen - rejected, chosen.new_zeros(())
    before = {"lead_mean": lead_mean, "lead_std": lead_std}
    means = {name: zero if value is None else value.detach() for name, value in before.items()}
    check_same_shape(one_number=zero, **means)
    sums = moments(lead)
    mean, std = (
        exponential(means[name].double().cpu(), now, momentum).to(lead)
        for name, now in (("lead_mean", mean_of(sums)), ("lead_std", std_of(sums)))
    )
    number = max(int((1 - filtered_share) * len(lead) + 1e-9), 1)
    kept = _drawn(((lead.detach() - mean) / std.clamp(min=_LEAST_STD)), draws, number)
    shift = lead.detach()[kept].sum() / number - mean
    beta_of_step = (beta * (1 + alpha * shift)).clamp(min=LEAST_BETA)
    losses = smoothed_logistic(beta_of_step * lead) * (len(lead) / number)
    return PairLoss(losses.where(kept, 0.0), beta * chosen.detach(), beta * rejected.detach())


def _drawn(distances: Tensor, draws: Tensor, number: int) -> Tensor:
    """Which are drawn without replacement with weights exp(-distance^2 / 2), (B,) bool.

    Each waits for a time that is distributed exponentially, with its weight as the rate; the first
    are drawn. Logarithms of times are compared, as most weights may be too small to be numbers.
    """
    times = (-full_precision(draws).log()).log() + distances.square() / 2
    drawn = torch.zeros_like(times, dtype=torch.bool)
    drawn[times.argsort(stable=True)[:number]] = True
    return drawn
