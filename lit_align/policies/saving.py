"""A policy as a folder that transformers loads, complete or not there at all."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from lit_align.errors import UserError
from lit_align.logprobs import base_model
from lit_align.policies.adapters import has_adapter, without_hops
from lit_align.policies.merging import merged_weights


@torch.no_grad()
def save_policy(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    state_dict: Mapping[str, Tensor] | None = None,
) -> None:
    """Write model and tokenizer so that `from_pretrained(folder)` gives this policy.

    An adapter is added to a copy of the weights; the policy itself stays as it is, also in the
    middle of training. An older folder is replaced when the new one is complete, not before.

    Args:
        model: a model of transformers, or one with an adapter of peft.
        tokenizer: saved beside it, with its chat template.
        folder: where to; made with its parents.
        state_dict: the gathered weights of a sharded model under the names of
            `model.state_dict()`; only the first rank calls this then. None takes the model's own.

    Raises:
        UserError: if `folder` is a file.
    """
    weights = dict(model.state_dict() if state_dict is None else state_dict)
    base = base_model(model)
    if has_adapter(model):
        weights = merged_weights(model, weights)
    untied = _drop_duplicates(base, weights)
    with replacing(Path(folder)) as draft:
        _write_model(base, weights, draft)
        tokenizer.save_pretrained(draft)
        _settle_config(draft / "config.json", untied=untied)


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A new folder to fill; at the end it takes the place and name of `folder`."""
    if folder.is_file():
        raise UserError(f"cannot write the folder '{folder}': there is a file of that name")
    draft = folder.with_name(f".{folder.name}.{uuid4().hex[:8]}.part")
    draft.mkdir(parents=True)
    try:
        yield draft
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    old = draft.with_suffix(".old")
    if folder.exists():
        folder.rename(old)
    draft.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _write_model(base: Any, weights: dict[str, Tensor], folder: Path) -> None:
    """Weights, configuration, and the generation settings just as the model has them."""
    settings = base.generation_config
    # transformers loads settings that contradict each other, which public models do have, but
    # refuses to save them: a finished run would lose its model over a sampling temperature.
    base.generation_config = GenerationConfig()
    try:
        base.save_pretrained(folder, state_dict=weights)
    finally:
        base.generation_config = settings
    settings.to_json_file(folder / "generation_config.json")


def _drop_duplicates(base: Any, weights: dict[str, Tensor]) -> bool:
    """Keep one name of tied weights; true if an adapter has made tied weights differ."""
    first: dict[int, str] = {}
    untied = False
    for adapted, parameter in base.named_parameters(remove_duplicate=False):
        name = without_hops(adapted)
        kept = first.setdefault(id(parameter), name)
        if kept == name or name not in weights:
            continue
        if torch.equal(weights[name], weights[kept]):
            del weights[name]
        else:
            untied = True
    return untied


def _settle_config(path: Path, *, untied: bool) -> None:
    """What training changes in the configuration, and a saved policy should not keep."""
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    # Gradient checkpointing switches the cache off, which would make generation very slow.
    if config.get("use_cache") is False:
        config["use_cache"] = True
    if untied:
        config["tie_word_embeddings"] = False
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
