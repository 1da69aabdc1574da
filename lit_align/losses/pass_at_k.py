"""pass@k: how likely a prompt is solved within k tries, from n samples of which c were right."""

import math

import torch
from torch import Tensor

from lit_align.errors import UserError
from lit_align.ops import check_same_shape


def pass_at_k(num_samples: Tensor, num_correct: Tensor, k: int) -> Tensor:
    """Probability that at least one of k samples is right, without bias.

        1 - C(n - c, k) / C(n, k)

    Args:
        num_samples: n, samples of each prompt, (P,), whole numbers, >= k. May differ.
        num_correct: c, how many of them are right, (P,), whole numbers, 0 to n.
        k: number of tries, >= 1.

    Returns:
        (P,), in [0, 1], float64. Their mean is what is reported.

    Raises:
        ValueError: if the shapes differ, a prompt has fewer samples than k (there is no unbiased
            estimate then), or the counts are none.

    Source:
        Chen et al. 2021, arXiv:2107.03374, eq. 1.
    """
    _check(num_samples, num_correct, k)
    return 1 - _all_drawn_from(num_samples - num_correct, num_samples, k)


def pass_hat_k(num_samples: Tensor, num_correct: Tensor, k: int) -> Tensor:
    """Probability that all of k samples are right, without bias: what can be relied upon.

        C(c, k) / C(n, k)

    Args:
        num_samples: n, samples of each prompt, (P,), whole numbers, >= k. May differ.
        num_correct: c, how many of them are right, (P,), whole numbers, 0 to n.
        k: number of tries, >= 1.

    Returns:
        (P,), in [0, 1], float64.

    Raises:
        ValueError: as `pass_at_k`.

    Source:
        Yao et al. 2024 (tau-bench), arXiv:2406.12045, pass^k.
    """
    _check(num_samples, num_correct, k)
    return _all_drawn_from(num_correct, num_samples, k)


def standard_error(values: Tensor) -> Tensor:
    """Standard error of the mean over prompts, if these prompts are a sample of many.

        standard deviation (ddof 1) / sqrt(P)

    What it covers is the choice of prompts and the sampling of completions together.

    Args:
        values: one number per prompt, (P,).

    Returns:
        (), in the values' unit, float64; NaN for fewer than two prompts, of which nothing is known.
    """
    if len(values) < 2:  # noqa: PLR2004, one value has no spread
        return torch.tensor(torch.nan, dtype=torch.float64)
    return values.double().std() / math.sqrt(len(values))


def _all_drawn_from(some: Tensor, of: Tensor, k: int) -> Tensor:
    """C(some, k) / C(of, k), as a product of k factors: no factorial to overflow."""
    drawn = torch.arange(k, device=of.device)
    left = (some.unsqueeze(-1) - drawn).clamp(min=0)
    return (left.double() / (of.unsqueeze(-1) - drawn)).prod(-1)


def _check(num_samples: Tensor, num_correct: Tensor, k: int) -> None:
    """Raise ValueError for counts that no drawing of samples can have."""
    check_same_shape(num_samples=num_samples, num_correct=num_correct)
    if k < 1 or k != int(k):
        raise UserError(f"pass@k needs a k that is a whole number of at least 1, not {k}")
    if (few := (num_samples < k).nonzero()).numel():
        prompt = int(few[0])
        raise UserError(
            f"pass@{k} needs at least {k} samples of each prompt, and prompt {prompt} has "
            f"{int(num_samples[prompt])}: draw more samples, or ask for a smaller k"
        )
    if (wrong := ((num_correct < 0) | (num_correct > num_samples)).nonzero()).numel():
        prompt = int(wrong[0])
        raise ValueError(
            f"prompt {prompt} has {int(num_correct[prompt])} right samples "
            f"of {int(num_samples[prompt])}"
        )
