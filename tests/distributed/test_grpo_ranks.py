"""Two gloo processes give what one process gives, with groups that are split between them."""

import pytest
import torch
from distributed.fit_grpo import fit, save_random
from distributed.test_two_ranks import relative_difference

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

LOSSES = {
    "dapo": {},
    "cispo": {"loss_fn": "cispo"},
    "gspo": {
        "ratio_level": "sequence",
        "aggregation": "sequence_mean",
        "clip_lower": 3e-4,
        "clip_higher": 4e-4,
    },
}
# 3 prompts x 3 completions: 9 rows for two ranks, one group of which has members on both.
SIZES = {"prompts": 13, "prompts_per_step": 3, "batch_size": 2, "num_iterations": 2}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_random(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("loss", LOSSES)
def test_two_ranks_train_the_weights_of_one(llama, fit_grpo_ranks, strategy, loss):
    options = {**SIZES, "loss": LOSSES[loss], "max_steps": 5}
    alone = fit(llama, **options)
    ranks = fit_grpo_ranks(llama, strategy=strategy, **options)
    start = fit(llama, **{**options, "max_steps": 1})["steps"].before[0]
    names = alone["weights"].keys()
    assert relative_difference(alone["weights"], dict(zip(names, start, strict=True))) > 1e-3
    for rank in ranks:
        assert relative_difference(alone["weights"], rank["weights"]) < 5e-6


OF_THE_STEP = {
    "clip_cov": {"loss_fn": "clip_cov", "cov_share": 0.3, "cov_lower": -9.0, "cov_upper": 9.0},
    "top_entropy": {"token_filter": "top_entropy"},
    "tis_normalised": {"correction": "tis_normalised"},
}


@pytest.mark.parametrize("loss", OF_THE_STEP)
def test_ranks_and_micro_batches_know_of_each_other(tmp_path, fit_grpo_ranks, loss):
    """In float64; the last step has so few completions that micro-batches are empty."""
    policy = save_random(tmp_path / "gpt2", "gpt2")
    options = {**SIZES, "loss": OF_THE_STEP[loss], "off": 0.1, "prompts": 7}
    options |= {"precision": "64-true", "optimizer": "sgd"}
    alone = fit(policy, **{**options, "batch_size": 9})
    for rank in fit_grpo_ranks(policy, strategy="ddp", **options):
        assert relative_difference(alone["weights"], rank["weights"]) < 1e-10


def test_ranks_that_hold_pieces_know_of_each_other(llama, fit_grpo_ranks):
    options = {**SIZES, "loss": OF_THE_STEP["clip_cov"], "optimizer": "sgd", "max_steps": 4}
    alone = fit(llama, **{**options, "batch_size": 9})
    for rank in fit_grpo_ranks(llama, strategy="fsdp", **options):
        assert relative_difference(alone["weights"], rank["weights"]) < 5e-6


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_resume_under_two_ranks_is_bit_identical(llama, fit_grpo_ranks, tmp_path, strategy):
    options = {**SIZES, "strategy": strategy, "max_steps": 7}
    saved = str(tmp_path / "checkpoints")
    whole = fit_grpo_ranks(llama, checkpoint_dir=saved, checkpoint_every=1, **options)
    for step in (3, 4):  # in the middle of a rollout buffer, and between two
        resumed = fit_grpo_ranks(llama, ckpt_path=f"{saved}/step={step}.ckpt", **options)
        for before, after in zip(whole, resumed, strict=True):
            assert before["rows"][-len(after["rows"]) :] == after["rows"]
            for name, weight in before["weights"].items():
                assert torch.equal(weight, after["weights"][name]), name
