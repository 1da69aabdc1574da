"""Both sides' own loops over the same pairs: what is not a step alone."""

import time
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import steps
import torch
from baselines import BETA, REFERENCE, dpo_trainer, response_only
from datasets import Dataset
from given_pairs import GivenPairs, columns
from lightning.pytorch.loggers import CSVLogger
from paired import Times, Took, Variant, measure, spread
from setting import Check, Found, Setting, with_matmul
from text import Pair
from torch import Tensor
from torch.optim import AdamW
from transformers import PrinterCallback, TrainerCallback

from lit_align import DPOModule
from lit_align.losses import DPOConfig, TensorCache

# Of the optimizer, on both sides; the gradient is clipped as TRL does it unless told otherwise.
LEARNING_RATE = 1e-6
ADAMW = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "fused": True}
CLIP = 1.0
PAIRS = 2  # of a step
LAST_LOSS = 1e-4
CHANGE = 0.05  # AdamW makes steps of full size of gradients that are little more than rounding


class Clock(L.Callback):
    """CPU and wall seconds of training, once everything is set up."""

    cpu: float
    wall: float

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._start = time.process_time(), time.perf_counter()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        cpu, wall = self._start
        self.cpu, self.wall = time.process_time() - cpu, time.perf_counter() - wall


def loop(setting: Setting) -> Found:
    """Twenty optimizer steps of `Trainer.fit` and of TRL's `train()`; what both set up is left out.

    A loop is long and holds many steps: it is run once for every three rounds of the other rows.
    """
    start = [p.detach().clone() for p in setting.model.parameters()]
    ends: dict[str, list[Tensor]] = {}
    losses: dict[str, float] = {}

    @torch.no_grad()
    def again() -> None:
        setting.model.zero_grad()
        for parameter, value in zip(setting.model.parameters(), start, strict=True):
            parameter.copy_(value)

    def keep(name: str, number: int, loss: float) -> None:
        if number == 0:
            losses[name] = loss
        if number == 0 and name in {"trl", "ours"}:
            ends[name] = [p.detach().clone() for p in setting.model.parameters()]

    ours, theirs = partial(_fit, setting), partial(_train, setting)
    variants = {
        "trl": Variant(theirs, with_matmul("default")),
        "trl_response": Variant(theirs, with_matmul("default", response_only)),
        "ours_default": Variant(ours, with_matmul("default")),
        "ours": Variant(ours, with_matmul("auto")),
    }
    batch = partial(_pairs, setting)
    times = measure(variants, batch, max(1, setting.rounds // 3), before=again, after=keep)
    again()
    return Found(
        {
            "trl": spread(times.ratios("trl", "ours")),
            "response": spread(times.ratios("trl_response", "ours_default")),
        },
        [
            Check("loss of the last steps, relative", _off(losses, "ours"), LAST_LOSS),
            Check("the same, torch's BLAS", _off(losses, "ours_default"), LAST_LOSS),
            Check("what training changed, relative L2", _moved(start, ends), CHANGE),
        ],
        {
            "CPU seconds": _seconds(times),
            "loss of the last steps": ", ".join(f"{n} {loss:.6g}" for n, loss in losses.items()),
        },
    )


def _pairs(setting: Setting, number: int) -> list[Pair]:
    return setting.pairs(PAIRS * setting.sizes.loop_steps, 700 + number)


def _seconds(times: Times) -> str:
    return ", ".join(f"{name} {times.median(name):.1f}" for name in times.by_name)


def _off(losses: Mapping[str, float], name: str) -> float:
    return abs(losses[name] / losses["trl"] - 1)


def _moved(start: Sequence[Tensor], ends: Mapping[str, Sequence[Tensor]]) -> float:
    """How far ours and TRL's weights are apart, as a share of how far training took them."""
    triples = zip(start, ends["ours"], ends["trl"], strict=True)
    gap = whole = 0.0
    for before, ours, theirs in triples:
        gap += float((ours - theirs).double().square().sum())
        whole += float((theirs - before).double().square().sum())
    return (gap / whole) ** 0.5


def _fit(setting: Setting, pairs: Sequence[Pair]) -> Took:
    """Ours; the reference's numbers are there already, as they are on TRL's side."""
    module = DPOModule(
        steps.policy(setting.model),
        DPOConfig("dpo", beta=BETA),
        tokenizer=setting.tokenizer,
        optimizer=partial(AdamW, lr=LEARNING_RATE, **ADAMW),
    )
    chosen, rejected = (torch.full((len(pairs),), value) for value in REFERENCE)
    module.reference_cache = TensorCache({"chosen_logps": chosen, "rejected_logps": rejected})
    clock = Clock()
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = steps.quiet_trainer(
            callbacks=[clock],
            logger=CSVLogger(folder),
            max_steps=setting.sizes.loop_steps,
            log_every_n_steps=_logging_steps(setting),
            gradient_clip_val=CLIP,
        )
        trainer.fit(module, datamodule=GivenPairs(pairs, PAIRS))
    return Took(clock.cpu, clock.wall, trainer.callback_metrics["train/loss"].item())


class _TRLClock(TrainerCallback):
    """The same of a trainer of transformers."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._start = time.process_time(), time.perf_counter()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        cpu, wall = self._start
        self.cpu, self.wall = time.process_time() - cpu, time.perf_counter() - wall


def _train(setting: Setting, pairs: Sequence[Pair]) -> Took:
    """TRL's."""
    model = steps.twin(setting.model)
    trainer = dpo_trainer(
        model,
        setting.tokenizer,
        PAIRS,
        max_steps=setting.sizes.loop_steps,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        weight_decay=ADAMW["weight_decay"],
        max_grad_norm=CLIP,
        train_sampling_strategy="sequential",
        logging_steps=_logging_steps(setting),
        save_strategy="no",
    )
    references = {f"ref_{side}_logps" for side in ("chosen", "rejected")}
    known = dict(zip(sorted(references), ([v] * len(pairs) for v in REFERENCE), strict=True))
    trainer.train_dataset = Dataset.from_dict({**columns(pairs), **known})
    clock = _TRLClock()
    trainer.add_callback(clock)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return Took(clock.cpu, clock.wall, losses[-1])


def _logging_steps(setting: Setting) -> int:
    return min(10, setting.sizes.loop_steps)
