"""Attention that a memory answers for, through a twin as in `lit_align.logprobs.attention`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

SUFFIX = "_from_memory"

# The output, (B, S, H, D), and weights that nobody asks for.
Attended = tuple[Tensor, Tensor | None]


class Memory(Protocol):
    """What holds keys and values, and attends to them."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
    ) -> Tensor | None:
        """Attention of a layer, (B, S, H, D); None: to be computed as without a memory.

        Args:
            layer: its number.
            query: (B, H, S, D).
            key: of these tokens, (B, K, S, D).
            value: (B, K, S, D).
            options: what else the layer tells its attention.
        """


@contextmanager
def attention_from_memory(config: Any) -> Iterator[None]:
    """Inside, a model takes the argument `memory`; without it, its attention is as before."""
    before = config._attn_implementation
    twin = before + SUFFIX
    if twin not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(twin, _twin(ALL_ATTENTION_FUNCTIONS[before]))
        AttentionMaskInterface.register(twin, ALL_MASK_ATTENTION_FUNCTIONS[before])
    config._attn_implementation = twin
    try:
        yield
    finally:
        config._attn_implementation = before


def _twin(original: Callable[..., Attended]) -> Callable[..., Attended]:
    def attention(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        memory: Memory | None = None,
        **options: Any,
    ) -> Attended:
        if memory is not None:
            output = memory.attend(module.layer_idx, query, key, value, options)
            if output is not None:
                return output, None
        return original(module, query, key, value, attention_mask, **options)

    return attention
