"""A command that somebody ends from outside: its exit code, its last words, and how it goes on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.slow
TRAIN = Path(__file__).parents[2] / "train.py"
LISTENS = "++callbacks.stop_on_signal._target_=lit_align.StopOnSignal"
SHORT = [
    "trainer.max_steps=40",
    "trainer.enable_progress_bar=false",
    "trainer.num_sanity_val_steps=0",
    "callbacks.checkpoint.every_n_train_steps=3",
    "data.max_rows=300",
    "data.val_max_rows=8",
    "data.batch_size=8",
    LISTENS,
]
KINDS = {
    "loss=dpo": ["trainer.accumulate_grad_batches=3"],
    "loss=dapo": ["data.prompts_per_step=3", "data.num_iterations=2"],
}


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_ALIGN_CACHE", str(tmp_path / "cache"))

    def start(*overrides):
        return subprocess.Popen(
            [sys.executable, TRAIN, *SHORT, *overrides],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    return start


def interrupt(process, folder, send):
    """Send a signal once the run has made three steps; exit code and standard error."""
    try:
        while not list(folder.glob("checkpoints/step-000003.ckpt")):
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        send(process)
        _, err = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, err


@pytest.mark.parametrize("kind", KINDS)
def test_a_command_that_was_terminated_goes_on_where_it_says(start, kind):
    options = [kind, *KINDS[kind]]
    process = start(*options, "hydra.run.dir=first")
    code, err = interrupt(
        process, Path("first"), lambda process: process.send_signal(signal.SIGTERM)
    )
    assert code == 143
    last = Path("first/checkpoints/last.ckpt").absolute()
    assert err.splitlines()[-1] == (
        f"terminated; go on with the same settings and ckpt_path={last}"
    )
    assert "Traceback" not in err
    assert 3 <= torch.load(last, weights_only=True)["global_step"] < 40
    for folder, more in (("rest", [f"ckpt_path={last}"]), ("whole", [])):
        process = start(*options, f"hydra.run.dir={folder}", *more)
        assert process.wait(120) == 0, process.communicate()
        process.communicate()
    rest, whole = (load_file(f"{name}/model/model.safetensors") for name in ("rest", "whole"))
    for name, tensor in whole.items():
        assert torch.equal(rest[name], tensor), name


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("send", "code", "word"),
    [
        (lambda process: os.killpg(process.pid, signal.SIGINT), 130, "interrupted"),
        (lambda process: process.send_signal(signal.SIGTERM), 143, "terminated"),
    ],
    ids=["Ctrl-C", "SIGTERM"],
)
def test_two_ranks_end_with_the_code_of_one(start, send, code, word):
    two = ["trainer.accelerator=cpu", "trainer.devices=2", "trainer.strategy=ddp"]
    process = start("loss=simpo", *two, "hydra.run.dir=first", "trainer.max_steps=100000")
    found, err = interrupt(process, Path("first"), send)
    assert found == code
    assert err.count(f"{word}; go on with the same settings and ckpt_path=") == 1
    assert err.count("stopping after this optimizer step") == 1
    assert "Traceback" not in err
