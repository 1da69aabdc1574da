"""Attention within a packed sequence, through the interface by which transformers looks it up.

Each of transformers' implementations gets a twin of its name with `SUFFIX`. Given segments, the
twin calls the original once per segment, with the keys of the segment's prefix in front: what a
model does with a cache of keys and values, so that windows, soft-caps and sinks stay as they are.
Without segments (generation, the user's own calls) the twin is the original.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    causal_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lit_align.logprobs.cpu_attention import segmented_attention

SUFFIX = "_in_segments"
# Where a model's own file defines it, under this name.
EAGER = "eager_attention_forward"

Attention = Callable[..., tuple[Tensor, Tensor | None]]


class Segment(NamedTuple):
    """Tokens [start, stop) of a packed sequence, which follow those of [prefix_start, prefix_stop).

    They attend to the whole prefix and, causally, to themselves.
    """

    start: int
    stop: int
    prefix_start: int = 0
    prefix_stop: int = 0

    @property
    def prefix(self) -> int:
        """How many tokens come before."""
        return self.prefix_stop - self.prefix_start

    def with_prefix(self, states: Tensor) -> Tensor:
        """Keys or values, (1, H, S, D), of prefix and segment."""
        own = states[:, :, self.start : self.stop]
        if not self.prefix:
            return own
        return torch.cat([states[:, :, self.prefix_start : self.prefix_stop], own], 2)


class Segments:
    """The segments of one packed sequence, in order and without gaps.

    A class of its own and no list: wrappers that look into lists would pass copies on.
    """

    def __init__(self, segments: list[Segment]) -> None:
        self._segments = segments
        self._masks: dict[tuple[Any, ...], Tensor | None] = {}
        # Of each layer that has attended: its sliding window, and the precision it computes in.
        self.windows: list[int | None] = []
        self.dtypes: set[torch.dtype] = set()

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._segments)

    def mask(self, name: str, segment: Segment, query: Tensor, window: int | None) -> Tensor | None:
        """The mask of one segment as the implementation wants it, made once for all layers."""
        own = segment.stop - segment.start
        key = (name, own, segment.prefix, window, query.dtype)
        if key not in self._masks:
            self._masks[key] = ALL_MASK_ATTENTION_FUNCTIONS[name](
                batch_size=1,
                q_length=own,
                kv_length=segment.prefix + own,
                q_offset=segment.prefix,
                mask_function=sliding_window_causal_mask_function(window)
                if window
                else causal_mask_function,
                local_size=window,
                dtype=query.dtype,
                device=query.device,
            )
        return self._masks[key]


def plain_attention(config: Any) -> str:
    """Name of the attention implementation that a model was loaded with."""
    name: str = config._attn_implementation or "eager"
    return name.removesuffix(SUFFIX)


def original_attention(name: str, module: nn.Module) -> Attention | None:
    """The implementation of a name, None if there is none; "eager" is each model's own."""
    if name != "eager":
        found: Attention | None = ALL_ATTENTION_FUNCTIONS.get(name)
        return found
    # Wrappers such as FSDP put a class of their own before the model's.
    files = (sys.modules[kind.__module__] for kind in type(module).__mro__)
    return next((getattr(file, EAGER) for file in files if hasattr(file, EAGER)), None)


def install(config: Any) -> None:
    """Let a model's attention understand segments, from now on.

    Not only for one call: under gradient checkpointing the backward pass computes the layers again.
    """
    name = plain_attention(config)
    twin = name + SUFFIX
    if twin not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(twin, _twin(name))
        AttentionMaskInterface.register(twin, ALL_MASK_ATTENTION_FUNCTIONS[name])
    config._attn_implementation = twin


def _twin(name: str) -> Attention:
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        segments: Segments | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        original = original_attention(name, module)
        assert original is not None
        if segments is None:
            return original(module, query, key, value, attention_mask, **options)
        # Positions that restart would tell flash attention of boundaries; these calls have none.
        options.pop("position_ids", None)
        window = options.get("sliding_window")
        segments.windows.append(window)
        segments.dtypes.add(query.dtype)
        if name == "sdpa" and query.device.type == "cpu" and not window and not _drops(options):
            return _by_products(query, key, value, segments, options.get("scaling")), None
        outputs = [
            original(
                module,
                query[:, :, segment.start : segment.stop],
                segment.with_prefix(key),
                segment.with_prefix(value),
                segments.mask(name, segment, query, window),
                **options,
            )[0]
            for segment in segments
        ]
        return torch.cat(outputs, 1), None

    return attention


def _drops(options: dict[str, Any]) -> bool:
    """Whether attention weights are dropped at random."""
    return bool(options.get("dropout"))


def _by_products(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None
) -> Tensor:
    """What torch's kernel gives, faster; under autocast in the precision that it would take."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return segmented_attention(query, key, value, segments, scale)
