"""The rows of training steps: collate, loss with metrics, backward; no optimizer."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import baselines
import steps
import torch
from baselines import response_only
from paired import Step, Times, Variant, measure, spread
from setting import Check, Found, Setting, with_matmul
from torch import Tensor

PAIRS = 2  # of a batch
# What is compared with what, in the order in which they run, and how far apart they may be in
# float32: losses, and gradients in the L2 norm, relative. A log-softmax over all logits in one
# piece rounds more than sums in chunks do.
EXACT = {"ours_default": "trl", "ours": "trl", "full": "ours"}
AGAINST = {"trl": 1e-5, "ours": 1e-4}
# In bfloat16 every order of summation has other errors: ours may be no further from float32's
# gradient than TRL's is, but for this factor, nor further than this in any case.
AS_GOOD = 1.25
AT_MOST = 0.05


def dpo_fp32(setting: Setting) -> Found:
    """Two pairs, float32."""
    model = setting.model
    ours = steps.dpo_step(steps.dpo_module(model))
    trl = _trl_dpo(setting)
    full = baselines.full_logits_pairs(steps.twin(model))
    batch: Any = partial(_pairs, setting)
    return _float32(setting, _variants(trl, ours, full), batch, setting.few()[0])


def grpo(setting: Setting) -> Found:
    """One prompt with eight completions, float32."""
    ours = steps.grpo_step(steps.grpo_module(setting.model))
    other = steps.twin(setting.model)
    trl = baselines.grpo_step(baselines.grpo_trainer(other, setting.tokenizer, 8), other)
    full = baselines.full_logits_groups(steps.twin(setting.model))

    def batch(number: int) -> Any:
        return setting.groups(1, 200 + number)

    return _float32(setting, _variants(trl, ours, full), batch, setting.few()[1])


def dpo_bf16(setting: Setting) -> Found:
    """Two pairs, float32 weights, bfloat16 autocast."""
    module = steps.dpo_module(setting.model)
    autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    variants = _variants(_trl_dpo(setting, autocast), steps.dpo_step(module, autocast))
    batch = partial(_pairs, setting)
    steps.dpo_step(module)(batch(0))
    grads = _Gradients(setting.model, {"trl": "exact", "ours": "exact"})
    grads.kept["exact"] = grads.present()
    # What is kept must not be added to.
    setting.model.zero_grad()
    times = _measured(setting, variants, batch, setting.few()[0], grads)
    bound = min(AS_GOOD * grads.off["trl"], AT_MOST)
    title = "gradient, from float32's, relative L2; bound: TRL's x 1.25"
    return Found(_speed(times), [Check(title, grads.off["ours"], bound)], _seconds(times))


def _pairs(setting: Setting, number: int) -> Any:
    return setting.pairs(PAIRS, 100 + number)


def _trl_dpo(setting: Setting, *precision: Any) -> Step:
    model = steps.twin(setting.model)
    trainer = baselines.dpo_trainer(model, setting.tokenizer, PAIRS)
    return baselines.dpo_step(trainer, model, *precision)


def _variants(trl: Step, ours: Step, full: Step | None = None) -> dict[str, Variant]:
    """Both sides with what multiplies matrices as each ships, and with torch's own."""
    found = {
        "trl": Variant(trl, with_matmul("default")),
        "trl_response": Variant(trl, with_matmul("default", response_only)),
        "ours_default": Variant(ours, with_matmul("default")),
        "ours": Variant(ours, with_matmul("auto")),
    }
    return found if full is None else {**found, "full": Variant(full, with_matmul("default"))}


class _Gradients:
    """Compares losses and gradients of the first round, as they come.

    Args:
        model: whose parameters all variants share.
        against: which variant is compared with which earlier one; only those are kept, for a
            gradient takes as much memory as the model.
    """

    def __init__(self, model: Any, against: Mapping[str, str]) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.against = against
        self.losses: dict[str, float] = {}
        self.kept: dict[str, list[Tensor]] = {}
        self.off: dict[str, float] = {}

    def present(self) -> list[Tensor]:
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]

    def __call__(self, name: str, number: int, loss: Tensor) -> None:
        if number:
            return
        self.losses[name] = loss.item()
        if name in self.against:
            self.off[name] = _difference(self.present(), self.kept[self.against[name]])
        if name in self.against.values():
            self.kept[name] = self.present()


def _measured(
    setting: Setting,
    variants: Mapping[str, Variant],
    batch: Callable[[int], Any],
    warm_up: Any,
    after: Callable[[str, int, Any], None],
) -> Times:
    return measure(
        variants,
        batch,
        setting.rounds,
        before=setting.model.zero_grad,
        after=after,
        warm_up=warm_up,
    )


def _float32(
    setting: Setting,
    variants: Mapping[str, Variant],
    batch: Callable[[int], Any],
    warm_up: Any,
) -> Found:
    """Times, and that losses and gradients are those of TRL and of all logits."""
    grads = _Gradients(setting.model, EXACT)
    times = _measured(setting, variants, batch, warm_up, grads)
    checks = []
    for name, base in EXACT.items():
        loss = abs(grads.losses[name] / grads.losses[base] - 1)
        bound = AGAINST[base]
        checks += [
            Check(f"loss, {name} against {base}, relative", loss, bound),
            Check(f"gradient, {name} against {base}, relative L2", grads.off[name], bound),
        ]
    found = Found(_speed(times), checks, _seconds(times))
    found.details["full logits / ours"] = str(spread(times.ratios("full", "ours")))
    return found


def _difference(tensors: list[Tensor], others: list[Tensor]) -> float:
    """Of all parameters together, relative to the others', L2."""
    pairs = list(zip(tensors, others, strict=True))
    gap = sum((a.double() - b.double()).square().sum() for a, b in pairs)
    return float((gap / sum(b.double().square().sum() for _, b in pairs)).sqrt())


def _speed(times: Times) -> dict[str, Any]:
    return {
        "trl": spread(times.ratios("trl", "ours")),
        "response": spread(times.ratios("trl_response", "ours_default")),
    }


def _seconds(times: Times) -> dict[str, str]:
    """Medians, CPU and wall."""
    cpu = {name: f"{times.median(name):.2f}" for name in times.by_name}
    wall = {name: f"{spread(times.wall[name]).median:.2f}" for name in times.wall}
    return {
        "CPU seconds": ", ".join(f"{name} {seconds}" for name, seconds in cpu.items()),
        "wall seconds": ", ".join(f"{name} {seconds}" for name, seconds in wall.items()),
    }
