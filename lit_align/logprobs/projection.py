"""The product of hidden states and a head's weights, chunk by chunk, and one gradient for all.

Autograd makes a gradient as large as the weights for every chunk and then adds them up: three such
tensors at a time. Here the backward pass of each chunk adds its own to that of the chunk after it,
a block of the vocabulary at a time.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lit_align.lean import is_usual_linear

# Of the vocabulary in work at a time.
BLOCK = 8192


def is_bare(project: Any) -> bool:
    """Whether a head is a linear layer and nothing else: no adapter, no hook, no shard."""
    return (
        isinstance(project, nn.Linear)
        and is_usual_linear(project)
        and not (project._forward_hooks or project._forward_pre_hooks)
        and not (project._backward_hooks or project._backward_pre_hooks)
        and type(project.weight) in (nn.Parameter, Tensor)
    )


class Chain:
    """A linear layer that projects chunk after chunk.

    Args:
        layer: one that `is_bare`.
    """

    def __init__(self, layer: nn.Linear) -> None:
        self.bias = layer.bias
        # What autocast would make of the weights, once for all chunks.
        device = layer.weight.device.type
        lowers = torch.is_autocast_enabled(device) and layer.weight.dtype == torch.float32
        dtype = torch.get_autocast_dtype(device) if lowers else layer.weight.dtype
        self.factor = layer.weight.detach().to(dtype)

    def __call__(self, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Project a chunk.

        Args:
            hidden: (n, H).
            weight: the layer's own for the first chunk, then what the call before gave.

        Returns:
            The projection, (n, V), a tensor of its own, and the weights for the next chunk.
        """
        both: tuple[Tensor, Tensor] = _Product.apply(  # type: ignore[no-untyped-call]
            hidden, weight, self.bias, self.factor
        )
        return both


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, factor: Tensor
    ) -> tuple[Tensor, Tensor]:
        states = hidden.to(factor.dtype)
        ctx.save_for_backward(states, factor)
        ctx.dtypes = hidden.dtype, None if bias is None else bias.dtype
        ctx.set_materialize_grads(False)
        lowered = None if bias is None else bias.to(factor.dtype)
        return nn.functional.linear(states, factor, lowered), weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, total: Tensor | None) -> tuple[Any, ...]:
        if gradient is None:
            return None, total, None, None
        states, factor = ctx.saved_tensors
        of_hidden, of_weight, of_bias, _ = ctx.needs_input_grad
        wide = torch.promote_types(states.dtype, torch.float32)
        sums = torch.zeros_like(states, dtype=wide) if of_hidden else None
        if of_weight and total is None:
            total = torch.zeros_like(factor, dtype=wide)
        # In blocks, for no product is to make a copy of all weights, or of all logits.
        for start in range(0, len(factor), BLOCK):
            rows = slice(start, start + BLOCK)
            part = gradient[:, rows].contiguous()
            if sums is not None:
                sums += part @ factor[rows]
            if total is not None:
                total[rows] += part.t() @ states
        hidden_type, bias_type = ctx.dtypes
        return (
            None if sums is None else sums.to(hidden_type),
            total,
            gradient.sum(0, dtype=wide).to(bias_type) if of_bias else None,
            None,
        )
