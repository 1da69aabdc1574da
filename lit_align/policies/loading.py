"""From the files of a model to its plain weights in memory."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import AutoModelForCausalLM, GgufConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lit_align.errors import UserError

DTYPES: dict[str, torch.dtype | str] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "auto": "auto",
}


def check_dtype(dtype: str) -> None:
    """Raise UserError unless `dtype` is one of `DTYPES`."""
    _check_choice("dtype", dtype, DTYPES)


def load_model(where: Mapping[str, Any], dtype: str, attn_implementation: str | None) -> Any:
    """The causal language model that `where` leads to, every weight from its files.

    Args:
        where: arguments of `from_pretrained` that say what to load, see `source.locate`.
        dtype: of the weights, one of `DTYPES`.
        attn_implementation: as transformers names it; None lets it choose.

    Raises:
        UserError: if the attention is unknown, or a weight is in none of the files.
    """
    # A kernel on the hub is named by its repository.
    if attn_implementation is not None and "/" not in attn_implementation:
        known = {"eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()}
        _check_choice("attn_implementation", attn_implementation, known)
    # Weights left in their packed blocks neither train nor save.
    unpacked = {"quantization_config": GgufConfig(dequantize=True)} if "gguf_file" in where else {}
    model, report = AutoModelForCausalLM.from_pretrained(
        **where,
        **unpacked,
        dtype=DTYPES[dtype],
        attn_implementation=attn_implementation,
        output_loading_info=True,
    )
    if report["missing_keys"]:
        # transformers would fill them with random numbers.
        missing = ", ".join(sorted(report["missing_keys"]))
        raise UserError(f"the files of '{where['pretrained_model_name_or_path']}' lack {missing}")
    return model


def checkpoint_activations(model: Any) -> None:
    """Have the backward pass compute the activations of each layer again."""
    if not model.supports_gradient_checkpointing:
        raise UserError(
            f"{type(model).__name__} does not support gradient_checkpointing: set it to false"
        )
    model.activation_checkpointing_enable({"use_reentrant": False})
    # Frozen embeddings give nothing a gradient could flow back to.
    model.enable_input_require_grads()
    model.config.use_cache = False


def remove_dropout(model: nn.Module) -> None:
    """Set the probability of every dropout to 0, whether it is a module or a number."""
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            # Attention calls dropout as a function, with a number that it keeps.
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def _check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Raise UserError listing the choices unless `value` is one."""
    if value not in choices:
        raise UserError(f"unknown {name} '{value}': choose one of {', '.join(sorted(choices))}")
