"""One GRPO run, small and fully described by its options; also as a program, for several ranks.

The policy has random weights and many stop tokens, so that completions differ in length; the reward
is a function of their ids, so that groups differ in reward.
"""

import json
import os
import sys
import warnings
from functools import partial

import lightning as L
import torch
from distributed.fit import Weights, logged
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from lit_align.data import RolloutDataModule
from lit_align.data.tasks import Arithmetic, HeldOutArithmetic
from lit_align.losses import GRPOConfig
from lit_align.modules import GRPOModule
from lit_align.modules.sharding import FullyShardedStrategy
from lit_align.policies import PolicyRecipe
from lit_align.rewards import RewardSuite, in_process
from lit_align.rollout import HuggingFaceEngine

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.05),
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
}
STOPS = list(range(40, 90))


def digits(completion_ids, **_):
    """Anything that differs between completions and depends on nothing else."""
    return [(sum(ids) % 7) / 7 for ids in completion_ids]


class OtherEngine(HuggingFaceEngine):
    """Says of its tokens what another engine would: a little else than the trainer."""

    in_process = False

    def __init__(self, off):
        super().__init__()
        self.off = off

    def generate(self, requests, sampling):
        return [
            [
                c._replace(logprobs=[p - self.off * (n % 5) for n, p in enumerate(c.logprobs)])
                for c in completions
            ]
            for completions in super().generate(requests, sampling)
        ]


def save_random(folder, kind="llama", seed=0):
    """A folder like one from the hub, with random weights."""
    tokenizer = PolicyRecipe().tokenizer()
    torch.manual_seed(seed)
    if kind == "gpt2":  # nothing in it falls back to float32
        size = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **size))
    else:
        size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
        config = LlamaConfig(vocab_size=len(tokenizer), initializer_range=0.1, **size, **heads)
        model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = STOPS
    model.generation_config.pad_token_id = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


class Steps(L.Callback):
    """Keeps what each optimizer step was made of: its batches, its gradient, the weights before."""

    def __init__(self):
        self.batches, self.gradients, self.before = [[]], [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        tensors = {name: value for name, value in batch.items() if name != "window"}
        self.batches[-1].append({name: tensor.clone() for name, tensor in tensors.items()})

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        parameters = list(pl_module.policy.parameters())
        grads = [p.grad for p in parameters if p.grad is not None]
        self.gradients.append(torch.cat([g.detach().flatten().clone() for g in grads]))
        self.before.append([p.detach().clone() for p in parameters])
        self.batches.append([])

    def ids(self):
        """Token ids of the rows of each micro-batch."""
        return [batch["input_ids"].tolist() for window in self.batches for batch in window]


def fit(  # noqa: PLR0913, one for each thing that a test varies
    policy,
    *,
    loss=None,
    devices=1,
    strategy="auto",
    prompts=13,
    prompts_per_step=4,
    num_generations=3,
    batch_size=12,
    accumulate=1,
    steps_per_rollout=1,
    num_iterations=1,
    max_steps=-1,
    max_epochs=1,
    filter_groups=False,
    optimizer="adamw",
    precision="32-true",
    clip=None,
    dropout=0.0,
    validate_every=None,
    checkpoint_dir=None,
    checkpoint_every=None,
    ckpt_path=None,
    kill_after=None,
    off=0.0,
    keepers=(),
    watchers=(),
    log_every=1,
    log_dir=None,
    layout="auto",
    max_tokens=None,
):
    """Train and return final weights, and what each step was."""
    L.seed_everything(7, verbose=False)
    module = GRPOModule(
        policy,
        GRPOConfig(**(loss or {})),
        reward=RewardSuite({"digits": in_process(digits)}),
        engine=OtherEngine(off) if off else None,
        sampling={"max_new_tokens": 9},
        val_sampling={"max_new_tokens": 9},
        filter_groups=filter_groups,
        optimizer=OPTIMIZERS[optimizer],
        layout=layout,
    )
    data = RolloutDataModule(
        Arithmetic(),
        val_path=HeldOutArithmetic(),
        max_rows=prompts,
        val_max_rows=5,
        prompts_per_step=prompts_per_step,
        num_generations=num_generations,
        batch_size=batch_size,
        max_tokens_per_batch=max_tokens,
        steps_per_rollout=steps_per_rollout,
        num_iterations=num_iterations,
        seed=3,
    )
    steps, weights = Steps(), Weights()
    callbacks = [steps, weights, *keepers, *watchers]
    if checkpoint_dir:
        callbacks.append(
            ModelCheckpoint(
                checkpoint_dir, "{step}", every_n_train_steps=checkpoint_every, save_top_k=-1
            )
        )
    if kill_after:
        callbacks.append(KillAfter(kill_after))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=FullyShardedStrategy() if strategy == "fsdp" else strategy,
        precision=precision,
        max_steps=max_steps,
        max_epochs=max_epochs,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=clip,
        limit_val_batches=1.0 if validate_every else 0,
        val_check_interval=validate_every,
        check_val_every_n_epoch=None if validate_every else 1,
        num_sanity_val_steps=0,
        logger=CSVLogger(log_dir, "", "") if log_dir else False,
        log_every_n_steps=log_every,
        callbacks=callbacks,
        enable_checkpointing=bool(checkpoint_dir or keepers),
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return {
        "weights": weights.final,
        "steps": steps,
        "rows": steps.ids(),
        "metrics": logged(trainer),
    }


class KillAfter(L.Callback):
    """Ends the process as a power cut would, once so many micro-batches have been trained on."""

    def __init__(self, batches):
        self.batches = batches

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.fit_loop.epoch_loop.total_batch_idx + 1 == self.batches:
            os.kill(os.getpid(), 9)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    out, options = sys.argv[1:]
    result = fit(**json.loads(options))
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    kept = {name: result[name] for name in ("weights", "rows", "metrics")}
    torch.save(kept, f"{out}.{rank}")
