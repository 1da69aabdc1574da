"""Running sums and means over many batches and ranks, made cheap enough for every step.

A mean of per-batch means would weigh a short last batch like a full one; sums and counts do not.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.nn.utils import get_total_norm

from lit_align.modules.ranks import sum_over_ranks
from lit_align.ops import masked_sum


class Sums:
    """Sums of named values over everything seen since the last reset.

    They are one tensor, and no buffer of a module: a module in half precision would round them (in
    bfloat16, 256 + 1 is 256).

    Args:
        names: what is summed; the order of the sums.
    """

    def __init__(self, *names: str) -> None:
        self.names = names
        self._sums: Tensor | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been added since the last reset."""
        return self._sums is None

    @torch.no_grad()
    def update(self, values: Mapping[str, Tensor]) -> None:
        """Add values, () each; a name that is not among them stays as it was."""
        zero = next(iter(values.values())).new_zeros(())
        self._add(torch.stack([values.get(name, zero) for name in self.names]).float())

    @torch.no_grad()
    def update_rows(self, values: Mapping[str, Tensor], mask: Tensor) -> None:
        """Add what is known of the rows of a batch.

        Args:
            values: for each name a tensor (B,).
            mask: the rows that count, (B,) bool.
        """
        rows = torch.stack([values[name] for name in self.names]).float()
        self._add(masked_sum(rows, mask.expand_as(rows)))

    def compute(self) -> dict[str, Tensor]:
        """Sum per name over all ranks, (), float32, on the CPU.

        All ranks ask together, and have added as often.
        """
        sums = torch.zeros(len(self.names)) if self._sums is None else sum_over_ranks(self._sums)
        return dict(zip(self.names, sums.cpu().unbind(), strict=True))

    def reset(self) -> None:
        """Begin anew."""
        self._sums = None

    def _add(self, sums: Tensor) -> None:
        self._sums = sums if self._sums is None else self._sums + sums


def gradient_norm(parameters: Iterable[Parameter]) -> Tensor:
    """Norm over all gradients as one vector, (), before clipping; sharded ones count whole."""
    norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


class MeanOfDicts:
    """Means of numbers that come in dictionaries and are the same on every rank already."""

    def __init__(self) -> None:
        self._seen: dict[str, list[float]] = {}

    def update(self, values: Mapping[str, float]) -> None:
        """Add one of each."""
        for name, value in values.items():
            self._seen.setdefault(name, []).append(value)

    def compute_and_reset(self) -> dict[str, float]:
        """The mean of each since the last call; nothing if there was none."""
        means = {name: sum(values) / len(values) for name, values in self._seen.items()}
        self._seen = {}
        return means
