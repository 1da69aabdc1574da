"""What a rollout asks of an engine, whichever it is: token ids in, token ids and log-probs out.

Texts never pass here: what was sampled is what is trained on, id by id.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, NamedTuple, Protocol

from torch import nn
from transformers import PreTrainedTokenizerBase

from lit_align.errors import UserError
from lit_align.logprobs import base_model

FinishReason = Literal["stop", "length"]

# Logits divided by less leave what float32 can tell apart.
COLDEST = 1e-4


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen, and when there is none any more.

    Args:
        max_new_tokens: upper bound of a completion, in tokens, >= 1, the stop token included.
        temperature: divides the logits, >= 0; 0 takes the likeliest token (greedy).
        top_p: keeps the likeliest tokens that together reach this probability, in (0, 1]; 1: all.
        top_k: keeps this many of the likeliest tokens; 0: all.
        min_p: keeps tokens of at least this share of the likeliest one's probability, in [0, 1].
        stop_token_ids: each ends a completion and is its last token; see `stop_token_ids`.

    Raises:
        UserError: for a value outside its range.
    """

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_whole("max_new_tokens", self.max_new_tokens, at_least=1)
        _check_whole("top_k", self.top_k, at_least=0, remedy="0 keeps all tokens")
        _check_temperature(self.temperature)
        _check_share("top_p", self.top_p, positive=True)
        _check_share("min_p", self.min_p, positive=False)
        ids = self.stop_token_ids
        if not isinstance(ids, Sequence) or isinstance(ids, str):
            raise UserError(f"stop_token_ids must be a list of token ids, not {ids!r}")
        for token in ids:
            _check_whole("a token of stop_token_ids", token, at_least=0)
        # A configuration gives a list.
        object.__setattr__(self, "stop_token_ids", tuple(ids))

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def is_full(self) -> bool:
        """Whether every token can be drawn, so that a completion's log-probs are the sampler's."""
        return not self.is_greedy and self.top_p == 1 and self.top_k == 0 and self.min_p == 0


class Request(NamedTuple):
    """A prompt, and which completions of it are wanted.

    `samples` are their numbers within the group, `seeds` one seed each (see `sample_seed`).
    """

    prompt_ids: list[int]
    samples: list[int]
    seeds: list[int]


class Completion(NamedTuple):
    """What an engine answered.

    `ids` are the sampled tokens, the stop token included if one came ("stop"); otherwise the bound
    or the end of the context cut it ("length"). `logprobs` are nats, one per token, under
    softmax(logits / temperature) over the WHOLE vocabulary, as the trainer computes them (greedy:
    temperature 1); they are the probabilities the tokens were drawn with only if
    `Sampling.is_full`. None where an engine does not know them.
    """

    ids: list[int]
    logprobs: list[float] | None
    finish_reason: FinishReason


class Engine(Protocol):
    """Something that answers prompts with the policy's weights of some version.

    Attributes:
        version: of the weights it answers with, as given to `sync_weights`; None before that.
        is_live: whether it answers with the weights that it was given last.
        in_process: whether it runs the live policy itself, so that its log-probs are the
            trainer's up to rounding; others need a correction.
    """

    @property
    def version(self) -> int | None: ...

    @property
    def in_process(self) -> bool: ...

    @property
    def is_live(self) -> bool: ...

    def sync_weights(self, version: int, policy: nn.Module) -> None:
        """Answer with these weights from now on; called once before each rollout, on all ranks."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """The completions of each request, in the order of the requests and their samples.

        With more than one rank, all of them call it, each with its own requests, maybe none.
        """

    def state_dict(self) -> dict[str, Any]:
        """Plain values that `load_state_dict` takes when a run is resumed."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    def close(self) -> None:
        """Let go of what it holds: processes, connections, weights."""


def sample_seed(run_seed: int, row: int, draw: int, sample: int, version: int) -> int:
    """The seed of one completion, the same on every machine and whatever else is sampled.

    Args:
        run_seed: of the whole run.
        row: of the data, the prompt's.
        draw: how often the data had been gone through before.
        sample: number within the group.
        version: of the policy.

    Returns:
        In [0, 2^63).
    """
    numbers = ",".join(str(int(number)) for number in (run_seed, row, draw, sample, version))
    digest = hashlib.blake2b(numbers.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def stop_token_ids(
    policy: nn.Module, tokenizer: PreTrainedTokenizerBase | None = None
) -> tuple[int, ...]:
    """All tokens that end an answer: chat models have others than their tokenizer's one.

    Args:
        policy: of transformers, plain or with an adapter of peft; its generation config counts.
        tokenizer: its end token counts.

    Returns:
        In ascending order, each once; maybe none.
    """
    config = getattr(base_model(policy), "generation_config", None)
    of_model = getattr(config, "eos_token_id", None)
    ids = list(of_model) if isinstance(of_model, Sequence) else [of_model]
    ids.append(getattr(tokenizer, "eos_token_id", None))
    return tuple(sorted({int(token) for token in ids if token is not None}))


def _check_whole(name: str, value: object, *, at_least: int, remedy: str = "") -> None:
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or value < at_least:  # type: ignore[operator]  # whole numbers compare
        hint = f" ({remedy})" if remedy else ""
        raise UserError(f"{name} must be a whole number >= {at_least}{hint}, not {value!r}")


def _check_temperature(value: float) -> None:
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not known or (value != 0 and value < COLDEST):
        raise UserError(f"temperature must be 0 (greedy) or a number >= {COLDEST}, not {value!r}")


def _check_share(name: str, value: float, *, positive: bool) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    # Written so that NaN fails it.
    inside = number and 0 <= value <= 1 and not (positive and value == 0)
    if not inside:
        raise UserError(f"{name} must be in {'(' if positive else '['}0, 1], not {value!r}")
