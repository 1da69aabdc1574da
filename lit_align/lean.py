"""Models that keep less for the backward pass, and compute it again where that costs little.

Between its matrix products a layer normalises, and multiplies what it has by a gate. Autograd keeps
the numbers on the way there, and linear layers keep what came out, to be read once in the backward
pass. Here only what went in is kept: of a llama in float32 that leaves about half. It is the
model's own functions that are called again, so that no formula stands here, values stay the same to
the last bit, and gradients but for the order of sums.

A model is changed by giving some of its modules a `forward` of their own: no class is touched, no
parameter and no name; copies of the model, and pickles, are as lean as it is.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

# Hooks on what autograd keeps, if any are in place; torch has no public way to ask.
_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def make_lean(model: nn.Module) -> list[str]:
    """Let a model keep less for its backward pass, from now on.

    Where something else decides what is kept, such as gradient checkpointing, all is as it was.

    Args:
        model: any, with its weights loaded and not yet sharded. Modules that have a `forward` of
            their own already stay as they are.

    Returns:
        Names of the modules whose values are computed again; none if this torch cannot do that.
    """
    names = []
    for name, module in model.named_modules() if _hooks else ():
        forward = None if "forward" in vars(module) else _lean_forward(module)
        if forward is not None:
            module.forward = partial(forward, module)
        if forward in (_norm, _gated):
            names.append(name)
    return names


def is_usual_linear(module: Any) -> bool:
    """Whether a module computes what `nn.Linear` does, and by itself: also if it is lean."""
    own = vars(module).get("forward")
    is_own = own is None or getattr(own, "func", None) is _linear
    return type(module).forward is nn.Linear.forward and is_own


def undo_lean(model: nn.Module) -> None:
    """Make a model, or a copy of one, what it was before `make_lean`."""
    for module in model.modules():
        if getattr(vars(module).get("forward"), "func", None) in (_norm, _gated, _linear):
            del module.forward


def again(function: Callable[..., Tensor], *inputs: Tensor, reads: tuple[Tensor, ...] = ()) -> Any:
    """`function(*inputs)`, to be computed again in the backward pass.

    Args:
        function: gives the same at every call, in a tensor of its own.
        inputs: its arguments, which are kept.
        reads: parameters that it reads beside them.
    """
    if not torch.is_grad_enabled() or _others_decide():
        return function(*inputs)
    return _apply(function, inputs, reads)


def _others_decide() -> bool:
    """Whether something else has taken over what autograd keeps, and what it does with it."""
    ignores_tracing = True
    return _hooks(ignores_tracing) is not None


def _apply(
    function: Callable[..., Tensor], inputs: tuple[Tensor, ...], reads: tuple[Tensor, ...] = ()
) -> Tensor:
    value: Tensor = _Again.apply(  # type: ignore[no-untyped-call]
        function, len(inputs), *inputs, *reads
    )
    return value


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], count: int, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors[:count])
        ctx.function = function
        ctx.reads = tensors[count:]
        ctx.precision = _precision(tensors[0])
        ctx.computed_again = None
        return function(*tensors[:count])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, value = _computed(ctx)
        ctx.computed_again = None
        sources = [*inputs, *ctx.reads]
        wanted = [source for source in sources if source.requires_grad]
        found = iter(torch.autograd.grad(value, wanted, gradient))
        return None, None, *(next(found) if s.requires_grad else None for s in sources)


class _Precision(NamedTuple):
    """Arguments of `torch.autocast`."""

    device_type: str
    dtype: torch.dtype
    enabled: bool


def _precision(tensor: Tensor) -> _Precision:
    """In which what follows is computed."""
    device = tensor.device.type
    return _Precision(device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))


def _computed(node: Any) -> tuple[list[Tensor], Tensor]:
    """Inputs and value of a node of `_Again`, computed at the first call of a backward pass."""
    if node.computed_again is None:
        inputs = [kept.detach().requires_grad_(kept.requires_grad) for kept in node.saved_tensors]
        with torch.enable_grad(), torch.autocast(**node.precision._asdict()):
            node.computed_again = inputs, node.function(*inputs)
    computed: tuple[list[Tensor], Tensor] = node.computed_again
    return computed


class _Recipe(NamedTuple):
    """What is kept in place of the value of a node."""

    node: Any
    shape: torch.Size


def _without(value: Tensor) -> saved_tensors_hooks:
    """A context in which autograd keeps no copy of a value that can be computed again."""
    node, address, size = value.grad_fn, value.data_ptr(), value.numel()

    def pack(kept: Tensor) -> Tensor | _Recipe:
        # Also a view of it in another shape. While the value lives, its address is its own.
        is_it = kept.data_ptr() == address and kept.numel() == size and kept.is_contiguous()
        return _Recipe(node, kept.shape) if is_it else kept

    return saved_tensors_hooks(pack, _unpack)


def _unpack(kept: Tensor | _Recipe) -> Tensor:
    if isinstance(kept, _Recipe):
        return _computed(kept.node)[1].detach().view(kept.shape)
    return kept


def _linear(module: nn.Linear, hidden: Tensor) -> Tensor:
    """A linear layer that does not keep its input if that can be computed again."""
    usual = type(module).forward
    if not hasattr(hidden.grad_fn, "computed_again") or _others_decide():
        return usual(module, hidden)
    precision = _precision(hidden)
    if precision.enabled and hidden.dtype == torch.float32:
        # The rounded copy, which autocast would make here, is not to be kept either.
        with _without(hidden):
            hidden = _apply(partial(_rounded, precision.dtype), (hidden,))
    with _without(hidden):
        return usual(module, hidden)


def _norm(module: nn.Module, *inputs: Any, **options: Any) -> Any:
    usual = partial(type(module).forward, module)
    if len(inputs) != 1 or options:
        return usual(*inputs, **options)
    return again(usual, *inputs, reads=tuple(module.parameters()))


def _gated(module: Any, hidden: Tensor) -> Any:
    product = partial(_product, module.act_fn)
    gate, up = module.gate_proj(hidden), module.up_proj(hidden)
    return module.down_proj(again(product, gate, up, reads=tuple(module.act_fn.parameters())))


def _product(activation: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    activated = activation(gate)
    if activated.requires_grad or activated is gate:
        return activated * up
    # In place: what is freed between tensors that are kept is memory that nothing else fits into.
    return activated.mul_(up)


def _rounded(dtype: torch.dtype, values: Tensor) -> Tensor:
    return values.to(dtype)


def _lean_forward(module: nn.Module) -> Callable[..., Any] | None:
    """What a module is to do in place of its forward, None if it is to be left alone."""
    if type(module).forward is nn.Linear.forward:
        return _linear
    parts = ("act_fn", "gate_proj", "up_proj", "down_proj")
    if all(isinstance(getattr(module, part, None), nn.Module) for part in parts):
        return _gated if _agree(module, type(module).forward, _gated) else None
    vectors = [parameter.dim() for parameter in module.parameters()] in ([1], [1, 1])
    is_bare = not [*module.children()] and not [*module.buffers()]
    return _norm if vectors and is_bare and _agree(module, type(module).forward, _norm) else None


def _agree(module: nn.Module, *ways: Callable[..., Any]) -> bool:
    """Whether a module's forward, called in several ways, gives the same and in the same shape."""
    weight = next(module.parameters())
    if weight.is_meta:
        return False
    width = getattr(getattr(module, "gate_proj", None), "in_features", weight.shape[-1])
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 2, width, generator=generator).to(weight.device, weight.dtype)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            results = [_seeded(way, module, hidden) for way in (*ways, ways[0])]
    except (RuntimeError, TypeError, ValueError):  # it wants other arguments
        return False
    return all(r.shape == hidden.shape and torch.equal(r, results[0]) for r in results)


def _seeded(way: Callable[..., Any], module: nn.Module, hidden: Tensor) -> Tensor:
    """With the same random numbers at every call, such as those of dropout in an adapter."""
    torch.manual_seed(0)
    result: Tensor = way(module, hidden)
    return result
