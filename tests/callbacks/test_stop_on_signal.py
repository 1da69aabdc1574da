"""Real signals in the midst of real runs: where they end, and what they end as after a resume."""

import csv
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from lightning import Callback
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_align.callbacks import BeforeAfter, SavePolicy, StopOnSignal, ValidateAtEnd
from lit_align.callbacks import stop_on_signal as module

CTRL_C, TERM = signal.SIGINT, signal.SIGTERM
ENDS = {CTRL_C: SystemExit, TERM: SIGTERMException}


class Sends(Callback):
    """Sends this process signals when a micro-batch (counted over the run) or a validation starts.

    Also keeps the numbers of the micro-batches, and the steps after which was validated.
    """

    def __init__(self, *signals, batch=None, validation=None):
        self.signals = signals
        self.batch = batch
        self.validation = validation
        self.batches = []
        self.validations = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        number = trainer.fit_loop.epoch_loop.total_batch_idx
        if number == self.batch:
            self.send()
        self.batches.append(number)

    def on_validation_batch_start(self, trainer, *args):
        if trainer.global_step == self.validation:
            self.validation = None
            self.send()

    def on_validation_end(self, trainer, pl_module):
        self.validations.append(trainer.global_step)

    def send(self):
        for number in self.signals:
            os.kill(os.getpid(), number)


@pytest.fixture(params=["pairs", "rollouts"])
def fit(request, run, act, tools, tmp_path):
    """Two epochs of a run of each kind, with several micro-batches a step; `epoch` counts them."""
    if request.param == "rollouts":
        # 3 prompts x 4 completions: 3 micro-batches a step, 2 steps a rollout, 4 an epoch.
        options = {"data": {"num_iterations": 2, "max_rows": 6}, "max_epochs": 2, "max_steps": -1}
        result = lambda *callbacks, **more: act(*callbacks, **options | more)  # noqa: E731
        result.accumulate, result.epoch = 3, 12
        return result

    val = tools.write_pairs(tmp_path / "val.jsonl", [tools.pair(n) for n in (8, 9, 10)])

    def of_pairs(*callbacks, max_steps=-1, **more):
        ended_by = None
        try:
            ran = run(
                callbacks=callbacks,
                steps=max_steps,
                data_options={"val_path": val},
                **{"max_epochs": 2, "batch_size": 1, "limit_val_batches": 0} | more,
            )
        except SystemExit as end:
            ended_by, ran = end, None
        return SimpleNamespace(ended_by=ended_by, module=ran and ran.module)

    # 7 pairs in windows of 3, 3 and 1.
    result = partial(of_pairs, accumulate_grad_batches=3)
    result.accumulate, result.epoch = 3, 7
    return result


def weights(result):
    return torch.cat([p.detach().flatten() for p in result.module.policy.parameters()])


def saved_step(path):
    return torch.load(path, weights_only=True)["global_step"]


@pytest.fixture
def last(tmp_path):
    return tmp_path / "checkpoints" / "last.ckpt"


# Micro-batch 4 is the second of the second step. Either kind's last window of an epoch ends it.
@pytest.mark.parametrize("number", [CTRL_C, TERM], ids=["Ctrl-C", "SIGTERM"])
@pytest.mark.parametrize("batch", [4, "last of epoch", "first of second"])
def test_a_run_that_was_stopped_ends_as_if_it_had_not_been(fit, last, number, batch):
    whole = fit(seen := Sends())
    batch = {"last of epoch": fit.epoch - 1, "first of second": fit.epoch}.get(batch, batch)
    stopped = fit(first := Sends(number, batch=batch), StopOnSignal())
    assert type(stopped.ended_by) is ENDS[number]
    step_ends = [n for n in seen.batches if n + 1 == fit.epoch or n % fit.epoch % 3 == 2]
    assert first.batches[-1] == next(n for n in step_ends if n >= batch), "the step was finished"
    resumed = fit(rest := Sends(), StopOnSignal(), ckpt_path=last)
    assert first.batches + rest.batches == seen.batches
    assert torch.equal(weights(resumed), weights(whole))


