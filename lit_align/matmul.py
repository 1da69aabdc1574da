"""Matrix products on the CPU at the speed of the machine.

The library that torch multiplies float32 matrices with (MKL) has no AVX-512 path for processors of
other makers than Intel. oneDNN, which torch brings along for other things, has one: about twice as
fast in full float32, the last bits apart. Here it takes the place of the kernels of `aten::mm` and
`aten::addmm`, so that forward and backward passes, adapters and the head of a model all have it,
and no model has to be changed.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_align.errors import UserError

CHOICES = ("auto", "onednn", "default")
# Multiplications below which the way through Python costs more than the faster kernel saves.
WORTHWHILE = 2_000_000
_CPUINFO = Path("/proc/cpuinfo")
# The library in use: as long as it lives, its kernels stand in for torch's.
_library: Any = None


def choose_matmul(choice: str = "auto") -> str:
    """Set what multiplies float32 matrices on the CPU in this process from now on.

    Args:
        choice: "onednn"; "default", torch's own; "auto": oneDNN where that is faster and gives the
            same numbers. What "auto" says depends on the machine alone, never on a measurement, so
            that a resumed run goes on with what it began with.

    Returns:
        What is in use: "onednn" or "default".

    Raises:
        UserError: for another choice, or if this torch has no such kernel of oneDNN.
    """
    global _library  # noqa: PLW0603 - one process has one dispatcher
    if choice not in CHOICES:
        raise UserError(f"cpu_matmul must be one of {', '.join(CHOICES)}, not {choice!r}")
    wanted = choice == "onednn" or (choice == "auto" and lacks_avx512_in_mkl() and is_offered())
    if wanted and not is_offered():
        raise UserError("cpu_matmul=onednn: this build of torch offers no such kernel: use auto")
    if _library is not None and not wanted:
        _library._destroy()
        _library = None
    elif _library is None and wanted:
        _library = _installed()
    return matmul_in_use()


def matmul_in_use() -> str:
    """What multiplies float32 matrices on the CPU: "onednn" or "default"."""
    return "default" if _library is None else "onednn"


def lacks_avx512_in_mkl() -> bool:
    """Whether torch multiplies with MKL on a processor whose AVX-512 that leaves unused."""
    has_mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    if not has_mkl or not _CPUINFO.is_file():
        return False
    is_intel = "GenuineIntel" in _CPUINFO.read_text()
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and not is_intel


def is_offered() -> bool:
    """Whether torch has the kernel, and it multiplies right: it is no public one."""
    left, right = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(3, 4)
    bias = torch.arange(4.0)
    try:
        product, sum_ = _onednn(left, right), _onednn(left, right, bias)
    except (AttributeError, RuntimeError, TypeError):
        return False
    exact = left.double() @ right.double()
    return torch.equal(product.double(), exact) and torch.equal(sum_.double(), exact + bias)


def _onednn(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    if not (right.is_contiguous() or right.t().is_contiguous()):
        # With gaps between its rows oneDNN would take a kernel that is thousands of times slower.
        right = right.contiguous()
    # It reads a bias as if its numbers stood one behind the other.
    bias = None if bias is None else bias.contiguous()
    product: Tensor = torch.ops.mkldnn._linear_pointwise(left, right.t(), bias, "none", [], "")
    return product


def _is_worthwhile(left: Tensor, right: Tensor) -> bool:
    """Whether these are float32 matrices that fit together and are large enough."""
    is_ours = left.dtype == right.dtype == torch.float32 and left.shape[1] == right.shape[0]
    return is_ours and left.numel() * right.shape[1] >= WORTHWHILE


def _installed() -> Any:
    """A library whose kernels take the place of torch's, which they call for small products."""
    usual = {name: torch.library.get_kernel(f"aten::{name}", "CPU") for name in ("mm", "addmm")}

    def mm(keys: Any, left: Tensor, right: Tensor) -> Any:
        if _is_worthwhile(left, right):
            return _onednn(left, right)
        return usual["mm"].call_boxed(keys, left, right)

    def addmm(
        keys: Any, bias: Tensor, left: Tensor, right: Tensor, *, beta: Any = 1, alpha: Any = 1
    ) -> Any:
        is_plain = bias.dim() == 1 and bias.dtype == left.dtype and beta == 1 and alpha == 1
        if is_plain and len(bias) == right.shape[1] and _is_worthwhile(left, right):
            return _onednn(left, right, bias)
        return usual["addmm"].call_boxed(keys, bias, left, right, beta=beta, alpha=alpha)

    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    kernels: dict[str, Callable[..., Any]] = {"mm": mm, "addmm": addmm}
    with warnings.catch_warnings():
        # That kernels are overridden is the purpose.
        warnings.simplefilter("ignore")
        for name, kernel in kernels.items():
            library.impl(name, kernel, "CPU", with_keyset=True, allow_override=True)
    return library
