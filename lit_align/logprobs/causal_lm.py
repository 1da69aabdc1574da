"""The two halves of a causal language model: the body that makes hidden states, and the head."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lit_align.errors import UserError
from lit_align.logprobs.head import Head
from lit_align.logprobs.packing import Packed


class CausalLM(NamedTuple):
    """A model taken apart; the modules are the model's own, not copies."""

    body: nn.Module
    head: Head

    def hidden_states(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Final hidden states, (B, T, H), the head not run.

        Positions count the real tokens of each row, so that padding on the left is no shift.
        """
        arguments = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
        # Recurrent bodies and those that bias attention by distance count for themselves.
        if "position_ids" in inspect.signature(self.body.forward).parameters:
            arguments["position_ids"] = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        hidden: Tensor = self.body(**arguments)[0]
        return hidden

    def packed_states(self, packed: Packed) -> Tensor:
        """Final hidden states of one packed sequence, (1, S, H)."""
        # Four axes: a mask to be left alone. Without one, all S * S entries would be made.
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=packed.input_ids.device)
        hidden: Tensor = self.body(
            input_ids=packed.input_ids,
            position_ids=packed.position_ids,
            attention_mask=mask,
            use_cache=False,
            segments=packed.segments,
        )[0]
        if not packed.segments.windows:
            # Rows would have attended to each other.
            raise RuntimeError("the model's attention knows nothing of segments")
        return hidden


def base_model(model: Any) -> Any:
    """The model of transformers inside an adapter of peft, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def take_apart(model: nn.Module) -> CausalLM:
    """Body and head of a model of transformers, with or without an adapter of peft.

    Raises:
        UserError: if the model has no head over a vocabulary, or its adapter learns prompts.
    """
    _refuse_prompt_learning(model)
    base = base_model(model)
    body = base.base_model
    project = base.get_output_embeddings()
    if project is None or body is base:
        raise UserError(
            f"{type(base).__name__} is no causal language model with a body and a head: "
            "load one through AutoModelForCausalLM"
        )
    return CausalLM(body, Head(project, *_postprocessing(base.config)))


def call_inside(model: nn.Module, function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)`, run as if it were the model's forward.

    Wrappers such as FSDP gather the weights in hooks around the model's call. Taking body and head
    separately would run outside these hooks and meet a shard of the weights.
    """
    previous = model.__dict__.get("forward")
    model.forward = function
    try:
        return model(*arguments)
    finally:
        if previous is None:
            del model.forward
        else:  # another wrapper's own redirection
            model.forward = previous


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode inside, and afterwards each module's own mode again.

    Module by module: a frozen part may have been in eval mode inside a training model.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _refuse_prompt_learning(model: nn.Module) -> None:
    """Adapters that prepend learnt tokens would shift every position."""
    adapters: Any = getattr(model, "peft_config", {})
    for adapter in adapters.values():
        if adapter.is_prompt_learning:
            raise UserError(
                f"adapters that learn prompts ({adapter.peft_type}) are not supported: use LoRA"
            )


def _postprocessing(config: Any) -> tuple[float, float | None]:
    """Scale and soft-cap that a model applies to its logits, as its configuration states them."""
    text: Any = config.get_text_config()
    scale = (getattr(text, "logit_scale", None) or 1.0) / (
        getattr(text, "logits_scaling", None) or 1.0
    )
    return scale, getattr(text, "final_logit_softcapping", None)
