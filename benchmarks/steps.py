"""Our side of a training step: the modules' own `training_step`, from token ids to gradients.

Collating and the metrics are part of it, as they are of TRL's step.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning as L
import torch
from baselines import BETA, REFERENCE, advantages
from text import Group, Pair
from torch import Tensor, nn

from lit_align import DPOModule, GRPOModule
from lit_align.data.pairs import PairCollate
from lit_align.lean import make_lean
from lit_align.losses import DPOConfig, TensorCache
from lit_align.rollout.batches import collate
from lit_align.rollout.rows import Sample


def twin(model: nn.Module) -> Any:
    """A second model around the very same parameters.

    Whatever our modules change in the layers of their policy, TRL runs the layers as they came; and
    the gradients of both sides land in one place.
    """
    same = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in same})


def policy(model: nn.Module) -> Any:
    """A twin as a recipe makes a policy, unless told otherwise."""
    ours = twin(model)
    make_lean(ours)
    return ours


def quiet_trainer(**options: Any) -> L.Trainer:
    """A Trainer on the CPU that writes nothing."""
    silent = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    return L.Trainer(**{"accelerator": "cpu", "max_steps": 1, **silent, **options})


def attached(module: Any) -> Any:
    """The module as it is when a fit has begun."""
    module.trainer = quiet_trainer()
    module.configure_model()
    return module


def dpo_module(model: nn.Module, **options: Any) -> DPOModule:
    """Around the model's weights, with a reference that knows every row."""
    module = attached(DPOModule(policy(model), DPOConfig("dpo", beta=BETA), **options))
    chosen, rejected = (torch.full((1024,), value) for value in REFERENCE)
    module.reference_cache = TensorCache({"chosen_logps": chosen, "rejected_logps": rejected})
    return module


def dpo_step(
    module: DPOModule, precision: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Callable[[Sequence[Pair]], Tensor]:
    """Collate, loss, metrics, backward.

    Args:
        module: as `dpo_module` makes it.
        precision: what the forward pass runs in, and the backward pass, as with Lightning, does
            not.
    """
    pad = PairCollate(0)

    def step(pairs: Sequence[Pair]) -> Tensor:
        rows: Any = [
            {
                "index": index,
                "prompt_ids": pair.prompt,
                "chosen_ids": pair.chosen,
                "rejected_ids": pair.rejected,
            }
            for index, pair in enumerate(pairs)
        ]
        batch = pad(rows)
        with precision():
            loss = module.training_step(batch, 0)
        loss.backward()
        module.train_metrics()
        return loss.detach()

    return step


def grpo_module(model: nn.Module, **options: Any) -> GRPOModule:
    """Around the model's weights; DAPO's loss, as TRL's default is."""
    return attached(GRPOModule(policy(model), "dapo", reward=len, **options))


def grpo_step(module: GRPOModule) -> Callable[[Sequence[Group]], Tensor]:
    """Collate, loss, metrics, backward."""

    def step(groups: Sequence[Group]) -> Tensor:
        loss = module.training_step(collate(samples(groups)), 0)
        loss.backward()
        module.sums.compute()
        module.sums.reset()
        return loss.detach()

    return step


def samples(groups: Sequence[Group]) -> list[Sample]:
    """Completions with the advantages that TRL's side has."""
    rows = [
        Sample(number, number, place, group.prompt, ids, "stop")
        for number, group in enumerate(groups)
        for place, ids in enumerate(group.completions)
    ]
    for row, advantage in zip(rows, advantages(len(rows)).tolist(), strict=True):
        row.advantage = advantage
    return rows
