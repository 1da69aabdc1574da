"""Rewards that look at nothing but the number of tokens."""

from collections.abc import Sequence

from lit_align.errors import UserError


def soft_overlong(
    completion_ids: Sequence[Sequence[int]], *, max_length: int, cache: int
) -> list[float]:
    """Punish a completion for coming close to the longest length, before it is cut there.

        0                                        up to max_length - cache tokens
        (max_length - cache - length) / cache    from there to max_length
        -1                                       beyond

    Args:
        completion_ids: tokens of each completion, N.
        max_length: tokens at which the whole penalty is reached; usually `max_new_tokens`.
        cache: tokens before it over which the penalty grows, from 1 to `max_length`.

    Returns:
        N scores from -1 to 0.

    Raises:
        UserError: if `cache` is not from 1 to `max_length`.

    Source:
        Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 13.
    """
    if not 1 <= cache <= max_length:
        raise UserError(f"cache must be from 1 to max_length ({max_length}) tokens, not {cache}")
    free = max_length - cache
    return [min(0.0, max(-1.0, (free - len(ids)) / cache)) for ids in completion_ids]


def length_penalty(completion_ids: Sequence[Sequence[int]], *, max_length: int) -> list[float]:
    """Minus the share of the longest length that a completion uses: shorter is better.

    Give it a small weight, or the policy learns to say nothing.

    Args:
        completion_ids: tokens of each completion, N.
        max_length: tokens at which the penalty is 1, at least 1; longer ones get no more.

    Returns:
        N scores from -1 to 0.

    Raises:
        UserError: if `max_length` is below 1.
    """
    if max_length < 1:
        raise UserError(f"max_length must be at least 1 token, not {max_length}")
    return [-min(1.0, len(ids) / max_length) for ids in completion_ids]
