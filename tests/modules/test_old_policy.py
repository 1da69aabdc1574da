"""Ratios that divide by the probabilities with which the tokens were drawn."""

import math

import pytest
import torch
from distributed.fit_grpo import save_random
from lightning import Callback
from modules.test_grpo import run

from lit_align.errors import UserError
from lit_align.losses import GRPOConfig
from lit_align.modules import GRPOModule
from lit_align.rollout import HuggingFaceEngine

PG_IS = {"loss_fn": "reinforce", "old_policy": "sampler", "correction": "tis_sequence"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_random(tmp_path_factory.mktemp("llama"))


class Elsewhere(HuggingFaceEngine):
    """An engine that thinks every other token less likely than the trainer does, by `off` nats."""

    in_process = False
    off = 0.125

    def generate(self, requests, sampling):
        return [
            [
                one._replace(
                    logprobs=[
                        logprob - self.off * (place % 2)
                        for place, logprob in enumerate(one.logprobs)
                    ]
                )
                for one in completions
            ]
            for completions in super().generate(requests, sampling)
        ]


def test_the_ratio_is_that_of_policy_and_sampler(llama):
    said, module = run(llama, loss={"old_policy": "sampler"}, engine=Elsewhere())
    lengths = [len(sample.completion_ids) for sample in module.rollout.samples]
    off = sum(length // 2 for length in lengths)
    mean = (off * math.exp(0.125) + sum(lengths) - off) / sum(lengths)
    assert said.metrics["train/ratio"] == pytest.approx(mean, rel=1e-5)
    plain, _ = run(llama, engine=Elsewhere())
    assert plain.metrics["train/ratio"] == pytest.approx(1, rel=1e-5)


def test_a_clip_acts_in_the_first_step_already(llama):
    class Far(Elsewhere):
        off = 0.5

    said, _ = run(llama, loss={"old_policy": "sampler"}, engine=Far())
    assert said.metrics["train/clip_ratio/high_mean"] > 0
    said, _ = run(llama, engine=Far())
    assert said.metrics["train/clip_ratio/high_mean"] == 0


def test_nothing_is_computed_that_nothing_reads(llama):
    twice = {"data": {"num_iterations": 2}, "max_steps": 2, "engine": Elsewhere()}
    said, _ = run(llama, loss={"old_policy": "sampler"}, **twice)
    assert not any("old_logprobs" in batch for batch in said.batches)
    said, _ = run(llama, **twice)
    assert all("old_logprobs" in batch for batch in said.batches)


class Expected(Callback):
    """The loss of each step as `reinforce` with weights of the policy as it then is."""

    def __init__(self):
        self.losses, self.logged = [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        with torch.no_grad():
            scored = pl_module.scored(pl_module.policy, batch)
        difference = (scored.logprobs - batch["sampler_logprobs"]).where(scored.mask, 0.0)
        weights = difference.sum(-1, keepdim=True).exp().clamp(max=2.0)
        losses = -weights * batch["advantages"][:, None] * scored.logprobs
        self.losses.append((losses[scored.mask].sum() / batch["window_tokens"]).item())

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.logged.append(trainer.callback_metrics["train/loss"].item())


@pytest.mark.parametrize(
    "more", [{}, {"beta": 0.01, "kl_in": "reward", "kl_estimator": "k1"}], ids=["plain", "kl"]
)
def test_the_weights_follow_the_policy_through_all_steps_of_a_rollout(llama, more):
    """Also where log-probs before the update are there, for a KL in the reward."""
    expected = Expected()
    run(
        llama,
        loss={**PG_IS, **more},
        data={"num_iterations": 3, "batch_size": 12},
        max_steps=3,
        engine=Elsewhere(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.3),
        watchers=[expected],
    )
    assert expected.logged == pytest.approx(expected.losses, rel=1e-4, abs=1e-6)
    assert len(set(expected.losses)) == 3


def test_a_filter_compares_the_policy_in_training_with_the_sampler(llama):
    loss = {"old_policy": "sampler", "token_filter": "ratio_bounds", "bound_over": "token"}
    said, module = run(
        llama, loss={**loss, "ratio_lower": 0.9, "ratio_upper": 1.1}, engine=Elsewhere()
    )
    lengths = [len(sample.completion_ids) for sample in module.rollout.samples]
    left_out = sum(length // 2 for length in lengths) / sum(lengths)
    assert said.metrics["train/tokens/dropped"] == pytest.approx(left_out, abs=1e-6)


def test_an_engine_that_reports_nothing_and_one_that_leaves_tokens_out_are_refused(llama):
    class Silent(HuggingFaceEngine):
        def generate(self, requests, sampling):
            answers = super().generate(requests, sampling)
            return [[c._replace(logprobs=None) for c in completions] for completions in answers]

    with pytest.raises(UserError, match=r"old_policy 'sampler' needs the sampler's log-probs"):
        run(llama, loss={"old_policy": "sampler"}, engine=Silent())
    with pytest.raises(UserError, match=r"old_policy 'sampler' compares.*old_policy=trainer"):
        GRPOModule("tiny", {"old_policy": "sampler"}, reward=len, sampling={"top_p": 0.9})


def test_a_loss_without_a_ratio_is_right_for_several_steps_if_its_weights_are(llama):
    assert GRPOConfig(**PG_IS).reads_ratio
    with pytest.raises(UserError, match="has no ratio"):
        run(llama, loss={**PG_IS, "old_policy": "trainer"}, data={"num_iterations": 2})
