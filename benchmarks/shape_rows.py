"""The rows in which there is little to save: short prompts, single completions, longer rows."""

from collections.abc import Callable, Mapping
from typing import Any

import steps
from overhead import overhead as per_step
from paired import Spread, Variant, measure, spread
from setting import Found, Setting, with_matmul
from text import Text

PAIRS = 2
ROWS = 4
# Of a prompt, tokens.
SHORT = 16
PROMPT = 256


def short(setting: Setting) -> Found:
    """Pairs whose prompts are short, in the layout that is chosen and in the padded one."""
    variants = {
        layout: steps.dpo_step(steps.dpo_module(setting.model, layout=layout))
        for layout in ("padded", "auto")
    }

    def batch(number: int) -> Any:
        text = Text(setting.tokenizer, 800 + number)
        return text.pairs(PAIRS, (SHORT, SHORT), setting.sizes.answer)

    return _layouts(setting, variants, batch, setting.few()[0])


def single(setting: Setting) -> Found:
    """Completions of different prompts, in the layout that is chosen and in the padded one."""
    variants = {
        layout: steps.grpo_step(steps.grpo_module(setting.model, layout=layout))
        for layout in ("padded", "auto")
    }

    def batch(number: int) -> Any:
        text = Text(setting.tokenizer, 900 + number)
        return text.groups(ROWS, 1, setting.sizes.prompt, setting.sizes.answer)

    return _layouts(setting, variants, batch, setting.few()[1])


def _layouts(
    setting: Setting,
    variants: Mapping[str, Callable[[Any], Any]],
    batch: Callable[[int], Any],
    warm_up: Any,
) -> Found:
    times = measure(
        {name: Variant(step, with_matmul("auto")) for name, step in variants.items()},
        batch,
        setting.rounds,
        before=setting.model.zero_grad,
        warm_up=warm_up,
    )
    seconds = ", ".join(f"{name} {times.median(name):.2f}" for name in times.by_name)
    return Found({"padded": spread(times.ratios("padded", "auto"))}, [], {"CPU seconds": seconds})


def scaling(setting: Setting) -> Found:
    """Seconds per token of a pair from short answers to long ones: the slowest over the fastest."""
    step = steps.dpo_step(steps.dpo_module(setting.model))
    prompt = setting.sizes.prompt[0]
    lengths = {prompt + 2 * answer: answer for answer in setting.sizes.scaling}

    def of_length(answer: int) -> Variant:
        text = Text(setting.tokenizer, answer)
        pairs = text.pairs(1, (prompt, prompt), (answer, answer))
        return Variant(lambda _: step(pairs), with_matmul("auto"))

    times = measure(
        {str(tokens): of_length(answer) for tokens, answer in lengths.items()},
        lambda number: None,
        setting.rounds,
        before=setting.model.zero_grad,
        warm_up=(),
    )
    per_token = {n: [s / int(n) for s in seconds] for n, seconds in times.by_name.items()}
    rounds = zip(*per_token.values(), strict=True)
    said = (f"{n} tokens {1000 * spread(each).median:.2f}" for n, each in per_token.items())
    ratios = [max(each) / min(each) for each in rounds]
    return Found({"fastest": spread(ratios)}, [], {"CPU ms per token": ", ".join(said)})


def overhead(setting: Setting) -> Found:
    """The most that a step of `Trainer.fit` takes beside its arithmetic, of several losses."""
    quick = {"steps": 5, "rounds": 1} if setting.program else {"rounds": setting.rounds}
    found = per_step(**quick)
    ours = {name: took for name, took in found.items() if not name.endswith("bare")}
    worst = max(ours.values())
    said = ", ".join(f"{name} {took:.2f}" for name, took in ours.items())
    number = Spread(worst, min(ours.values()), worst, setting.rounds)
    return Found({"bare": number}, [], {"ms a step": said})
