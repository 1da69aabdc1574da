"""The entropy in the loss of a whole step, and the control of its weight through a run."""

import math

import pytest
import torch
from distributed.conftest import results
from distributed.fit_grpo import fit, save_random
from lightning import Callback
from modules.test_grpo_fit import AGGREGATIONS, BUFFER, assert_same_weights, worst

from lit_align.losses import EntropyBonus, GRPOConfig
from lit_align.modules import GRPOModule

# Between what the random policy starts with, which is nearly all there can be, and ends with.
TARGET = {"entropy_control": "target", "entropy_target": 5.5615, "entropy_step": 0.25}


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return save_random(tmp_path_factory.mktemp("gpt2"), "gpt2")


class Bonus(Callback):
    """What each step was told of its bonus, and what it found."""

    def __init__(self):
        self.logged, self.entropies, self.stands = [], [], []

    def on_train_start(self, trainer, pl_module):
        self.step = trainer.global_step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step > self.step:
            self.step = trainer.global_step
            metrics = trainer.callback_metrics
            self.logged.append(metrics.get("train/entropy_bonus", torch.tensor(math.nan)).item())
            self.entropies.append(metrics["train/entropy"].item())
            self.stands.append(pl_module.entropy_bonus)


def watched(policy, loss, **options):
    seen = Bonus()
    result = fit(policy, loss=loss, watchers=[seen], **options)
    return result, seen


@pytest.mark.parametrize("cut", [(12, 1), (2, 8)])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_gradient_is_that_of_a_plain_loop_over_all_logits(gpt2, aggregation, cut):
    """In float64, after the policy has moved: the bonus is averaged as the losses are."""
    sizes = {"steps_per_rollout": 2, "num_iterations": 2, "prompts": 6, "prompts_per_step": 2}
    difference, steps = worst(
        gpt2, aggregation, cut, bonus=0.3, optimizer="sgd", precision="64-true", **sizes
    )
    assert steps == 8
    assert difference < 1e-6
    # Of a run without the bonus it would not be.
    missed, _ = worst(gpt2, aggregation, cut, optimizer="sgd", precision="64-true", **sizes)
    assert missed < 1e-6


@pytest.mark.parametrize("aggregation", ["token_mean", "prompt_mean"])
def test_the_gradient_does_not_depend_on_how_a_step_is_cut(gpt2, aggregation):
    options = {"precision": "64-true", "optimizer": "sgd", "max_steps": 2}
    loss = {"aggregation": aggregation, "entropy_bonus": 0.3}
    whole, *parts = (
        fit(gpt2, loss=loss, batch_size=size, accumulate=more, **options)["steps"].gradients
        for size, more in ((12, 1), (5, 1), (1, 1), (5, 6))
    )
    for gradients in parts:
        for one, other in zip(whole, gradients, strict=True):
            assert float((one - other).norm() / one.norm()) < 1e-10


def test_a_bonus_keeps_the_entropy_up(gpt2):
    options = {"prompts": 40, "max_steps": 8, "max_epochs": 4}
    _, without = watched(gpt2, {}, **options)
    _, with_bonus = watched(gpt2, {"entropy_bonus": 1.0}, **options)
    assert with_bonus.entropies[-1] > without.entropies[-1]
    assert with_bonus.logged == [1.0] * 8
    assert all(map(math.isnan, without.logged))


def test_the_control_follows_the_entropy_of_each_step(gpt2):
    _, seen = watched(gpt2, TARGET, prompts=40, max_steps=8, max_epochs=4)
    assert {entropy <= 5.5615 for entropy in seen.entropies} == {True, False}
    stands = EntropyBonus(0.0, 0.0)
    for logged, entropy, found in zip(seen.logged, seen.entropies, seen.stands, strict=True):
        assert logged == stands.weight
        low = entropy <= 5.5615
        moved = max(stands.coefficient + (0.25 if low else -0.25), 0.0)
        stands = EntropyBonus(min(moved, 1.0), min(moved, 1.0) if low else 0.0)
        assert found == stands


@pytest.mark.parametrize("cut", [(12, 1), (5, 1), (2, 8)])
def test_the_control_does_not_depend_on_how_a_step_is_cut(gpt2, cut):
    batch_size, accumulate = cut
    options = {"prompts": 24, "max_steps": 6, "max_epochs": 2, "precision": "64-true"}
    _, whole = watched(gpt2, TARGET, **options)
    _, parts = watched(gpt2, TARGET, batch_size=batch_size, accumulate=accumulate, **options)
    assert parts.stands == whole.stands
    assert parts.entropies == pytest.approx(whole.entropies, abs=1e-6)


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_a_resumed_run_ends_bit_identical(tmp_path, gpt2):
    options = {**BUFFER, "checkpoint_dir": str(tmp_path), "checkpoint_every": 1}
    whole, seen = watched(gpt2, TARGET, **options)
    assert len({bonus.coefficient for bonus in seen.stands}) > 1
    for step in (3, 6):
        resumed, later = watched(gpt2, TARGET, ckpt_path=tmp_path / f"step={step}.ckpt", **options)
        assert later.stands[-1] == seen.stands[-1]
        assert_same_weights(whole["weights"], resumed["weights"])


def test_a_step_without_a_token_moves_nothing(gpt2):
    module = GRPOModule(gpt2, GRPOConfig(**TARGET, entropy_bonus=0.5), reward=len)
    module.step_sums.update({"tokens": torch.tensor(0.0), "entropy": torch.tensor(0.0)})
    module._next_entropy_bonus()
    assert module.bonus_means.compute_and_reset() == {"entropy_bonus": 0.5}
    assert module.entropy_bonus == (0.5, 0.5)


@pytest.mark.distributed
@pytest.mark.slow
def test_two_ranks_keep_one_control(tmp_path, gpt2):
    options = {"prompts": 24, "prompts_per_step": 3, "batch_size": 2, "max_steps": 6}
    options |= {"loss": TARGET, "precision": "64-true"}
    alone = fit(gpt2, **options)
    ranks = results("fit_grpo.py", tmp_path / "out", {"policy": gpt2, "devices": 2, **options})
    for rank in ranks:
        for name, weight in alone["weights"].items():
            torch.testing.assert_close(rank["weights"][name], weight, rtol=0, atol=1e-9)
