"""The reference of a run that has no cache: a second set of weights, or an adapter switched off."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
from torch import nn

from lit_align.modules.inference import inference
from lit_align.modules.sharding import shard
from lit_align.policies import PolicyRecipe, has_adapter, reference_mode


class FrozenReference:
    """The policy as it was before step 0, or another model.

    It is no submodule: neither checkpoints nor optimizers are to know it. A resumed run takes it
    from where the policy comes from, before the checkpoint is restored.

    Attributes:
        model: the second set of weights; None: not noted yet, or none is needed.
        is_too_late: the policy has been trained, and nothing was noted before it was.
    """

    def __init__(self) -> None:
        self.model: Any = None
        self.is_too_late = False

    def note(self, policy: nn.Module, other: PolicyRecipe | None, device_mesh: Any) -> None:
        """Keep what is needed, once: nothing if an adapter can be switched off.

        Args:
            policy: as it stands before the first step, not sharded yet.
            other: the reference, if it is another model.
            device_mesh: over which a reference is sharded as the policy will be; None: it is not.
        """
        absent = self.model is None and not self.is_too_late
        model = self._start(policy, other) if absent else None
        if model is None:
            return
        self.model = model.requires_grad_(False).eval()  # noqa: FBT003, torch's signature
        if device_mesh is not None:
            shard(self.model, device_mesh)

    def is_lost(self, policy: nn.Module) -> bool:
        """Whether nobody has, any more, what this reference is."""
        return self.is_too_late and self.model is None and not has_adapter(policy)

    def _start(self, policy: nn.Module, other: PolicyRecipe | None) -> Any:
        """A model to keep; None if an adapter can be switched off."""
        if other is not None:
            return other.model()
        return None if has_adapter(policy) else copy.deepcopy(policy)

    @contextmanager
    def __call__(self, trainer: L.Trainer, policy: nn.Module) -> Iterator[nn.Module]:
        """The reference, on its device, in the precision of the policy and without gradients.

        Args:
            trainer: knows both.
            policy: with its adapter, if that makes the difference.
        """
        if self.model is None:
            # Without either, the policy would be compared with itself.
            assert has_adapter(policy), "the reference was not noted before training"
            with reference_mode(policy), inference(trainer, policy):
                yield policy
            return
        with inference(trainer, self.placed(trainer)):
            yield self.model

    def placed(self, trainer: L.Trainer) -> nn.Module:
        """The second model as the strategy has the policy: its dtype, its device."""
        self.model = trainer.precision_plugin.convert_module(self.model)
        self.model.to(trainer.strategy.root_device)
        model: nn.Module = self.model
        return model
