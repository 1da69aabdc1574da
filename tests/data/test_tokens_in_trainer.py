"""Steps cut by tokens inside real Trainers: the gradient of each is what it is without."""

import shutil

import lightning as L
import pytest
import torch
from distributed.conftest import fit_ranks, write_pairs  # noqa: F401 - a fixture
from distributed.fit import fit
from distributed.fit_grpo import fit as fit_grpo
from distributed.fit_grpo import save_random
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import DeepSpeedStrategy

from lit_align import (
    DPOModule,
    PreferenceDataModule,
    ReferenceCache,
    UnpairedDataModule,
    UnpairedModule,
)
from lit_align.errors import UserError

# Of the pairs below one has 16 to 48 tokens, prompt and both answers; 8 have about 200.
BUDGET = 90


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", 21)


@pytest.fixture
def train(pairs, tmp_path):
    """A run of steps of 8 pairs, or rows."""

    def train(**options):
        return fit(pairs, cache=tmp_path, **{"batch_size": 4, "accumulate": 2, **options})

    return train


def difference(ones, others):
    return max(float((a - b).norm() / a.norm()) for a, b in zip(ones, others, strict=True))


# Plain losses, one that scores the prompt, one that compares the pairs of a step, one of rows.
@pytest.mark.parametrize("loss", ["dpo", "simpo", "sft_whole", "aot", "kto"])
def test_the_gradients_of_all_steps_are_those_without_a_budget(train, loss):
    options = {"loss": loss, "optimizer": "sgd", "precision": "64-true"}
    plain, cut = train(**options), train(max_tokens=BUDGET, **options)
    assert len(cut["gradients"]) == len(plain["gradients"]) >= 3
    assert difference(plain["gradients"], cut["gradients"]) < 1e-10
    # A step took other micro-batches.
    assert len(cut["rows"]) > len(plain["rows"])


@pytest.mark.parametrize("loss", ["dpo", "aot", "kto"])
def test_the_gradient_of_a_step_in_float32(train, loss):
    options = {"loss": loss, "max_steps": 1}
    plain, cut = train(**options), train(max_tokens=BUDGET, **options)
    assert difference(plain["gradients"], cut["gradients"]) < 1e-6


def test_steps_hold_the_rows_that_they_hold_without_a_budget(train):
    plain, cut = train(max_epochs=2), train(max_epochs=2, max_tokens=BUDGET)

    def steps(rows, sizes):
        rows = iter(rows)
        return [sorted(row for _ in range(size) for row in next(rows)) for size in sizes]

    # 21 pairs: steps of 8, 8 and 5, which are 2, 2 and 2 micro-batches of 4.
    size = next(n for n in range(2, 9) if sum(map(len, cut["rows"][:n])) == 8)
    last = (len(cut["rows"]) - 4 * size) // 2
    assert 0 < last <= size
    assert steps(cut["rows"], [size, size, last] * 2) == steps(plain["rows"], [2] * 6)


