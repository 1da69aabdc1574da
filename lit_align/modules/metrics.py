"""Running means over many batches and ranks, kept as sums and counts.

A mean of per-batch means would weigh a short last batch like a full one; sums and counts do not.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.nn.utils import get_total_norm
from torchmetrics import Metric

from lit_align.ops import masked_sum


class RunningMeans(Metric):
    """Means of named per-row values over everything seen since the last reset, on all ranks.

    Args:
        names: what is averaged; the order of the sums.
    """

    full_state_update = False
    sums: Tensor
    rows: Tensor

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names
        self.add_state("sums", torch.zeros(len(names)), dist_reduce_fx="sum")
        self.add_state("rows", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, values: Mapping[str, Tensor], mask: Tensor) -> None:
        """Add one batch.

        Args:
            values: per name a tensor (B,).
            mask: the rows that count, (B,) bool.
        """
        rows = torch.stack([values[name].detach().float() for name in self.names])
        self.sums = _in_full(self.sums) + masked_sum(rows, mask.expand_as(rows))
        self.rows = _in_full(self.rows) + mask.sum()

    def compute(self) -> dict[str, Tensor]:
        """Mean per name, (), float32."""
        means = self.sums / self.rows.clamp(min=1)
        return dict(zip(self.names, means.unbind(), strict=True))


def gradient_norm(parameters: Iterable[Parameter]) -> Tensor:
    """Norm over all gradients as one vector, (), before clipping; sharded ones count whole."""
    norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


class Sums(Metric):
    """Sums of named values over everything seen since the last reset, on all ranks.

    Args:
        names: what is summed; the order of the sums.
    """

    full_state_update = False
    sums: Tensor

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names
        self.add_state("sums", torch.zeros(len(names)), dist_reduce_fx="sum")

    def update(self, values: Mapping[str, Tensor]) -> None:
        """Add values, () each; a name that is not among them stays as it was."""
        zero = torch.zeros((), dtype=torch.float32, device=self.sums.device)
        added = [values[name].detach().float() if name in values else zero for name in self.names]
        self.sums = _in_full(self.sums) + torch.stack(added)

    def compute(self) -> dict[str, Tensor]:
        """Sum per name, (), float32."""
        return dict(zip(self.names, self.sums.unbind(), strict=True))


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


def _in_full(state: Tensor) -> Tensor:
    """A state in float32: Lightning turns metrics to half precision together with their module.

    In bfloat16, 256 + 1 is 256.
    """
    return state.float()
