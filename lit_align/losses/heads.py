"""DPO on what both responses have: the tokens up to the length of the shorter one.

They are the head of a response. Heads of policy and reference are cut at the same token.
"""

from typing import Annotated

from torch import Tensor

from lit_align.losses.numerics import full_precision
from lit_align.losses.pairs import PREFERENCE_LOSSES, Beta, LabelSmoothing, PairLoss
from lit_align.losses.preference import dpo_loss
from lit_align.losses.variants import Range
from lit_align.ops import check_same_shape

LengthAlpha = Annotated[float, Range(least=0, most=1)]


@PREFERENCE_LOSSES.register("ld_dpo")
def ld_dpo_loss(  # noqa: PLR0913, a loss shows all that it reads
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    reference_chosen_logps: Tensor,
    reference_rejected_logps: Tensor,
    policy_chosen_head_logps: Tensor,
    policy_rejected_head_logps: Tensor,
    reference_chosen_head_logps: Tensor,
    reference_rejected_head_logps: Tensor,
    margin: Tensor | None = None,
    *,
    beta: Beta = 0.1,
    ld_alpha: LengthAlpha = 0.5,
    label_smoothing: LabelSmoothing = 0.0,
) -> PairLoss:
    """Length-desensitized DPO: what a response goes on with alone counts less.

        logps = head + ld_alpha * (logps - head), of policy and reference
        loss = dpo_loss(logps, ...)

    At ld_alpha 1 it is DPO; at 0 nothing is read beyond the shorter response.

    Args:
        policy_chosen_logps: of the preferred responses under the policy, sums, (B,), nats.
        policy_rejected_logps: of the other responses under the policy, sums, (B,), nats.
        reference_chosen_logps: of the preferred responses under the frozen reference, (B,), nats.
        reference_rejected_logps: of the other responses under the frozen reference, (B,), nats.
        policy_chosen_head_logps: the same over the first tokens alone, as many as the shorter
            response has, sums, (B,), nats.
        policy_rejected_head_logps: likewise.
        reference_chosen_head_logps: likewise.
        reference_rejected_head_logps: likewise.
        margin: lead that the preferred response must have, in the unit of the rewards, (B,); a
            column of the data. None stands for 0.
        beta: strength of the pull towards the reference, per nat, > 0; usually 0.1 to 0.5.
        ld_alpha: how much a token beyond the shorter response counts, in [0, 1]; usually 0.3 to
            0.7 (TRL's documentation: 0.5).
        label_smoothing: share of pairs taken to be mislabelled, in [0, 0.5).

    Returns:
        Losses in nats; rewards are beta * (policy - reference) of the log-probs above, detached.

    Raises:
        ValueError: if the shapes differ.

    Elsewhere:
        TRL modifies both models' log-probs, LLaMA-Factory the policy's alone.

    Source:
        Liu et al. 2024 (LD-DPO), arXiv:2409.06411, the modified likelihood of both models.
    """
    totals = {
        "policy_chosen_logps": policy_chosen_logps,
        "policy_rejected_logps": policy_rejected_logps,
        "reference_chosen_logps": reference_chosen_logps,
        "reference_rejected_logps": reference_rejected_logps,
    }
    heads = {
        "policy_chosen_head_logps": policy_chosen_head_logps,
        "policy_rejected_head_logps": policy_rejected_head_logps,
        "reference_chosen_head_logps": reference_chosen_head_logps,
        "reference_rejected_head_logps": reference_rejected_head_logps,
    }
    check_same_shape(**totals, **heads)
    policy_chosen, policy_rejected, reference_chosen, reference_rejected = (
        full_precision(head) + ld_alpha * (full_precision(total) - full_precision(head))
        for total, head in zip(totals.values(), heads.values(), strict=True)
    )
    return dpo_loss(
        policy_chosen,
        policy_rejected,
        reference_chosen,
        reference_rejected,
        margin,
        beta=beta,
        label_smoothing=label_smoothing,
    )
