"""The rows of generation: our engine against `generate` as TRL calls it.

TRL repeats each prompt once per completion, pads on the left and lets `generate` run until the
longest completion has ended. Ours also returns the log-prob of every token.
"""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import steps
import torch
from paired import Times, Variant, measure, spread
from setting import Check, Found, Setting, with_matmul
from text import Text, stream
from transformers import GenerationConfig

from lit_align.rollout.engine import Request, Sampling
from lit_align.rollout.huggingface import HuggingFaceEngine

PROMPTS = 4
GROUP = 8
EARLY = 2  # times as many tokens may come where completions end early


class Asked(NamedTuple):
    """Prompts, and how long the longest completion will be."""

    prompts: list[list[int]]
    longest: int


def generation(setting: Setting) -> Found:
    """Every completion takes all the tokens that it may have."""
    sampling = Sampling(max_new_tokens=setting.sizes.new_tokens)
    found = _found(setting, sampling)
    found.checks.append(_greedy_agrees(setting))
    return found


def generation_stops(setting: Setting) -> Found:
    """Completions end early, each at its own length, on average at half of the bound.

    Some tokens of the vocabulary are taken for stop tokens. What `generate` draws is something
    else; it is made to run as long as our longest completion.
    """
    bound = EARLY * setting.sizes.new_tokens
    stops = stop_tokens(setting, 1 / setting.sizes.new_tokens)
    return _found(setting, Sampling(max_new_tokens=bound, stop_token_ids=stops))


def stop_tokens(setting: Setting, share: float) -> tuple[int, ...]:
    """Tokens drawn by lot that make up this share of the text.

    A token that alone makes up more of it is left out.
    """
    tokens = stream(setting.tokenizer)
    counts: dict[int, int] = {}
    for token in tokens:
        counts[token] = counts.get(token, 0) + 1
    found: list[int] = []
    room = share * len(tokens)
    for token in random.Random(0).sample(sorted(counts), len(counts)):
        if counts[token] <= room:
            found.append(token)
            room -= counts[token]
    return tuple(found)


def _found(setting: Setting, sampling: Sampling) -> Found:
    engine = HuggingFaceEngine()
    engine.sync_weights(0, steps.policy(setting.model))
    lengths: list[list[int]] = []

    def ours(asked: Asked) -> list[int]:
        rows = engine.generate(_requests(asked.prompts), sampling)
        return [len(completion.ids) for row in rows for completion in row]

    def batch(number: int) -> Asked:
        prompts = _prompts(setting, 300 + number)
        # The same seeds give the same completions: how long they get is known by asking.
        known = ours(Asked(prompts, 0)) if sampling.stop_token_ids else [sampling.max_new_tokens]
        lengths.append(known)
        return Asked(prompts, max(known))

    variants = {
        "generate": Variant(_generate(setting), with_matmul("default")),
        "ours_default": Variant(ours, with_matmul("default")),
        "ours": Variant(ours, with_matmul("auto")),
    }
    times = measure(variants, batch, setting.rounds, warm_up=Asked([[1, 2, 3]], 3))
    numbers = {
        "trl": spread(times.ratios("generate", "ours")),
        "response": spread(times.ratios("generate", "ours_default")),
    }
    return Found(numbers, [], {"tokens": _tokens(lengths), "CPU seconds": _seconds(times)})


def _generate(setting: Setting) -> Callable[[Asked], torch.Tensor]:
    model = steps.twin(setting.model)

    def step(asked: Asked) -> torch.Tensor:
        model.eval()
        rows = [prompt for prompt in asked.prompts for _ in range(GROUP)]
        return _generated(model, rows, asked.longest, do_sample=True, top_k=0, top_p=1.0)

    return step


@torch.no_grad()
def _generated(model: Any, rows: list[list[int]], tokens: int, **options: Any) -> torch.Tensor:
    """What `generate` adds to rows padded on the left, (B, tokens)."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    # No token of the vocabulary ends a row.
    length = {"max_new_tokens": tokens, "eos_token_id": -1, "pad_token_id": 0}
    config = GenerationConfig(**length, **options, disable_compile=True)
    return model.generate(input_ids=ids, attention_mask=mask, generation_config=config)[:, width:]


def _greedy_agrees(setting: Setting) -> Check:
    """Token for token, with torch's BLAS on both sides."""
    prompts, tokens = _prompts(setting, 1)[:2], min(16, setting.sizes.new_tokens)
    engine = HuggingFaceEngine()
    engine.sync_weights(0, steps.policy(setting.model))
    rows = engine.generate(_requests(prompts), Sampling(tokens, temperature=0))
    ours = torch.tensor([completion.ids for row in rows for completion in row])
    model = steps.twin(setting.model).eval()
    theirs = _generated(model, [p for p in prompts for _ in range(GROUP)], tokens, do_sample=False)
    return Check("greedy tokens unlike those of `generate`", float((ours != theirs).sum()), 0)


def _prompts(setting: Setting, seed: int) -> list[list[int]]:
    text = Text(setting.tokenizer, seed)
    return [text.cut(setting.sizes.asked_prompt) for _ in range(PROMPTS)]


def _requests(prompts: list[list[int]]) -> list[Request]:
    return [
        Request(ids, list(range(GROUP)), [GROUP * number + place for place in range(GROUP)])
        for number, ids in enumerate(prompts)
    ]


def _tokens(lengths: list[list[int]]) -> str:
    longest = spread([float(max(row)) for row in lengths])
    mean = spread([sum(row) / len(row) for row in lengths])
    return f"{PROMPTS} x {GROUP} completions a round, mean length {mean}, longest {longest}"


def _seconds(times: Times) -> str:
    return ", ".join(f"{name} {times.median(name):.2f}" for name in times.by_name)