@pytest.mark.parametrize("step", [1, 4], ids=["within an epoch", "at its end"])
def test_a_signal_in_a_validation_ends_the_run_after_it(act, tmp_path, last, step):
    options = {
        "data": {"max_rows": 12, "val_batch_size": 2},
        "max_epochs": 2,
        "max_steps": -1,
        "limit_val_batches": 1.0,
        "val_check_interval": 1.0 if step == 4 else 3,
    }
    best = "val/completions/mean_length"

    def savers(folder):
        return SavePolicy(tmp_path / folder, best=best), BeforeAfter()

    whole = act(seen := Sends(), *(both := savers("whole")), **options)
    stopped = act(first := Sends(TERM, validation=step), *savers("cut"), StopOnSignal(), **options)
    assert type(stopped.ended_by) is SIGTERMException
    assert first.validations[-1] == step
    resumed = act(
        rest := Sends(), *(again := savers("cut")), StopOnSignal(), ckpt_path=last, **options
    )
    assert first.batches + rest.batches == seen.batches
    assert first.validations + rest.validations == seen.validations
    assert torch.equal(weights(resumed), weights(whole))
    assert again[0].best_score == both[0].best_score
    assert again[1].after == both[1].after


@pytest.mark.parametrize("sends", [{"batch": 11}, {"validation": 4}], ids=str)
@pytest.mark.parametrize("end", [{}, {"max_steps": -1, "max_epochs": 1}], ids=["steps", "epochs"])
def test_after_the_last_step_a_run_ends_as_it_would_have(act, tmp_path, last, end, sends):
    seen = Sends(CTRL_C, **sends)
    callbacks = seen, ValidateAtEnd(), SavePolicy(tmp_path), StopOnSignal()
    result = act(*callbacks, limit_val_batches=1.0, **end)
    assert result.ended_by is None
    assert seen.validations == [4]
    assert (tmp_path / "model" / "model.safetensors").exists()
    assert not last.exists()


def test_a_second_signal_ends_the_run_at_once(act, last, monkeypatch):
    monkeypatch.setattr(module, "ONE_AND_THE_SAME", 0.0)
    for number in (CTRL_C, TERM):
        result = act(seen := Sends(number, number, batch=4), StopOnSignal())
        assert type(result.ended_by) is ENDS[number]
        assert seen.batches == [0, 1, 2, 3]
        assert not last.exists()


def test_a_signal_that_comes_twice_at_once_is_one(act, last):
    result = act(seen := Sends(TERM, TERM, batch=4), StopOnSignal())
    assert type(result.ended_by) is SIGTERMException
    assert seen.batches == [0, 1, 2, 3, 4, 5]
    assert saved_step(last) == 2


def test_scripts_end_with_the_code_of_the_signal(act):
    assert act(Sends(TERM, batch=0), StopOnSignal()).ended_by.code == 128 + TERM


@pytest.mark.parametrize("sent", [(), (CTRL_C,), (TERM,)], ids=["no end", "Ctrl-C", "SIGTERM"])
def test_afterwards_signals_are_handled_as_before(act, sent):
    def mine(number, frame):
        pytest.fail("not while a run listens")

    before = {each: signal.signal(each, mine) for each in (CTRL_C, TERM)}
    try:
        act(Sends(*sent, batch=0), StopOnSignal())
        assert [signal.getsignal(each) for each in (CTRL_C, TERM)] == [mine, mine]
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def test_after_an_error_signals_are_handled_as_before(act):
    class Fails(Callback):
        def on_train_batch_end(self, *args):
            raise ZeroDivisionError

    before = [signal.getsignal(each) for each in (CTRL_C, TERM)]
    with pytest.raises(ZeroDivisionError):
        act(Fails(), StopOnSignal())
    assert [signal.getsignal(each) for each in (CTRL_C, TERM)] == before


def test_a_run_outside_the_main_thread_trains_without_listening(act):
    before = [signal.getsignal(each) for each in (CTRL_C, TERM)]
    results = []
    thread = threading.Thread(target=lambda: results.append(act(StopOnSignal())))
    thread.start()
    thread.join()
    assert results[0].ended_by is None
    assert [signal.getsignal(each) for each in (CTRL_C, TERM)] == before


