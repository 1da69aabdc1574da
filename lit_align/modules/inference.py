"""Running a policy between training steps without leaving a trace."""

from collections.abc import Iterator
from contextlib import contextmanager

import lightning as L
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lit_align.logprobs import eval_mode


@contextmanager
def inference(trainer: L.Trainer, model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no gradients and training's precision; random state and modes come back.

    Lightning opens its precision context around its own steps only, so what runs in other hooks
    would compute in another precision than training does.
    """
    device = trainer.strategy.root_device
    devices = [] if device.type == "cpu" else [device]
    with (
        eval_mode(model),
        torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"),
        torch.no_grad(),
        trainer.precision_plugin.forward_context(),
    ):
        yield
        reshard(model)


def reshard(model: nn.Module) -> None:
    """Let go of the weights that a forward pass has left gathered, if no backward pass follows.

    FSDP keeps the outermost ones for it. A checkpoint could not be restored into them.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
