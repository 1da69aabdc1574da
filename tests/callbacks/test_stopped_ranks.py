"""Signals to processes: all ranks end after one step, and no exit code is lost."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from callbacks import stopped_ranks

SCRIPT = stopped_ranks.__file__
# Of Lightning's launcher: a child must not take itself for a rank of another run.
RANK_VARIABLES = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def fit(tmp_path):
    """Run the script: exit code, what each rank ended with if it got so far, and what was said."""

    def launch(kind, devices=1, **options):
        out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        folder = str(tmp_path / "run")
        options = {"kind": kind, "devices": devices, "folder": folder, **options}
        process = subprocess.Popen(
            [sys.executable, SCRIPT, out, json.dumps(options)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={k: v for k, v in os.environ.items() if k not in RANK_VARIABLES},
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(timeout=240)
        finally:
            # A rank that hangs outlives its parent.
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        assert "Traceback" not in said, said[-3000:]
        paths = [Path(f"{out}.{rank}") for rank in range(devices)]
        return process.returncode, [torch.load(path) for path in paths if path.exists()], said

    return launch


@pytest.fixture
def last(tmp_path):
    return tmp_path / "run" / "checkpoints" / "last.ckpt"


def assert_goes_on(whole, stopped, resumed):
    """Whether every rank read the rest, and ended with the weights of a run without a stop."""
    for one, first, rest in zip(whole, stopped, resumed, strict=True):
        assert first["batches"] + rest["batches"] == one["batches"]
        for name, tensor in one["weights"].items():
            assert torch.equal(rest["weights"][name], tensor), name


@pytest.mark.parametrize("kind", ["pairs", "rollouts"])
def test_a_process_that_was_terminated_goes_on_bit_by_bit(fit, last, tmp_path, kind):
    code, stopped, _ = fit(kind, signals=[[0, 7, "SIGTERM", False]])
    assert code == 128 + signal.SIGTERM
    assert [rank["step"] for rank in stopped] == [3]
    code, resumed = stopped_ranks.fit(kind=kind, folder=str(tmp_path / "run"), ckpt_path=str(last))
    assert code == 0
    _, whole = stopped_ranks.fit(kind=kind, folder=str(tmp_path / "whole"))
    assert_goes_on([whole], stopped, [resumed])


def test_readers_of_data_outlive_ctrl_c_until_the_step_is_made(fit, last):
    code, (stopped,), _ = fit("pairs", num_workers=2, signals=[[0, 7, "SIGINT", True]])
    assert code == 1, "as Lightning ends after Ctrl-C"
    assert stopped["step"] == 3
    assert last.exists()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "strategy"),
    [("pairs", "ddp"), ("rollouts", "ddp"), ("rollouts", "fsdp"), ("pairs", "shards")],
)
def test_ranks_that_hear_of_it_at_different_moments_end_at_the_same_step(fit, last, kind, strategy):
    two = {"devices": 2, "strategy": strategy}
    _, whole, _ = fit(kind, **two)
    # In the third step rank 1 gets its signal a micro-batch before rank 0.
    signals = [[1, 6, "SIGTERM", False], [0, 7, "SIGTERM", False]]
    code, stopped, _ = fit(kind, signals=signals, **two)
    assert code == 128 + signal.SIGTERM
    assert [rank["step"] for rank in stopped] == [3, 3]
    if strategy == "shards":
        # It was a link to this one, which every rank has written its piece of.
        assert not last.is_symlink()
        assert (last.parent / "step=2.ckpt" / "meta.pt").exists()
        assert torch.load(last / "meta.pt", weights_only=True)["global_step"] == 3
    code, resumed, _ = fit(kind, ckpt_path=str(last), **two)
    assert code == 0
    assert_goes_on(whole, stopped, resumed)


@pytest.mark.distributed
def test_one_rank_that_hears_of_it_is_enough_and_the_first_alone_keeps_the_log(fit, last):
    code, stopped, said = fit("rollouts", 2, strategy="ddp", signals=[[1, 6, "SIGTERM", False]])
    assert code == 128 + signal.SIGTERM
    assert [rank["step"] for rank in stopped] == [3, 3]
    assert torch.load(last, weights_only=True)["global_step"] == 3
    # Two iterations each: the second rollout serves steps 3 and 4.
    logs = last.parents[1]
    files = [path.relative_to(logs) for path in sorted(logs.glob("log*/*"))]
    assert list(map(str, files)) == ["log0/rollout-000000.jsonl", "log0/rollout-000001.jsonl"]
    # 3 prompts x 5 completions, which both ranks wrote.
    assert [len(path.read_text().splitlines()) for path in sorted(logs.glob("log0/*"))] == [15, 15]
    assert said.count("written after") == 2


@pytest.mark.distributed
def test_ctrl_c_reaches_all_ranks_and_saves_once(fit, last):
    code, _, _ = fit("pairs", 2, strategy="ddp", signals=[[0, 7, "SIGINT", True]])
    assert code == 1, "as Lightning ends after Ctrl-C"
    assert torch.load(last, weights_only=True)["global_step"] == 3
