"""Policies too large for one device: weights, gradients and optimizer state split over the ranks.

Lightning's own `fsdp` strategy is the first generation, which refuses the CPU; this is the second
(`fully_shard`), the same code on two CPU processes in a test and on many GPUs.
"""

from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard


class FullyShardedStrategy(ModelParallelStrategy):
    """Splits the policy over all ranks of all nodes.

    Args:
        save_distributed_checkpoint: write a checkpoint as a folder with one file per rank. Only a
            single file can be loaded by one process, so that is the default.
        options: of `lightning.pytorch.strategies.ModelParallelStrategy`, except for the sizes.
    """

    def __init__(self, *, save_distributed_checkpoint: bool = False, **options: Any) -> None:
        super().__init__(
            tensor_parallel_size=1,
            save_distributed_checkpoint=save_distributed_checkpoint,
            **options,
        )

    def setup_environment(self) -> None:
        # Left to itself, Lightning would replicate over nodes and split tensors inside each.
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()


def shard(model: nn.Module, device_mesh: DeviceMesh) -> None:
    """Split a causal language model over the ranks of `device_mesh["data_parallel"]`, in place.

    Each decoder layer is gathered alone when it runs; what is left (embeddings, final norm, head)
    is gathered with the whole model, so a head tied to the embeddings stays tied.

    Args:
        model: of transformers, or an adapter of peft around one; every rank holds it whole.
        device_mesh: what the strategy gives to the module.
    """
    if isinstance(model, FSDPModule):  # by an earlier fit
        return
    mesh = device_mesh["data_parallel"]
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The blocks that transformers names as never to be split, in their order; maybe none."""
    base: Any = model
    if hasattr(base, "get_base_model"):
        base = base.get_base_model()
    names = set(getattr(base, "_no_split_modules", None) or ())
    return [module for module in base.modules() if type(module).__name__ in names]
