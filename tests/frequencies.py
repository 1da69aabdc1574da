"""Whether what was counted agrees with what was expected, without a library of statistics."""

import math

from torch import Tensor


def agree(counts: Tensor, probs: Tensor) -> bool:
    """Whether chi-square is less than five of its standard deviations above its mean.

    Args:
        counts: how often each outcome came, (K,); each should have been expected several times.
        probs: of the outcomes, (K,), summing to 1.
    """
    expected = counts.sum() * probs
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    freedom = len(counts) - 1
    return statistic < freedom + 5 * math.sqrt(2 * freedom)
