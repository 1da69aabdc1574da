"""The table at the end of a run."""

import json

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_align.callbacks import BeforeAfter
from lit_align.modules import DPOModule


@pytest.fixture
def fit(run, tools, tmp_path):
    val = tools.write_pairs(tmp_path / "val.jsonl", [tools.pair(n) for n in (8, 9, 10)])

    def run_with(*callbacks, **options):
        return run(
            **{"loss": "simpo", "num_sanity_val_steps": -1, "val_check_interval": 1} | options,
            data_options={"val_path": val},
            callbacks=callbacks,
        )

    return run_with


def validate(tools, module, data):
    (metrics,) = tools.quiet_trainer().validate(module, data, verbose=False)
    return metrics


def test_it_shows_the_whole_validation_set_before_and_at_the_end(
    fit, tools, llama, tmp_path, capsys
):
    keeper = BeforeAfter(folder=tmp_path / "run")
    result = fit(keeper, lr=1.0)
    before = validate(tools, DPOModule(str(llama), "simpo"), result.datamodule)
    after = validate(tools, result.module, result.datamodule)
    assert keeper.before == pytest.approx(before)
    assert keeper.after == pytest.approx(after)
    assert json.loads((tmp_path / "run/before_after.json").read_text()) == {
        "before": keeper.before,
        "after": keeper.after,
    }
    shown = capsys.readouterr().out
    loss = (before["val/loss"], after["val/loss"])
    assert f"{loss[0]:.4f}" in shown
    assert f"{loss[1]:.4f}" in shown
    assert f"{loss[1] - loss[0]:+.4f}" in shown


def test_the_metrics_and_their_order_can_be_chosen(fit, capsys):
    fit(BeforeAfter(["val/rewards/margins", "val/loss", "val/unknown"]))
    shown = capsys.readouterr().out
    assert -1 < shown.find("rewards/margins") < shown.find("loss")
    assert "logps" not in shown
    assert "unknown" not in shown


def test_a_few_batches_are_not_the_state_before(fit, capsys):
    keeper = BeforeAfter()
    fit(keeper, num_sanity_val_steps=1)
    assert keeper.before == {}
    assert keeper.after
    shown = capsys.readouterr().out
    assert "loss" in shown
    assert "nan" not in shown


def test_a_run_without_validation_shows_nothing(fit, tmp_path, capsys):
    fit(BeforeAfter(folder=tmp_path / "run"), limit_val_batches=0)
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_shows_the_state_before_the_first_start(fit, tmp_path):
    def callbacks():
        return BeforeAfter(), ModelCheckpoint(
            every_n_train_steps=1, save_top_k=-1, filename="{step}"
        )

    first, saver = callbacks()
    fit(first, saver, enable_checkpointing=True)
    (tmp_path / "checkpoints").rename(tmp_path / "kept")
    again, saver = callbacks()
    path = tmp_path / "kept" / "step=1.ckpt"
    fit(again, saver, enable_checkpointing=True, ckpt_path=path, lr=1.0)
    assert again.before == first.before


def test_no_zero_is_negative():
    keeper = BeforeAfter()
    keeper.before, keeper.after = {"val/x": -1e-9}, {"val/x": -2e-9}
    (before, after, change) = (next(iter(column.cells)) for column in keeper.table().columns[1:])
    assert (before, after, change) == ("0.0000", "0.0000", "+0.0000")


def test_a_second_fit_does_not_keep_the_first_ones_numbers(fit):
    keeper = BeforeAfter()
    fit(keeper)
    assert keeper.before
    fit(keeper, num_sanity_val_steps=0)
    assert keeper.before == {}
