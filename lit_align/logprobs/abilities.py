"""Whether the layers of a model let rows stand in one sequence, and share what they begin with."""

import inspect
import logging
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from lit_align.logprobs.attention import install, original_attention, plain_attention
from lit_align.logprobs.causal_lm import base_model, call_inside, eval_mode, take_apart
from lit_align.logprobs.packing import Packed, pack, packable_rows, shared_prefixes
from lit_align.ops import IGNORE_INDEX, completion_mask

# Layers whose tokens meet in attention alone, and there as far as positions and windows say.
PACKABLE_LAYERS = {"full_attention", "sliding_attention"}
# The probe: two rows that share a prompt and one that does not, tokens.
PROBE = ((20, 23, 0), (20, 22, 30), (6, 12, 60))  # prompt, whole row, first token id
LONGEST_PROBE = max(length for _, length, _ in PROBE)

log = logging.getLogger(__name__)


class Abilities:
    """What the layers of a model allow.

    Attributes:
        attention: name of the implementation with which that was found out.
        no_packing: why rows have to stay padded; None: they need not.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = ref(model)
        self._name = type(base_model(model)).__name__
        self.attention = plain_attention(base_model(model).config.get_text_config())
        self._said: set[str] = set()
        self.no_packing = _obstacle(base_model(model)) or _fault(model)
        self._modules = 0
        self._dropouts: list[nn.Module] = []

    def pack(self) -> bool:
        """Whether rows can stand in one sequence; says once why not."""
        if self.no_packing:
            self._say(f"{self._name} keeps its rows padded: {self.no_packing}")
        return self.no_packing is None

    def share(self) -> bool:
        """Whether rows can share what they begin with at this moment; says once why not."""
        # One row's random numbers would be all rows'.
        drawing = any(module.training and _draws(module) for module in self._may_draw())
        if drawing:
            self._say(f"{self._name} packs rows, their prompts not shared: it trains with dropout")
        return not drawing

    def _may_draw(self) -> list[nn.Module]:
        """Modules with a dropout, be it 0 at this moment; looked for again if some were added."""
        model = self._model()
        assert model is not None
        modules = list(model.modules())
        if len(modules) != self._modules:
            self._modules = len(modules)
            self._dropouts = [module for module in modules if _shares(module)]
        return self._dropouts

    def _say(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            log.info(message)


_KNOWN: "WeakKeyDictionary[nn.Module, Abilities]" = WeakKeyDictionary()


def abilities(model: nn.Module) -> Abilities:
    """What a model allows, found out once: on all ranks at the same call, for it runs the model."""
    known = _KNOWN.get(model)
    config = base_model(model).config.get_text_config()
    if known is None or known.attention != plain_attention(config):
        known = _KNOWN[model] = Abilities(model)
    elif known.no_packing is None:
        # The user may have chosen the same implementation again.
        install(config)
    return known


def _obstacle(base: Any) -> str | None:
    """What configuration and modules say against packing."""
    config = base.config.get_text_config()
    parameters = inspect.signature(base.base_model.forward).parameters
    attention = plain_attention(config)
    foreign = sorted(set(getattr(config, "layer_types", None) or ()) - PACKABLE_LAYERS)
    context = getattr(config, "max_position_embeddings", None) or LONGEST_PROBE
    convolutions = any(isinstance(module, nn.Conv1d) for module in base.base_model.modules())
    obstacles = {
        "it has an encoder": config.is_encoder_decoder,
        f"its context of {context} tokens is too short for a trial": context < LONGEST_PROBE,
        "it has convolutions over neighbouring tokens": convolutions,
        f"it has layers of the kinds {', '.join(foreign)}": bool(foreign),
        "its attention is biased by distance": bool(getattr(config, "alibi", False)),
        "it takes no position ids": "position_ids" not in parameters,
        "its attention cannot be chosen": not getattr(base, "_supports_attention_backend", False),
        f"its attention '{attention}' is unknown here": (
            original_attention(attention, base.base_model) is None
        ),
    }
    return next((words for words, found in obstacles.items() if found), None)


@torch.no_grad()
def _fault(model: nn.Module) -> str | None:
    """What a trial says against packing, which no configuration tells."""
    config = base_model(model).config.get_text_config()
    parts = take_apart(model)
    before = config._attn_implementation
    batch = _probe(next(model.parameters()).device, config.vocab_size)
    rows = packable_rows(*batch)
    assert rows is not None
    packed = pack(rows, shared_prefixes(rows), batch[0].device)
    install(config)

    def both_ways() -> tuple[Tensor, Tensor]:
        padded = parts.hidden_states(*batch[:2])[:, :-1][completion_mask(batch[2])]
        return parts.packed_states(packed)[0, packed.sources], padded

    with eval_mode(model), torch.autocast(batch[0].device.type, enabled=False):
        found, right = call_inside(model, both_ways)
    fault = _unasked(config, packed) or _difference(found, right, packed)
    if fault:
        config._attn_implementation = before
    return fault


def _probe(device: torch.device, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Input ids, attention mask and labels of the trial."""
    ids = torch.zeros(len(PROBE), LONGEST_PROBE, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, IGNORE_INDEX)
    for row, (prompt, length, first) in enumerate(PROBE):
        ids[row, :length] = (torch.arange(length) + 1) % vocabulary
        ids[row, prompt:length] = (torch.arange(length - prompt) + first) % vocabulary
        mask[row, :length] = 1
        labels[row, prompt:length] = ids[row, prompt:length]
    return ids.to(device), mask.to(device), labels.to(device)


def _unasked(config: Any, packed: Packed) -> str | None:
    """Whether layers go by something else than segments: the trial is shorter than a window."""
    asked = packed.segments.windows
    sliding = (getattr(config, "layer_types", None) or []).count("sliding_attention")
    if len(asked) != config.num_hidden_layers:
        return f"{len(asked)} of its {config.num_hidden_layers} layers attend as others do"
    if sum(map(bool, asked)) < sliding:
        return f"the windows of its {sliding} sliding layers are unknown here"
    return None


def _difference(found: Tensor, right: Tensor, packed: Packed) -> str | None:
    """Whether a packed row comes out as something else than it is by itself."""
    # Models of float64 normalise in float32.
    dtypes = {torch.float32, right.dtype, *packed.segments.dtypes}
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    difference = float((found.float() - right.float()).norm() / right.float().norm())
    # Half the digits: many layers round in many ways. Written so that NaN fails.
    if not difference <= eps**0.5:
        return f"packed, its hidden states differ by {difference:.2g}"
    return None


def _draws(module: nn.Module) -> bool:
    """Whether a module draws random numbers in training, each token its own."""
    return any(share > 0 for share in _shares(module))


def _shares(module: nn.Module) -> list[float]:
    """Which shares of what it computes a module drops in training."""
    shares = [getattr(module, name, None) for name in ("dropout", "attention_dropout")]
    if isinstance(module, nn.Dropout):
        shares.append(module.p)
    return [share for share in shares if isinstance(share, float)]
