"""Runs that are sent signals, in processes of their own; Lightning starts this file for rank 1 too.

usage: stopped_ranks.py OUT OPTIONS    OPTIONS is JSON: kind, folder, devices, signals, ...
Writes OUT.RANK, what this rank ended with, and ends as Lightning makes it end.
"""

import json
import os
import signal
import sys
import warnings
from functools import partial
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_align import (
    DPOModule,
    GRPOModule,
    PreferenceDataModule,
    ReferenceCache,
    RolloutDataModule,
    RolloutLog,
    StopOnSignal,
)
from lit_align.data import Arithmetic
from lit_align.modules.sharding import FullyShardedStrategy
from lit_align.resources import resource
from lit_align.rewards import exact_match, in_process

STRATEGIES = {
    "fsdp": FullyShardedStrategy(),
    "shards": FullyShardedStrategy(save_distributed_checkpoint=True),
}
RANK = int(os.environ.get("LOCAL_RANK", "0"))


class Sends(L.Callback):
    """Sends this rank, or all of its process group, a signal when a micro-batch starts."""

    def __init__(self, batch, name, to_group):
        self.batch = batch
        self.number = signal.Signals[name]
        self.send = partial(os.killpg, os.getpgid(0)) if to_group else partial(os.kill, os.getpid())

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.fit_loop.epoch_loop.total_batch_idx == self.batch:
            self.send(self.number)


class Batches(L.Callback):
    """Keeps the numbers of the micro-batches, counted over the run."""

    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.seen.append(trainer.fit_loop.epoch_loop.total_batch_idx)


def parts(kind, folder, devices, num_workers):
    """Module and data, three micro-batches a step; an epoch of pairs on two ranks has nine."""
    optimizer = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
    if kind == "rollouts":
        sampling = {"max_new_tokens": 6}
        reward = {"right": in_process(exact_match)}
        module = GRPOModule(
            "tiny", reward=reward, sampling=sampling, optimizer=optimizer, max_refills=0
        )
        # Groups of 5 are split between the ranks; 3 prompts make 15 completions.
        sizes = {"prompts_per_step": 3, "num_generations": 5, "num_iterations": 2}
        data = RolloutDataModule(Arithmetic(), max_rows=30, batch_size=6 // devices, **sizes)
        return module, data, {}
    data = PreferenceDataModule(
        resource("arithmetic/train.jsonl"),
        max_rows=34,
        batch_size=2,
        num_workers=num_workers,
        cache_dir=Path(folder) / "pairs",
    )
    return DPOModule("tiny", optimizer=optimizer), data, {"accumulate_grad_batches": 3}


def fit(*, kind, folder, strategy="auto", devices=1, signals=(), ckpt_path=None, num_workers=0):
    """A run of five steps; `signals` are [rank, micro-batch, name, whether to the whole group]."""
    L.seed_everything(1, verbose=False)
    module, data, options = parts(kind, folder, devices, num_workers)
    batches = Batches()
    callbacks = [Sends(*how) for rank, *how in signals if rank == RANK]
    if kind == "pairs":
        callbacks.append(ReferenceCache(Path(folder) / "reference"))
    else:
        callbacks.append(RolloutLog(Path(folder) / f"log{RANK}", every_n_rollouts=1, rows=1))
    if strategy == "shards":
        how = {"every_n_train_steps": 2, "save_top_k": -1, "save_last": "link"}
        callbacks.append(ModelCheckpoint(Path(folder) / "checkpoints", "{step}", **how))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=STRATEGIES.get(strategy, strategy),
        max_steps=5,
        max_epochs=-1,
        limit_val_batches=0,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=strategy == "shards",
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[*callbacks, batches, StopOnSignal()],
        **options,
    )
    code = 0
    try:
        trainer.fit(module, data, ckpt_path=ckpt_path)
    except SystemExit as end:
        code = end.code
    weights = {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in module.policy.named_parameters()
    }
    return code, {"batches": batches.seen, "weights": weights, "step": trainer.global_step}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    out, options = sys.argv[1:]
    code, result = fit(**json.loads(options))
    torch.save(result, f"{out}.{RANK}")
    sys.exit(code)
