"""Shape checks and masked reductions shared by the losses and the log-prob code.

Positions follow one law: `labels` is as wide as `input_ids`, (B, T); everything per predicted
token is (B, T-1), where column t speaks of token t+1.
"""

import torch
from torch import Tensor

IGNORE_INDEX = -100


def check_same_shape(**tensors: Tensor) -> None:
    """Raise ValueError naming each tensor and its shape unless all shapes are equal.

    Broadcasting would turn a swapped or unsqueezed argument into a silent, wrong number.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"these tensors must have one shape: {listed}")


def completion_mask(labels: Tensor) -> Tensor:
    """Which predicted positions lie in the response: (B, T) labels to (B, T-1) bool.

    A label in column 0 is never predicted by anything and so never counted.
    """
    return labels[:, 1:] != IGNORE_INDEX


def completion_lengths(labels: Tensor) -> Tensor:
    """Scored response tokens per row, (B,), int64."""
    return completion_mask(labels).sum(-1)


def masked_sum(values: Tensor, mask: Tensor, dim: int = -1) -> Tensor:
    """Sum of `values` where `mask` is true; what stands elsewhere, NaN included, does not matter.

    Raises:
        ValueError: if the shapes differ or the mask is not boolean.
    """
    check_same_shape(values=values, mask=mask)
    if mask.dtype != torch.bool:
        raise ValueError(f"a mask must be bool, not {mask.dtype}: ids or weights would be summed")
    return values.where(mask, values.new_zeros(())).sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int = -1) -> Tensor:
    """Mean of `values` where `mask` is true; 0 with zero gradient where nothing is."""
    return masked_sum(values, mask, dim) / mask.sum(dim).clamp(min=1)
