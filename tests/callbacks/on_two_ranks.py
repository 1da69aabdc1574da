"""Runs of two processes, for test_two_ranks.py; Lightning starts this file again for rank 1.

usage: on_two_ranks.py OUT OPTIONS    OPTIONS is JSON: strategy, policy, data, val, folder, ...
Writes OUT.RANK, what this rank ended with: its view of the reference, or the error.
"""

import json
import os
import sys
import warnings
from functools import partial
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_align.callbacks import ExactMatch, ReferenceCache, SavePolicy, reference_build
from lit_align.data import PreferenceDataModule
from lit_align.errors import UserError
from lit_align.modules import DPOModule
from lit_align.modules.sharding import FullyShardedStrategy

SCORED = []
score = reference_build.response_logprobs


def counting(model, input_ids, *rest, **options):
    SCORED.append(len(input_ids))
    return score(model, input_ids, *rest, **options)


reference_build.response_logprobs = counting


def fit(
    *,
    strategy,
    policy,
    data,
    val,
    folder,
    cache_batch_size,
    lora=None,
    reference=None,
    checkpoints=None,
    ckpt_path=None,
):
    """One run of two steps with all callbacks that all ranks take part in."""
    L.seed_everything(1, verbose=False)
    del SCORED[:]
    module = DPOModule(
        {"pretrained": policy, "lora": lora},
        optimizer=partial(torch.optim.SGD, lr=1.0, momentum=0.9),
        reference=reference,
    )
    saver = SavePolicy(Path(folder) / "run", best="val/loss", mode="min")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=FullyShardedStrategy() if strategy == "fsdp" else strategy,
        max_steps=2,
        logger=False,
        enable_checkpointing=bool(checkpoints),
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=-1,
        callbacks=[
            ReferenceCache(Path(folder) / "reference", batch_size=cache_batch_size),
            ExactMatch(batch_size=1),
            saver,
            *(
                [ModelCheckpoint(checkpoints, "{step}", every_n_train_steps=1, save_top_k=-1)]
                if checkpoints
                else []
            ),
        ],
        default_root_dir=folder,
    )
    datamodule = PreferenceDataModule(
        data, val_path=val, batch_size=2, cache_dir=Path(folder) / "pairs"
    )
    trainer.fit(module, datamodule, ckpt_path=ckpt_path)
    weights = {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in module.policy.named_parameters()
    }
    return {
        "reference": module.reference_cache.tensors,
        "scored": list(SCORED),
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "weights": weights,
        "best_score": saver.best_score,
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    out, options = sys.argv[1:]
    try:
        result = fit(**json.loads(options))
    except UserError as error:
        result = {"error": str(error)}
    torch.save(result, f"{out}.{os.environ.get('LOCAL_RANK', '0')}")
