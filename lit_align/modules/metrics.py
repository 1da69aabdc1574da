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
        self.sums += masked_sum(rows, mask.expand_as(rows))
        self.rows += mask.sum()

    def compute(self) -> dict[str, Tensor]:
        """Mean per name, (), float32."""
        means = self.sums / self.rows.clamp(min=1)
        return dict(zip(self.names, means.unbind(), strict=True))


def gradient_norm(parameters: Iterable[Parameter]) -> Tensor:
    """Norm over all gradients as one vector, (), before clipping; sharded ones count whole."""
    norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
