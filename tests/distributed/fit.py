"""One training run on the CPU, from options to final weights; also as a script for several ranks.

    python tests/distributed/fit.py OUT.pt '{"devices": 2, "strategy": "ddp"}'

Ranks are started by running this file again, as Lightning does with any user's script.
"""

import json
import os
import sys
import warnings
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from lit_align import (
    DPOModule,
    PreferenceDataModule,
    ReferenceCache,
    ReferenceRefresh,
    UnpairedDataModule,
    UnpairedModule,
)
from lit_align.losses import UNPAIRED_LOSSES
from lit_align.modules.schedules import linear
from lit_align.modules.sharding import FullyShardedStrategy

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
}


class Gradients(L.Callback):
    """Keeps the gradient of each optimizer step as one vector."""

    def __init__(self):
        self.steps = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        grads = [p.grad for p in pl_module.policy.parameters() if p.grad is not None]
        self.steps.append(torch.cat([g.detach().flatten().clone() for g in grads]))


class RowsSeen(L.Callback):
    """Keeps the row numbers of each micro-batch."""

    def __init__(self):
        self.batches = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batches.append(batch["index"][batch["pair_mask"]].tolist())


def fit(  # noqa: PLR0913, one for each thing that a test varies
    data,
    *,
    cache,
    policy="tiny",
    loss="dpo",
    devices=1,
    strategy="auto",
    batch_size=8,
    accumulate=1,
    max_steps=-1,
    max_epochs=1,
    num_workers=0,
    optimizer="adamw",
    precision="32-true",
    clip=None,
    dropout=0.0,
    checkpoint_dir=None,
    checkpoint_every=None,
    ckpt_path=None,
    log_dir=None,
    limit_train_batches=None,
    log_every=1,
    refresh=None,
    max_tokens=None,
    layout="auto",
):
    """Train and return final weights, gradients per step and the rows that were read."""
    L.seed_everything(7, verbose=False)
    kinds = (DPOModule, PreferenceDataModule)
    if loss in UNPAIRED_LOSSES:
        kinds = (UnpairedModule, UnpairedDataModule)
    module = kinds[0](
        policy,
        loss,
        optimizer=OPTIMIZERS[optimizer],
        scheduler=partial(linear, warmup=0.1),
        layout=layout,
    )
    module.configure_model()
    for layer in module.policy.modules():
        if isinstance(layer, nn.Dropout) or hasattr(layer, "attention_dropout"):
            layer.p = layer.attention_dropout = dropout
    datamodule = kinds[1](
        data,
        batch_size=batch_size,
        max_tokens_per_batch=max_tokens,
        num_workers=num_workers,
        cache_dir=cache,
        seed=3,
    )
    gradients, rows = Gradients(), RowsSeen()
    callbacks = [gradients, rows, ReferenceCache(folder=Path(cache) / "reference")]
    if refresh:
        callbacks.append(ReferenceRefresh(**refresh))
    if checkpoint_dir:
        callbacks.append(
            ModelCheckpoint(
                checkpoint_dir, "{step}", every_n_train_steps=checkpoint_every, save_top_k=-1
            )
        )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=FullyShardedStrategy() if strategy == "fsdp" else strategy,
        precision=precision,
        max_steps=max_steps,
        max_epochs=max_epochs,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=clip,
        limit_train_batches=limit_train_batches,
        limit_val_batches=0,
        logger=CSVLogger(log_dir, "", "") if log_dir else False,
        log_every_n_steps=log_every,
        callbacks=callbacks,
        enable_checkpointing=bool(checkpoint_dir),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    weights = Weights()
    trainer.callbacks.append(weights)
    trainer.fit(module, datamodule, ckpt_path=ckpt_path)
    return {
        "weights": weights.final,
        "gradients": gradients.steps,
        "rows": rows.batches,
        "metrics": logged(trainer),
    }


def logged(trainer):
    """What was logged last."""
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


class Weights(L.Callback):
    """Keeps the final weights, whole also when they are sharded."""

    def on_train_end(self, trainer, pl_module):
        self.final = {
            name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
            for name, p in pl_module.policy.named_parameters()
        }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    out, options = sys.argv[1:]
    result = fit(**json.loads(options))
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    torch.save({**result, "gradients": []}, f"{out}.{rank}")
