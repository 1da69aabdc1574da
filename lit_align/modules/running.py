"""The numbers that a loss remembers from one optimizer step to the next, kept for it."""

from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lit_align.losses import RUNNING, moments
from lit_align.modules.ranks import from_all_replicas

Key = tuple[str, str]  # name of a loss, and of the tensor that it reads


class RunningNumbers:
    """What some losses remember, the same on every rank; see `lit_align.losses.running`.

    The states are no buffers: a module in half precision would round them, and strategies that
    shard would shard them.

    Args:
        configs: of the losses, by name.
    """

    def __init__(self, configs: Mapping[str, Any]) -> None:
        self._configs = dict(configs)
        self._states: dict[Key, Tensor] = {
            (name, tensor): RUNNING[tensor].start
            for name, config in configs.items()
            for tensor in config.variant.optional_tensors
            if tensor in RUNNING
        }
        self._seen: dict[Key, Tensor] = {}

    def __getitem__(self, loss: str) -> dict[str, Tensor]:
        """The numbers of a loss, () each, float64, on the CPU, by the names that it reads."""
        return {
            tensor: RUNNING[tensor].read(state)
            for (name, tensor), state in self._states.items()
            if name == loss
        }

    def observe(self, found: Mapping[str, Any], counted: Tensor) -> None:
        """Take note of a micro-batch.

        Args:
            found: what each loss says of the rows, (B,) each.
            counted: the rows that are real and this micro-batch's own, (B,) bool.
        """
        for key in self._states:
            loss, tensor = key
            rows = found[loss]._make(values[counted] for values in found[loss])
            sums = moments(RUNNING[tensor].values(self._configs[loss], rows))
            self._seen[key] = self._seen.get(key, torch.zeros_like(sums)) + sums

    def end_step(self, trainer: L.Trainer) -> None:
        """Go one optimizer step on; all ranks together."""
        if not self._seen:
            return
        everywhere = from_all_replicas(trainer, self._seen)
        self._seen = {}
        for (loss, tensor), state in self._states.items():
            sums = torch.stack([seen[loss, tensor] for seen in everywhere]).sum(0)
            self._states[loss, tensor] = RUNNING[tensor].after(state, sums, self._configs[loss])

    def forget_step(self) -> None:
        """Begin the step anew, whatever a run that was stopped had seen of it."""
        self._seen = {}

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """By loss and tensor."""
        states: dict[str, dict[str, Tensor]] = {}
        for (loss, tensor), state in self._states.items():
            states.setdefault(loss, {})[tensor] = state
        return states

    def load_state_dict(self, states: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on from there; a loss of which nothing is known, from the start."""
        for loss, tensor in self._states:
            if tensor in states.get(loss, {}):
                self._states[loss, tensor] = states[loss][tensor].cpu()
