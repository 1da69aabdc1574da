"""What the parts of a policy loss ask of the numbers they are given."""

import torch
from torch import Tensor

from lit_align.errors import UserError


def full_precision(values: Tensor) -> Tensor:
    """In float32 unless it is better already: bfloat16 has three digits, log-probs need six."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def check_finite(mask: Tensor | None = None, **tensors: Tensor) -> None:
    """Raise UserError naming the tensor and the place of its first NaN or infinity.

    Replaced by some finite number, it would hide that the model is broken.

    Args:
        mask: where to look, of the tensors' shape, bool; None: everywhere.
        tensors: by the names that messages are to use.
    """
    for name, tensor in tensors.items():
        wrong = ~tensor.detach().isfinite()
        places = (wrong if mask is None else wrong & mask).nonzero()
        if len(places):
            place = tuple(places[0].tolist())
            raise UserError(
                f"{name} is {tensor[place].item()} at {list(place)}, and not finite at "
                f"{len(places)} places in all: look for overflow in the model's logits, or for "
                "padding that was not filled with 0"
            )
