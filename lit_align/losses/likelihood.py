"""Terms that raise the likelihood of preferred responses, to be added to a preference term.

They stand for a loss of pairs as well: then the other response is only looked at.
"""

from torch import Tensor

from lit_align.losses.numerics import full_precision
from lit_align.losses.pairs import PREFERENCE_LOSSES, PairLoss, policy_logps
from lit_align.ops import check_same_shape


@PREFERENCE_LOSSES.register("sft", average_logps=True)
def sft_loss(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
) -> PairLoss:
    """Negative log-likelihood of the preferred response; the other one is only looked at.

        loss = -policy_w

    A mean per token of each response, then over responses, as the paper of iterative RPO has it:
    in TRL all tokens of a batch weigh alike, so that long responses count more.

    Args:
        policy_chosen_logps: of the preferred responses, means per token, (B,), nats.
        policy_rejected_logps: of the other responses, means per token, (B,), nats.

    Returns:
        Losses in nats per token; rewards are the log-probs, detached.

    Raises:
        ValueError: if the shapes differ.

    Source:
        Pang et al. 2024 (iterative RPO), arXiv:2404.19733, its second term.
    """
    chosen, rejected = policy_logps(policy_chosen_logps, policy_rejected_logps)
    return PairLoss(-chosen, chosen.detach(), rejected.detach())


@PREFERENCE_LOSSES.register("sft_whole")
def sft_whole_loss(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    policy_prompt_logps: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    prompt_lengths: Tensor,
) -> PairLoss:
    """Negative log-likelihood of prompt and preferred response together.

        loss = -(prompt + policy_w) / (prompt_length + length_w)

    A mean per token of each row, then over rows; in TRL and in the authors' code all tokens of a
    batch weigh alike, so that long rows count more.

    Args:
        policy_chosen_logps: of the preferred responses, sums, (B,), nats.
        policy_rejected_logps: of the other responses, sums, (B,), nats.
        policy_prompt_logps: of the prompts, but for their first token, sums, (B,), nats.
        chosen_lengths: scored tokens of the preferred responses, (B,).
        rejected_lengths: scored tokens of the other responses, (B,).
        prompt_lengths: scored tokens of the prompts, (B,).

    Returns:
        Losses in nats per token; rewards are the means per token of both rows, detached.

    Raises:
        ValueError: if the shapes differ.

    Source:
        Hong et al. 2024 (ORPO), arXiv:2403.07691, the first term of eq. 6 as the authors' code
        reads it, https://github.com/xfactlab/orpo.
    """
    check_same_shape(
        policy_chosen_logps=policy_chosen_logps,
        policy_rejected_logps=policy_rejected_logps,
        policy_prompt_logps=policy_prompt_logps,
        chosen_lengths=chosen_lengths,
        rejected_lengths=rejected_lengths,
        prompt_lengths=prompt_lengths,
    )
    prompt = full_precision(policy_prompt_logps)
    chosen, rejected = (
        (prompt + full_precision(logps)) / (prompt_lengths + lengths).clamp(min=1)
        for logps, lengths in (
            (policy_chosen_logps, chosen_lengths),
            (policy_rejected_logps, rejected_lengths),
        )
    )
    return PairLoss(-chosen, chosen.detach(), rejected.detach())