def test_a_resumed_run_ends_with_the_same_weights_to_the_bit(train, tmp_path):
    folder, kept = tmp_path / "checkpoints", tmp_path / "kept"
    options = {"max_tokens": BUDGET, "max_epochs": 2, "dropout": 0.1}
    options |= {"checkpoint_dir": folder, "checkpoint_every": 1}
    whole = train(**options)
    folder.rename(kept)
    # In the middle of the first epoch, at its end, and in the middle of the second.
    for step in (2, 3, 4):
        again = train(ckpt_path=str(kept / f"step={step}.ckpt"), **options)
        shutil.rmtree(folder)
        for name, weight in whole["weights"].items():
            assert torch.equal(again["weights"][name], weight), (step, name)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_train_the_weights_of_one(pairs, train, fit_ranks, strategy):  # noqa: F811
    alone = train(max_steps=3)["weights"]
    options = {"batch_size": 4, "max_steps": 3, "max_tokens": 50, "strategy": strategy}
    for rank in fit_ranks(pairs, **options):
        for name, weight in alone.items():
            torch.testing.assert_close(rank["weights"][name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loss", [{}, {"loss_fn": "kl_cov", "cov_share": 0.2}], ids=str)
def test_completions_are_cut_by_tokens_with_the_gradients_of_whole_steps(tmp_path, loss):
    """Twelve completions of at most 9 tokens a step; with its prompt one has up to 24."""
    policy = save_random(tmp_path / "gpt2", "gpt2")
    options = {"loss": loss, "precision": "64-true", "optimizer": "sgd", "num_iterations": 2}
    plain = fit_grpo(policy, **options)["steps"]
    cut = fit_grpo(policy, max_tokens=80, **options)["steps"]
    assert difference(plain.gradients, cut.gradients) < 1e-10
    windows = [window for window in cut.batches if window]
    assert len({len(window) for window in windows}) == 1
    assert len(windows[0]) > 1
    batches = [batch for window in windows for batch in window]
    assert max(int(batch["attention_mask"].sum()) for batch in batches) <= 80 + 12


def test_a_resumed_run_of_completions_ends_with_the_same_weights_to_the_bit(tmp_path):
    policy = save_random(tmp_path / "llama")
    folder, kept = tmp_path / "checkpoints", tmp_path / "kept"
    options = {"max_tokens": 80, "num_iterations": 2, "max_steps": 4}
    options |= {"checkpoint_dir": str(folder), "checkpoint_every": 1}
    whole = fit_grpo(policy, **options)
    folder.rename(kept)
    again = fit_grpo(policy, ckpt_path=str(kept / "step=1.ckpt"), **options)
    for name, weight in whole["weights"].items():
        assert torch.equal(again["weights"][name], weight), name


class Watch(L.Callback):
    """What the Trainer was told, and the tokens of each micro-batch."""

    def __init__(self):
        self.tokens = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.accumulate = trainer.accumulate_grad_batches
        self.steps = trainer.estimated_stepping_batches
        self.plan = trainer.datamodule.describe_plan(trainer)
        real = batch["pair_mask"]
        masks = [values[real] for name, values in batch.items() if name.endswith("attention_mask")]
        width = max(mask.shape[1] for mask in masks)
        self.tokens.append(sum(len(mask) for mask in masks) * width)


def short_run(data, module=None, **options):
    watch = Watch()
    module = module or DPOModule("tiny", "simpo", layout="padded")
    options = {"max_epochs": 1, "callbacks": [watch, *options.pop("callbacks", [])], **options}
    trainer = L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        **options,
    )
    trainer.fit(module, data)
    return watch, trainer


def test_the_trainer_is_told_how_many_micro_batches_a_step_has(pairs, tmp_path):
    data = PreferenceDataModule(pairs, batch_size=4, max_tokens_per_batch=200, cache_dir=tmp_path)
    watch, trainer = short_run(data, accumulate_grad_batches=2)
    assert watch.accumulate > 2
    assert watch.steps == 3
    assert max(watch.tokens) <= 200
    assert f"each of 8: {watch.accumulate} micro-batches x 1 ranks of at most 200" in watch.plan
    # As it was, for whatever data come next.
    assert trainer.accumulate_grad_batches == 2
    again = PreferenceDataModule(pairs, batch_size=4, cache_dir=tmp_path)
    assert short_run(again)[0].plan.count("each of 4: 4 per micro-batch") == 1


def test_a_model_that_shares_prompts_takes_fewer_micro_batches(pairs, tmp_path):
    def needed(layout):
        data = PreferenceDataModule(
            pairs, batch_size=8, max_tokens_per_batch=150, cache_dir=tmp_path
        )
        return short_run(data, DPOModule("tiny", "simpo", layout=layout))[0].accumulate

    assert needed("packed") < needed("padded")


def test_labelled_rows_are_cut_like_pairs(pairs, tmp_path):
    data = UnpairedDataModule(pairs, batch_size=8, max_tokens_per_batch=100, cache_dir=tmp_path)
    module = UnpairedModule("tiny", "bco", layout="padded")
    watch, _ = short_run(data, module, callbacks=[ReferenceCache(tmp_path / "reference")])
    assert watch.accumulate > 1
    assert max(watch.tokens) <= 100


def test_a_pair_of_too_many_tokens_has_a_micro_batch_of_its_own(pairs, tmp_path):
    data = PreferenceDataModule(pairs, batch_size=3, max_tokens_per_batch=70, cache_dir=tmp_path)
    with pytest.warns(match=r"pairs run more than the 70 tokens of data.max_tokens_per_batch, .*"):
        watch, _ = short_run(data)
    assert watch.accumulate == 3
    assert max(watch.tokens) > 70


def test_who_else_decides_on_accumulation_is_refused(pairs, tmp_path, monkeypatch):
    data = PreferenceDataModule(pairs, max_tokens_per_batch=90, cache_dir=tmp_path)
    with pytest.raises(UserError, match=r"data.max_tokens_per_batch says here: leave it out"):
        short_run(data, callbacks=[GradientAccumulationScheduler({0: 2})])
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    strategy = DeepSpeedStrategy.__new__(DeepSpeedStrategy)
    monkeypatch.setattr(trainer._accelerator_connector, "strategy", strategy)
    data.trainer = trainer
    with pytest.raises(UserError, match=r"DeepSpeed .*: choose strategy=ddp"):
        data.setup("fit")


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8"])
def test_a_budget_is_a_whole_number(pairs, value):
    with pytest.raises(UserError, match=r"data.max_tokens_per_batch must be a whole number"):
        PreferenceDataModule(pairs, max_tokens_per_batch=value)
