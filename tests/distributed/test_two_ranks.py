"""Two gloo processes give what one process gives."""

import pytest
import torch
from distributed.fit import fit
from distributed.fit_grpo import save_random

from lit_align.policies import PolicyRecipe

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def relative_difference(weights, others):
    assert weights.keys() == others.keys()
    flat, other = (torch.cat([w.flatten() for w in each.values()]) for each in (weights, others))
    return float((flat - other).norm() / flat.norm())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("loss", ["dpo", "simpo"])
def test_two_ranks_train_the_weights_of_one(pairs33, fit_ranks, tmp_path, strategy, loss):
    """Five optimizer steps; the last window has one row, so one rank runs on a filler."""
    alone = fit(pairs33, cache=tmp_path / "alone", batch_size=8, max_steps=5, loss=loss)
    ranks = fit_ranks(pairs33, strategy=strategy, batch_size=4, max_steps=5, loss=loss)
    start = {name: p.detach() for name, p in PolicyRecipe().model().named_parameters()}
    assert relative_difference(alone["weights"], start) > 1e-4
    for rank in ranks:
        assert relative_difference(alone["weights"], rank["weights"]) < 5e-6


LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"]}
MOVING = [("ddp", None), ("fsdp", None), ("fsdp", LORA)]


@pytest.mark.parametrize(("strategy", "lora"), MOVING, ids=["ddp", "fsdp", "fsdp with lora"])
def test_the_reference_moves_on_two_ranks_as_on_one(pairs33, fit_ranks, tmp_path, strategy, lora):
    saved = str(tmp_path / "checkpoints")
    options = {
        "policy": {"lora": lora},
        "loss": "dpo_norm",
        "max_steps": 5,
        "refresh": {"alpha": 0.6, "every_n_steps": 2},
    }
    alone = fit(pairs33, cache=tmp_path / "alone", batch_size=8, **options)
    fixed = fit(pairs33, cache=tmp_path / "alone", batch_size=8, **{**options, "refresh": None})
    cut = {"strategy": strategy, "batch_size": 2, "accumulate": 2, **options}
    ranks = fit_ranks(pairs33, checkpoint_dir=saved, checkpoint_every=1, **cut)
    # Between two moves: the checkpoint holds a reference that is no policy of any step.
    resumed = fit_ranks(pairs33, ckpt_path=f"{saved}/step=3.ckpt", **cut)
    assert relative_difference(alone["weights"], fixed["weights"]) > 5e-5
    for rank, again in zip(ranks, resumed, strict=True):
        assert relative_difference(alone["weights"], rank["weights"]) < 5e-6
        for name, weight in rank["weights"].items():
            assert torch.equal(weight, again["weights"][name]), name


@pytest.mark.parametrize("loss", ["aot", "aot_unpaired", "beta_dpo", "bco_pair"])
def test_ranks_and_micro_batches_know_of_each_other(pairs33, fit_ranks, tmp_path, loss):
    """In float64: a step of 8 pairs in two micro-batches on two ranks, the last one of one pair."""
    options = {"policy": save_random(tmp_path / "gpt2", "gpt2"), "loss": loss}
    options |= {"precision": "64-true", "optimizer": "sgd", "max_epochs": 2}
    alone = fit(pairs33, cache=tmp_path / "alone", batch_size=8, **options)
    ranks = fit_ranks(pairs33, strategy="ddp", batch_size=2, accumulate=2, **options)
    for rank in ranks:
        assert relative_difference(alone["weights"], rank["weights"]) < 1e-10


@pytest.mark.parametrize("loss", ["aot_unpaired", "beta_dpo"])
def test_ranks_that_hold_pieces_know_of_each_other(pairs33, fit_ranks, tmp_path, loss):
    options = {"loss": loss, "optimizer": "sgd", "max_steps": 4}
    alone = fit(pairs33, cache=tmp_path / "alone", batch_size=8, **options)
    for rank in fit_ranks(pairs33, strategy="fsdp", batch_size=2, accumulate=2, **options):
        assert relative_difference(alone["weights"], rank["weights"]) < 5e-6


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_resume_of_what_is_remembered_is_bit_identical(pairs33, fit_ranks, tmp_path, strategy):
    options = {"strategy": strategy, "batch_size": 2, "accumulate": 2, "loss": "beta_dpo"}
    saved = str(tmp_path / "checkpoints")
    whole = fit_ranks(pairs33, checkpoint_dir=saved, checkpoint_every=3, **options)
    resumed = fit_ranks(pairs33, ckpt_path=f"{saved}/step=3.ckpt", **options)
    for before, after in zip(whole, resumed, strict=True):
        for name, weight in before["weights"].items():
            assert torch.equal(weight, after["weights"][name]), name


def test_ranks_read_every_row_once(pairs33, fit_ranks):
    ranks = fit_ranks(pairs33, strategy="ddp", batch_size=4, max_epochs=1)
    rows = [row for rank in ranks for batch in rank["rows"] for row in batch]
    assert sorted(rows) == list(range(33))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_resume_under_two_ranks_is_bit_identical(pairs33, fit_ranks, tmp_path, strategy):
    options = {"strategy": strategy, "batch_size": 2, "accumulate": 2, "max_epochs": 2}
    saved = str(tmp_path / "checkpoints")
    whole = fit_ranks(pairs33, checkpoint_dir=saved, checkpoint_every=3, **options)
    resumed = fit_ranks(pairs33, ckpt_path=f"{saved}/step=3.ckpt", **options)
    for before, after in zip(whole, resumed, strict=True):
        assert before["rows"][6:] == after["rows"]
        for name, weight in before["weights"].items():
            assert torch.equal(weight, after["weights"][name]), name


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("loss", ["kto", "bco"])
def test_two_ranks_learn_from_labels_what_one_does(pairs33, fit_ranks, tmp_path, strategy, loss):
    """66 rows in windows of 16, of which an epoch ends with one of two rows."""
    options = {"max_steps": 9, "max_epochs": 2, "loss": loss}
    alone = fit(pairs33, cache=tmp_path / "alone", batch_size=16, **options)
    ranks = fit_ranks(pairs33, strategy=strategy, batch_size=4, accumulate=2, **options)
    for rank in ranks:
        assert relative_difference(alone["weights"], rank["weights"]) < 5e-6
