"""Preference pairs of unequal lengths, and a way to run `fit.py` in one process or in two."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
# Of Lightning's and torch's launchers: a child must not take itself for a rank of another run.
RANK_VARIABLES = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def write_pairs(path, rows, seed=0):
    """Sums with answers of very different lengths."""
    draw = random.Random(seed)
    with path.open("w") as file:
        for _ in range(rows):
            a, b = draw.randrange(100), draw.randrange(100)
            steps = " ".join(f"{a}+{i}={a + i}" for i in range(draw.randrange(4)))
            pair = {
                "prompt": [{"role": "user", "content": f"{a} + {b} ="}],
                "chosen": [{"role": "assistant", "content": f"{steps} {a + b}".strip()}],
                "rejected": [{"role": "assistant", "content": str(a + b + draw.randrange(1, 9))}],
            }
            file.write(json.dumps(pair) + "\n")
    return str(path)


@pytest.fixture(scope="session")
def pairs33(tmp_path_factory):
    """33 rows: four full windows of 8, and a last one that leaves a second rank without a row."""
    return write_pairs(tmp_path_factory.mktemp("pairs") / "pairs33.jsonl", 33)


def start(script, out, options):
    """Run one of the programs beside this file to its end."""
    environment = {k: v for k, v in os.environ.items() if k not in RANK_VARIABLES}
    return subprocess.run(
        [sys.executable, HERE / script, out, json.dumps(options)],
        env={**environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        start_new_session=True,
    )


def results(script, out, options):
    """What each rank of such a run ended with."""
    done = start(script, out, options)
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = range(options["devices"])
    return [torch.load(f"{out}.{rank}", weights_only=True) for rank in ranks]


@pytest.fixture
def fit_ranks(tmp_path):
    """`fit.py` in processes of its own."""

    def run(data, *, devices=2, **options):
        out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        options = {"data": data, "devices": devices, "cache": str(tmp_path / "cache"), **options}
        return results("fit.py", out, options)

    return run


@pytest.fixture
def fit_grpo_ranks(tmp_path):
    """`fit_grpo.py` in processes of its own."""

    def run(policy, *, devices=2, **options):
        out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        return results("fit_grpo.py", out, {"policy": policy, "devices": devices, **options})

    return run
