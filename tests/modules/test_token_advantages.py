"""Advantages of tokens on their way from a rollout to the loss."""

import pytest
import torch
from distributed.fit_grpo import fit, save_random
from modules.test_grpo import run
from modules.test_grpo_fit import BUFFER, assert_same_weights
from torch.testing import assert_close

from lit_align.losses import optimal_token_baseline

OTB = {"advantage": "optimal_token_baseline", "loss_fn": "clip"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_random(tmp_path_factory.mktemp("llama"))


def test_the_baseline_is_that_of_what_the_policy_said_of_each_token(llama):
    """The batches hold the advantages of their tokens; log-probs and alignment are scored anew."""
    said, module = run(llama, loss=OTB, optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    samples = {(s.group, s.number): s for s in module.rollout.samples}
    rows = []
    for batch in said.batches:
        with torch.no_grad():
            scored = module.scored(module.policy, batch, alignment="sampled")
        for n, mask in enumerate(scored.mask):
            sample = samples[int(batch["group"][n]), int(batch["number"][n])]
            own = (scored.logprobs[n][mask], scored.alignment[n][mask])
            rows.append((sample, *own, batch["token_advantages"][n][mask]))
    padded = [
        torch.nn.utils.rnn.pad_sequence(part, True) for part in list(zip(*rows, strict=True))[1:]
    ]
    lengths = torch.tensor([len(sample.completion_ids) for sample, *_ in rows])
    mask = torch.arange(padded[0].shape[1]) < lengths[:, None]
    rewards = torch.tensor([sample.reward for sample, *_ in rows], dtype=torch.float64)
    groups = torch.tensor([sample.group for sample, *_ in rows])
    right = optimal_token_baseline(rewards, groups, padded[0], padded[1], mask)
    assert_close(padded[2].double(), right, rtol=1e-5, atol=1e-6)
    assert right.std(-1).max() > 1e-3
    for sample in samples.values():
        assert sample.advantage == pytest.approx(
            sum(sample.token_advantages) / len(sample.completion_ids)
        )


def test_tokens_without_an_advantage_are_counted_one_by_one(llama):
    said, module = run(llama, loss=OTB)
    alone = sum(advantage == 0 for s in module.rollout.samples for advantage in s.token_advantages)
    tokens = sum(len(s.completion_ids) for s in module.rollout.samples)
    assert alone > 0
    assert said.metrics["train/tokens/no_advantage"] == pytest.approx(alone / tokens)


def test_other_losses_know_of_no_advantages_of_tokens(llama):
    said, module = run(llama)
    assert not any("token_advantages" in batch for batch in said.batches)
    assert module.rollout.samples[0].alignment is None


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_a_run_resumed_within_a_rollout_ends_bit_identical(tmp_path, llama):
    options = {**BUFFER, "loss": OTB, "checkpoint_dir": str(tmp_path), "checkpoint_every": 1}
    whole = fit(llama, **options)
    for step in (1, 2, 5):
        resumed = fit(llama, ckpt_path=tmp_path / f"step={step}.ckpt", **options)
        assert_same_weights(whole["weights"], resumed["weights"])


@pytest.mark.parametrize("loss_fn", ["clip", "clip_cov"])
def test_the_gradient_does_not_depend_on_how_a_step_is_cut(tmp_path, loss_fn):
    gpt2 = save_random(tmp_path / "gpt2", "gpt2")
    loss = {**OTB, "loss_fn": loss_fn}
    options = {"precision": "64-true", "optimizer": "sgd", "max_steps": 2, "loss": loss}
    whole, *parts = (
        fit(gpt2, batch_size=size, accumulate=more, **options)["steps"].gradients
        for size, more in ((12, 1), (5, 1), (5, 6))
    )
    for gradients in parts:
        for one, other in zip(whole, gradients, strict=True):
            assert float((one - other).norm() / one.norm()) < 1e-6
