"""A reference that follows the policy: a second set of the weights that are trained."""

import copy
from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lit_align.modules.frozen import FrozenReference
from lit_align.policies import PolicyRecipe


class MovingReference(FrozenReference):
    """The policy as it was before step 0, until it is moved towards the policy.

    Only what is trained is held twice. What is not, such as the base under an adapter, is shared
    with the policy; but for FSDP, under which each of the two has its own share of it.

    Weights in half precision are mixed in float32 and held that way as well, since many a small
    share of a policy would be rounded away; what compares is that, rounded once.
    """

    def _start(self, policy: nn.Module, other: PolicyRecipe | None) -> Any:
        assert other is None, "another model need not have the policy's weights"
        self.trained = [name for name, p in policy.named_parameters() if p.requires_grad]
        self._mixed: dict[str, Tensor] = {}  # in float32, of what is in half precision
        shared: dict[int, Any] = {id(p): p for p in policy.parameters() if not p.requires_grad}
        return copy.deepcopy(policy, shared)

    @torch.no_grad()
    def move(self, trainer: L.Trainer, policy: nn.Module, alpha: float) -> None:
        """Put the reference between where it is and the policy, shard by shard.

            reference = alpha * policy + (1 - alpha) * reference

        Args:
            trainer: knows both.
            policy: its trained weights are mixed in.
            alpha: share of the policy, in (0, 1]; 1: a copy.
        """
        kept = dict(self.placed(trainer).named_parameters())
        current = dict(policy.named_parameters())
        for name in self.trained:
            mixed = self._in_full(name, kept[name])
            _local(mixed).lerp_(_local(current[name]).to(mixed.dtype), alpha)
            _local(kept[name]).copy_(_local(mixed))

    def weights(self) -> dict[str, Tensor]:
        """What is trained, whole, on the CPU; all ranks take part, and the first one gets it."""
        found = {}
        kept = dict(self.model.named_parameters())
        is_first = getattr(rank_zero_only, "rank", 0) == 0
        for name in self.trained:
            weight = self._in_full(name, kept[name])
            whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
            if is_first:
                found[name] = whole.detach().cpu()
        return found

    @torch.no_grad()
    def restore(self, trainer: L.Trainer, weights: Mapping[str, Tensor]) -> None:
        """Put back what `weights` gave; each rank has all of it."""
        kept = dict(self.placed(trainer).named_parameters())
        for name in self.trained:
            mixed = self._in_full(name, kept[name])
            _local(mixed).copy_(_local(_sharded_like(mixed, weights[name])))
            _local(kept[name]).copy_(_local(mixed))

    def _in_full(self, name: str, weight: Tensor) -> Tensor:
        """The weight itself; or, of one in half precision, what it was rounded from."""
        dtype = torch.promote_types(weight.dtype, torch.float32)
        if dtype == weight.dtype:
            return weight
        mixed = self._mixed.get(name, weight.detach()).to(weight.device, dtype)
        self._mixed[name] = mixed
        return mixed


def _local(weight: Tensor) -> Tensor:
    """What this rank holds of a weight."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _sharded_like(weight: Tensor, whole: Tensor) -> Tensor:
    if not isinstance(weight, DTensor):
        return whole
    # All ranks hold the whole, so that nothing has to be sent.
    return distribute_tensor(
        whole.to(weight.device), weight.device_mesh, weight.placements, src_data_rank=None
    )
