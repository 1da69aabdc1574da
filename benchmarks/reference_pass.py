"""The row of the reference pass: what the reference says of all pairs, before training."""

import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import lightning as L
import steps
import torch
from baselines import BETA, dpo_trainer, response_only
from datasets import Dataset
from given_pairs import GivenPairs, columns
from paired import Took, Variant, measure, spread
from setting import Check, Found, Setting, with_matmul
from text import Pair
from torch import Tensor

from lit_align import DPOModule, ReferenceCache
from lit_align.losses import DPOConfig

TRL_PAIRS = 4  # of a batch; fewer than TRL's own eight, which would pad more
SUMS = 1e-5  # relative, of the log-probs of a response


def reference(setting: Setting) -> Found:
    """Pairs scored, in the batches that each side makes of them; writing the numbers included."""
    pairs = setting.sizes.reference_pairs
    ours, theirs = partial(_ours, setting), _trl(setting)
    found: dict[str, Tensor] = {}

    def keep(name: str, number: int, sums: Tensor) -> None:
        if number == 0:
            found[name] = sums

    variants = {
        "trl": Variant(theirs, with_matmul("default")),
        "trl_response": Variant(theirs, with_matmul("default", response_only)),
        "ours_default": Variant(ours, with_matmul("default")),
        "ours": Variant(ours, with_matmul("auto")),
    }
    warm_up = setting.few()[0]
    times = measure(
        variants,
        lambda number: setting.pairs(pairs, 500 + number),
        setting.rounds,
        after=keep,
        warm_up=warm_up,
    )
    numbers = {
        "trl": spread(times.ratios("trl", "ours")),
        "response": spread(times.ratios("trl_response", "ours_default")),
    }
    checks = [
        Check(f"sums, {name} against trl, relative", _off(found[name], found["trl"]), SUMS)
        for name in ("ours", "ours_default")
    ]
    rates = (f"{name} {pairs / times.median(name):.3f}" for name in times.by_name)
    return Found(numbers, checks, {"pairs per CPU second": ", ".join(rates)})


def _off(sums: Tensor, others: Tensor) -> float:
    return float(((sums - others) / others).abs().max())


class _DoneError(Exception):
    """Ends a fit whose training is not of interest."""


class _Lap(L.Callback):
    """Notes when it is its turn; behind what is timed it ends the fit."""

    def __init__(self, *, is_last: bool) -> None:
        self.is_last = is_last

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.cpu, self.wall = time.process_time(), time.perf_counter()
        if self.is_last:
            raise _DoneError


def _ours(setting: Setting, pairs: Sequence[Pair]) -> Took:
    """`ReferenceCache` in a folder of its own, as the first fit of a module begins with it."""
    policy, loss = steps.policy(setting.model), DPOConfig("dpo", beta=BETA)
    module = DPOModule(policy, loss, tokenizer=setting.tokenizer)
    first, last = _Lap(is_last=False), _Lap(is_last=True)
    with TemporaryDirectory() as folder, suppress(_DoneError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        callbacks = [first, ReferenceCache(folder), last]
        trainer = steps.quiet_trainer(callbacks=callbacks, max_steps=len(pairs))
        trainer.fit(module, datamodule=GivenPairs(pairs, batch_size=1))
    assert module.reference_cache is not None
    rows = {"index": torch.arange(len(pairs))}
    sums = module.reference_rows(rows)
    both = torch.cat([sums["reference_chosen_logps"], sums["reference_rejected_logps"]])
    return Took(last.cpu - first.cpu, last.wall - first.wall, both)


def _trl(setting: Setting) -> Callable[[Sequence[Pair]], Took]:
    """What a DPOTrainer does when it is made."""
    model = steps.twin(setting.model)
    trainer = dpo_trainer(model, setting.tokenizer, TRL_PAIRS)

    def step(pairs: Sequence[Pair]) -> Took:
        model.eval()
        dataset: Any = Dataset.from_dict(columns(pairs))
        # Whatever it has written before is of another model.
        trainer._precompute_model_hash = uuid4().hex
        cpu, wall = time.process_time(), time.perf_counter()
        scored = trainer._precompute_ref_logps(dataset, "train", TRL_PAIRS)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        sums = torch.tensor([*scored["ref_chosen_logps"], *scored["ref_rejected_logps"]])
        return Took(cpu, wall, sums)

    return step