# Lightning says so of each folder that it goes on in.
@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.parametrize("save_last", ["link", True, None], ids=["link", "file", "none"])
def test_the_checkpoint_lies_where_the_others_do_and_harms_none(act, tmp_path, save_last):
    folder = tmp_path / "kept"

    def saver(every):
        return ModelCheckpoint(
            folder, "{step}", every_n_train_steps=every, save_top_k=-1, save_last=save_last
        )

    options = {"enable_checkpointing": True}
    act(Sends(TERM, batch=7), StopOnSignal(), saver(2), **options)
    last = folder / "last.ckpt"
    assert saved_step(last) == 3
    assert not last.is_symlink()
    assert saved_step(folder / "step=2.ckpt") == 2
    assert sorted(path.name for path in folder.iterdir()) == ["last.ckpt", "step=2.ckpt"]
    # In the same folder a resumed run goes on with the same file.
    act(StopOnSignal(), keeper := saver(2), ckpt_path=last, max_steps=6, **options)
    assert saved_step(last) == (6 if save_last else 3)
    assert last.is_symlink() == (save_last == "link")
    assert not list(folder.glob("last-v*"))
    if save_last:
        assert keeper.last_model_path == str(last)


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_a_resumed_run_overwrites_the_file_it_came_from(act, tmp_path):
    def saver():
        return ModelCheckpoint(tmp_path, every_n_train_steps=9, save_top_k=0, save_last=True)

    last = tmp_path / "last.ckpt"
    act(Sends(TERM, batch=1), StopOnSignal(), saver(), enable_checkpointing=True)
    assert saved_step(last) == 1
    act(StopOnSignal(), saver(), ckpt_path=last, enable_checkpointing=True)
    assert saved_step(last) == 4
    assert not list(tmp_path.glob("last-v*"))


def test_a_folder_of_shards_gives_way_to_a_checkpoint_and_the_other_way_round(tmp_path):
    folder, file, last = tmp_path / "shards", tmp_path / "file", tmp_path / "last.ckpt"
    for _ in range(2):
        folder.mkdir()
        (folder / "meta.pt").touch()
        module._put_in_place(folder, last)
        assert (last / "meta.pt").exists()
        file.write_text("one")
        module._put_in_place(file, last)
        assert last.read_text() == "one"
    last.unlink()
    kept = tmp_path / "kept"
    kept.mkdir()
    folder.mkdir()
    last.symlink_to(kept)
    module._put_in_place(folder, last)
    assert not last.is_symlink()
    assert kept.is_dir()


def test_no_logged_step_is_lost(act, tmp_path, last):
    def rows(*folders):
        files = [tmp_path / folder / "metrics.csv" for folder in folders]
        return [row for file in files for row in csv.DictReader(file.read_text().splitlines())]

    def logger(folder):
        return CSVLogger(tmp_path, folder, "")

    act(Sends(), StopOnSignal(), logger=logger("whole"))
    act(Sends(CTRL_C, batch=4), StopOnSignal(), logger=logger("first"))
    act(StopOnSignal(), logger=logger("rest"), ckpt_path=last)
    assert len(rows("whole")) == 4
    assert rows("first", "rest") == rows("whole")


def test_it_says_at_once_that_it_was_heard_and_then_where_the_checkpoint_is(act, last, capfd):
    result = act(Sends(CTRL_C, batch=4), StopOnSignal())
    assert "stopping after this optimizer step; once more to stop at once" in capfd.readouterr().err
    assert f"stopped after step 2: {last}" in result.said


@pytest.mark.parametrize("sent", [(TERM,), (TERM, TERM)], ids=["after the step", "at once"])
def test_a_rank_that_has_ended_does_not_have_this_one_killed(act, monkeypatch, sent):
    """Else the exit code would be that of SIGKILL, whenever Lightning looks at a bad moment."""
    monkeypatch.setattr(module, "ONE_AND_THE_SAME", 0.0)
    ended = subprocess.Popen([sys.executable, "-c", "raise SystemExit(143)"])
    ended.wait()
    instead_of_this = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    observer = _ChildProcessObserver(instead_of_this.pid, [ended], sleep_period=3600)
    observer.start()
    try:
        act(Sends(*sent, batch=4), StopOnSignal())
        observer._run()
        with pytest.raises(subprocess.TimeoutExpired):
            instead_of_this.wait(0.3)
    finally:
        instead_of_this.kill()
        instead_of_this.communicate()


@pytest.mark.filterwarnings("ignore:.*multi-threaded")
def test_a_fork_hears_sigterm_only(act):
    """Such as a reader of data, which Ctrl-C in a terminal reaches as well."""
    statuses = []

    class Forks(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            for number in (CTRL_C, TERM):
                if not (child := os.fork()):
                    os.kill(os.getpid(), number)
                    os._exit(7)
                statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    assert act(StopOnSignal(), Forks(), max_steps=1).ended_by is None
    assert set(statuses[::2]) == {7}
    assert set(statuses[1::2]) == {-TERM}
