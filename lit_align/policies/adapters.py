"""LoRA adapters: attached, switched off for the reference, told apart from the base weights."""

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from lit_align.errors import UserError, missing_extra
from lit_align.logprobs import eval_mode, response_logprobs

# What peft puts before the names of the base model's weights.
PREFIX = "base_model.model."
# Under these names peft's layers keep the layer they stand in for.
HOPS = {"base_layer", "original_module", "token_adapter"}


def has_adapter(model: nn.Module) -> bool:
    """Whether an adapter of peft is wrapped around the model."""
    return hasattr(model, "disable_adapter")


@contextmanager
def reference_mode(model: Any) -> Iterator[None]:
    """The model as its own reference: inside, its adapter is off; without one, nothing changes.

    Biases that are trained beside an adapter (`bias="all"`) stay as they are: whether they have
    moved, `policy_fingerprint` tells.
    """
    adapter_off = model.disable_adapter if has_adapter(model) else nullcontext
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Careful, disabling adapter layers with bias")
        with adapter_off():
            yield


def attach_lora(model: Any, options: Mapping[str, Any]) -> Any:
    """The model with a fresh LoRA adapter, its own weights frozen.

    Args:
        model: a model of transformers.
        options: keyword arguments of `peft.LoraConfig`.

    Raises:
        UserError: if peft is missing, an option is unknown or does not fit the model, or the
            adapter does not start as a copy of the base, which is the reference.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise missing_extra("peft", "peft") from error
    _check_options(options, {field.name for field in dataclasses.fields(LoraConfig) if field.init})
    try:
        with warnings.catch_warnings():
            # peft 0.21 reads an attribute of the model that transformers 5.24 deprecates.
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*deprecated")
            adapted = get_peft_model(model, LoraConfig(**{"task_type": "CAUSAL_LM", **options}))
    except (ValueError, TypeError) as error:
        layers = sorted({name.rpartition(".")[2] for name, _ in _linear_layers(model)})
        raise UserError(
            f"LoRA does not fit {type(model).__name__}: {error} "
            f"(its linear layers: {', '.join(layers)})"
        ) from error
    _refuse_a_moved_start(adapted)
    return adapted


def base_names(model: Any) -> dict[str, str]:
    """What the base model calls its weights: names in `model.state_dict()` to its own names.

    What belongs to an adapter is left out; without one, every name stands for itself.
    """
    names = list(model.state_dict(keep_vars=True))
    if not has_adapter(model):
        return dict(zip(names, names, strict=True))
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    adapted = [
        f"{PREFIX}{name}."
        for name, module in model.get_base_model().named_modules()
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)
    ]
    return {
        name: without_hops(name.removeprefix(PREFIX))
        for name in names
        if not any(_is_beside_a_hop(name, prefix) for prefix in adapted)
    }


def _is_beside_a_hop(name: str, prefix: str) -> bool:
    """Whether a weight lies in the module `prefix` names, but not in the layer it stands for."""
    inside = name.removeprefix(prefix)
    return inside != name and inside.partition(".")[0] not in HOPS


def without_hops(name: str) -> str:
    """A module's or weight's name as it was before peft put its layers around it."""
    return ".".join(part for part in name.split(".") if part not in HOPS)


@torch.no_grad()
def _refuse_a_moved_start(model: Any) -> None:
    """Some initialisations move the base weights; without its adapter the model is then no base."""
    ids = torch.arange(1, 9).unsqueeze(0) % model.config.get_text_config().vocab_size
    batch = (ids, torch.ones_like(ids), ids)
    with eval_mode(model):
        start = response_logprobs(model, *batch, layout="padded").logprobs
        with reference_mode(model):
            reference = response_logprobs(model, *batch, layout="padded").logprobs
    if not start.equal(reference):
        raise UserError(
            "this LoRA adapter does not start as a copy of the model, which is to be the "
            f"reference (they differ by {float((start - reference).abs().max()):.2g} nats): "
            "leave init_lora_weights at its default"
        )


def _check_options(options: Mapping[str, Any], known: set[str]) -> None:
    """Raise UserError naming the options that peft does not know, with the nearest it does."""
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f": did you mean '{near[0]}'?" if near else ""
            raise UserError(f"unknown LoRA option '{name}'{hint} (options of peft.LoraConfig)")
    if options.get("ensure_weight_tying"):
        # Two parameters then share one storage, and an optimizer moves it twice in a step.
        raise UserError("the LoRA option ensure_weight_tying is not supported: leave it out")


def _linear_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Layers that LoRA can adapt, GPT-2's transposed ones among them."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if type(module).__name__ in {"Linear", "Conv1D"}
    ]
