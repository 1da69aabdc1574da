"""The weights of an adapted model with the adapter added, the model itself left alone."""

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lit_align.policies.adapters import PREFIX, without_hops


def merged_weights(model: Any, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The base model's weights with the adapter added, by the base model's names.

    Neither the model nor the tensors in `state_dict` change.

    Args:
        model: with an adapter; it may be sharded.
        state_dict: whole tensors under the names of `model.state_dict()`.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    weights = {name.removeprefix(PREFIX): tensor for name, tensor in state_dict.items()}
    for name, module in model.get_base_model().named_modules():
        if isinstance(module, BaseTunerLayer):
            merged = _merged_layer(module, _take(weights, f"{name}."))
        elif isinstance(module, ModulesToSaveWrapper):
            (active,) = module.active_adapters
            merged = _take(_take(weights, f"{name}."), f"modules_to_save.{active}.")
        else:
            continue
        plain = without_hops(name)
        weights.update({f"{plain}.{part}": tensor for part, tensor in merged.items()})
    return weights


def _merged_layer(layer: Any, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weight and bias of one adapted layer after merging, as peft merges them."""
    # Tensors found in the memo are shared, not copied: the twin costs no memory, and filling it
    # from `own` replaces its references without touching the layer's tensors.
    tensors = [*layer.parameters(), *layer.buffers()]
    twin = copy.deepcopy(layer, {id(tensor): tensor for tensor in tensors})
    twin.load_state_dict(own, assign=True)
    twin.merge(safe_merge=True)
    merged: dict[str, Tensor] = twin.get_base_layer().state_dict()
    return merged


def _take(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Removes what is named `prefix...` and returns it without the prefix."""
    names = [name for name in weights if name.startswith(prefix)]
    return {name.removeprefix(prefix): weights.pop(name) for name in names}
