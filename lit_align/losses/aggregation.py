"""Aggregations: from one loss a token to the loss of an optimizer step.

The window is everything that one optimizer step sees: all micro-batches of all ranks. Every
function takes the losses of one micro-batch, (B, T), a mask of trained tokens, (B, T) bool, and
counts of the window, and returns this micro-batch's share of the window's loss, (): the shares add
up to it, however the window was cut. (What a trainer divides by, the number of ranks or of
accumulated batches, has to be multiplied back by whoever calls backward.)

The counts are of trained tokens, of rows with at least one of them, and of prompts with at least
one such row: what is masked out altogether, a truncated completion say, leaves numerator and
denominator alike. In an empty window the share is 0, its gradient is 0, and both are there.
"""

from typing import Annotated

import torch
from torch import Tensor

from lit_align.losses.numerics import full_precision
from lit_align.losses.variants import Range, Variants
from lit_align.ops import check_same_shape, masked_mean, masked_sum

AGGREGATIONS = Variants(noun="aggregation")

Length = Annotated[float, Range(least=1)]


@AGGREGATIONS.register("token_mean")
def token_mean(losses: Tensor, mask: Tensor, window_tokens: Tensor) -> Tensor:
    """Every token of the window counts alike, so that a long completion weighs more.

        loss = sum(losses) / window_tokens

    Args:
        losses: per token, (B, T).
        mask: trained tokens, (B, T) bool.
        window_tokens: trained tokens of the window, ().

    Returns:
        Share of the mean, ().

    Elsewhere:
        OpenRLHF, open-instruct and prime-rl count the tokens of the whole step; TRL takes the share
        that is expected of a micro-batch, verl's older actor the mean of micro-batches.

    Source:
        The code of Yu et al. 2025 (DAPO), arXiv:2503.14476. Their eq. 8 is `prompt_mean`.
    """
    return _token_sum(losses, mask) / window_tokens.clamp(min=1)


@AGGREGATIONS.register("sequence_mean")
def sequence_mean(losses: Tensor, mask: Tensor, window_rows: Tensor) -> Tensor:
    """Every completion counts alike, so that a token of a long one weighs less.

        loss = sum over rows of (mean over the row's tokens of losses) / window_rows

    Args:
        losses: per token, (B, T).
        mask: trained tokens, (B, T) bool.
        window_rows: rows of the window with at least one trained token, ().

    Returns:
        Share of the mean, ().

    Elsewhere:
        Of rows without trained tokens the paper does not speak: TRL counts them in the mean as 0,
        verl and OpenRLHF do not count them.

    Source:
        Shao et al. 2024 (GRPO), arXiv:2402.03300, eq. 3.
    """
    return masked_mean(full_precision(losses), mask).sum() / window_rows.clamp(min=1)


@AGGREGATIONS.register("sequence_sum")
def sequence_sum(losses: Tensor, mask: Tensor, window_rows: Tensor) -> Tensor:
    """The mean over completions of what each adds up to.

        loss = sum(losses) / window_rows

    Args:
        losses: per token, (B, T).
        mask: trained tokens, (B, T) bool.
        window_rows: rows of the window with at least one trained token, ().

    Returns:
        Share of the mean, ().

    Elsewhere:
        TRL before 1.16 and Liger weigh padding as well where ratios are of tokens.

    Source:
        Ahmadian et al. 2024 (RLOO), arXiv:2402.14740, section 3: a completion is one action, its
        log-prob the sum of its tokens'.
    """
    return _token_sum(losses, mask) / window_rows.clamp(min=1)


@AGGREGATIONS.register("constant_length")
def constant_length(
    losses: Tensor, mask: Tensor, window_rows: Tensor, *, max_completion_length: Length
) -> Tensor:
    """`sequence_sum` over a constant, so that a step's size does not depend on how long rows are.

        loss = sum(losses) / (window_rows * max_completion_length)

    Args:
        losses: per token, (B, T).
        mask: trained tokens, (B, T) bool.
        window_rows: rows of the window with at least one trained token, ().
        max_completion_length: tokens that a completion may have, >= 1; what the sampler was told.

    Returns:
        Share of the mean, ().

    Elsewhere:
        TRL counts the rows of a micro-batch, verl at first none, open-instruct has one constant for
        a step; OpenRLHF's `dr_grpo` changes the advantage and leaves the mean over tokens.

    Source:
        Liu et al. 2025 (Dr. GRPO), arXiv:2503.20783, section 3.2 and listing 1.
    """
    return sequence_sum(losses, mask, window_rows) / max_completion_length


@AGGREGATIONS.register("prompt_mean")
def prompt_mean(
    losses: Tensor, mask: Tensor, window_prompts: Tensor, row_prompt_tokens: Tensor
) -> Tensor:
    """Every prompt counts alike, and within it every token of its completions.

        loss = sum over rows of (sum(losses) / row_prompt_tokens) / window_prompts

    Args:
        losses: per token, (B, T).
        mask: trained tokens, (B, T) bool.
        window_prompts: prompts of the window with at least one trained token, ().
        row_prompt_tokens: trained tokens of all rows of the row's prompt in the window, (B,).

    Returns:
        Share of the mean, ().

    Elsewhere:
        Nobody has it: `dapo` is `token_mean` everywhere.

    Source:
        Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 8, where the mean over tokens stands inside of
        the expectation over prompts; Khatri et al. 2025 (ScaleRL), arXiv:2510.13786.
    """
    check_same_shape(rows=mask[:, 0], row_prompt_tokens=row_prompt_tokens)
    row_sums = masked_sum(full_precision(losses), mask)
    return (row_sums / row_prompt_tokens.clamp(min=1)).sum() / window_prompts.clamp(min=1)


def window_counts(mask: Tensor, groups: Tensor) -> dict[str, Tensor]:
    """What the aggregations count, of a batch that is its own window.

    Args:
        mask: trained tokens, (B, T) bool.
        groups: number of each row's prompt, (B,), integers.

    Returns:
        `window_tokens`, `window_rows`, `window_prompts`, () each, and `row_prompt_tokens`, (B,);
        int64.
    """
    check_same_shape(rows=mask[:, 0], groups=groups)
    row_tokens = mask.sum(-1)
    _, group = torch.unique(groups, return_inverse=True)
    # As long as there are rows, which is never too short.
    group_tokens = torch.zeros_like(row_tokens).index_add(0, group, row_tokens)
    return {
        "window_tokens": row_tokens.sum(),
        "window_rows": row_tokens.count_nonzero(),
        "window_prompts": group_tokens.count_nonzero(),
        "row_prompt_tokens": group_tokens[group],
    }


def _token_sum(losses: Tensor, mask: Tensor) -> Tensor:
    """Sum over all trained tokens, ()."""
    return masked_sum(full_precision(losses), mask).sum()
