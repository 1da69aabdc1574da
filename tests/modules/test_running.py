"""What losses remember from step to step: however steps were cut or stopped."""

import lightning as L
import pytest
import torch
from distributed.conftest import write_pairs
from distributed.fit import fit
from torch.testing import assert_close

from lit_align.losses import DPOConfig, PairLoss
from lit_align.modules import DPOModule
from lit_align.modules.running import RunningNumbers

LOSSES = ["bco_pair", "beta_dpo"]


@pytest.fixture(scope="module")
def pairs13(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("pairs") / "pairs13.jsonl", 13)


@pytest.fixture(scope="module")
def trainer():
    return L.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )


def numbers(**losses):
    return RunningNumbers({name: DPOConfig(**options) for name, options in losses.items()})


def rewards(chosen, rejected):
    chosen, rejected = (torch.tensor(values) for values in (chosen, rejected))
    return PairLoss(chosen * 0, chosen, rejected)


def every(pair):
    return torch.ones_like(pair.losses, dtype=torch.bool)


def test_delta_is_the_mean_of_all_rewards_of_the_steps_before(trainer):
    running = numbers(one={"loss_type": "bco_pair"}, other={"loss_type": "dpo"})
    assert running["other"] == {}
    assert running["one"]["delta"] == 0
    first = rewards([1.0, 2.0], [-1.0, 4.0])
    running.observe({"one": first}, torch.tensor([True, False]))
    assert running["one"]["delta"] == 0
    running.observe({"one": first}, torch.tensor([False, True]))
    running.end_step(trainer)
    assert running["one"]["delta"] == 1.5
    last = rewards([9.0], [7.0])
    running.observe({"one": last}, every(last))
    running.end_step(trainer)
    assert running["one"]["delta"] == (6 + 16) / 6


def test_each_loss_of_a_sum_has_numbers_of_its_own(trainer):
    running = numbers(
        one={"loss_type": "beta_dpo", "beta": 0.5}, other={"loss_type": "beta_dpo", "momentum": 0}
    )
    pair = rewards([1.0, 3.0], [0.0, 0.0])
    running.observe({"one": pair, "other": pair}, every(pair))
    running.end_step(trainer)
    assert_close(running["one"]["lead_mean"].item(), 0.1 * 4)
    assert_close(running["one"]["lead_std"].item(), 0.1 * 8**0.5)
    assert_close(running["other"]["lead_mean"].item(), 2 / 0.1)


def test_a_loss_that_the_checkpoint_does_not_know_starts_afresh(trainer):
    first = numbers(one={"loss_type": "bco_pair"})
    pair = rewards([1.0], [3.0])
    first.observe({"one": pair}, every(pair))
    first.end_step(trainer)
    again = numbers(one={"loss_type": "bco_pair"}, other={"loss_type": "bco_pair"})
    again.load_state_dict(first.state_dict())
    assert (again["one"]["delta"], again["other"]["delta"]) == (2, 0)


def test_what_a_stopped_step_has_shown_is_forgotten(trainer):
    running = numbers(one={"loss_type": "bco_pair"})
    pair = rewards([1.0], [3.0])
    running.observe({"one": pair}, every(pair))
    running.forget_step()
    running.end_step(trainer)
    assert running["one"]["delta"] == 0


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("step", [1, 3, 5])
def test_resumed_run_ends_bit_identical(tmp_path, pairs13, loss, step):
    """Four steps an epoch, the last of one micro-batch; dropout is on."""
    options = {"cache": tmp_path, "loss": loss, "batch_size": 2, "accumulate": 2, "max_epochs": 2}
    options |= {"dropout": 0.1, "checkpoint_every": 1, "checkpoint_dir": tmp_path / "saved"}
    whole = fit(pairs13, **options)
    saved = tmp_path / "saved" / f"step={step}.ckpt"
    state = torch.load(saved, weights_only=True)["running_numbers"][loss]
    assert step == 1 or all(value.abs().max() > 0 for value in state.values())
    resumed = fit(pairs13, ckpt_path=saved, **options)
    for name, weight in whole["weights"].items():
        assert torch.equal(weight, resumed["weights"][name]), name
    loaded = DPOModule.load_from_checkpoint(saved, weights_only=True)
    assert_close(loaded.running.state_dict()[loss], state, rtol=0, atol=0)


@pytest.mark.parametrize("loss", LOSSES)
def test_what_is_remembered_is_read(tmp_path, pairs13, loss, monkeypatch):
    """Else the weights above would be the same without it."""
    options = {"cache": tmp_path, "loss": loss, "batch_size": 8, "max_epochs": 3}
    with_it = fit(pairs13, **options)["weights"]
    monkeypatch.setattr(RunningNumbers, "__getitem__", lambda self, loss: {})
    without = fit(pairs13, **options)["weights"]
    assert any(not torch.equal(with_it[name], without[name]) for name in without)
