"""Metrics are logged every few steps, and stand for all steps since they were."""

import csv

import pytest
from distributed.conftest import write_pairs
from distributed.fit import fit
from distributed.fit_grpo import fit as fit_grpo
from distributed.fit_grpo import save_random

# Of 13 rows a step of 8 pairs, then one of 5.
WEIGHTS = (8, 5)


def rows_of(folder):
    """What a CSV logger wrote of each step: numbers by name."""
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [{name: float(value) for name, value in row.items() if value} for row in rows]


def mean(rows, weights, name):
    pairs = list(zip(rows, weights, strict=True))
    return sum(row[name] * weight for row, weight in pairs) / sum(w for _, w in pairs)


@pytest.fixture(scope="module")
def pairs13(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("pairs") / "pairs13.jsonl", 13)


def test_pairs_are_averaged_over_the_steps_since_the_last_log(tmp_path, pairs13):
    options = {"loss": "simpo", "cache": tmp_path / "cache", "max_epochs": 4, "batch_size": 4}
    options |= {"accumulate": 2, "optimizer": "sgd"}
    each, some = tmp_path / "each", tmp_path / "some"
    fit(pairs13, log_dir=each, **options)
    metrics = fit(pairs13, log_dir=some, log_every=3, **options)["metrics"]
    every, found = rows_of(each), rows_of(some)
    assert [row["step"] for row in every] == list(range(8))
    # In the middle of an epoch or not.
    assert [row["step"] for row in found] == [2, 5]
    assert [row["epoch"] for row in found] == [1, 2]
    weights = WEIGHTS * 4
    for row, first, last in zip(found, (0, 3), (3, 6), strict=True):
        for part in ("loss", "rewards/margins", "logps/chosen", "rewards/accuracies"):
            name = f"train/{part}"
            whole = mean(every[first:last], weights[first:last], name)
            assert row[name] == pytest.approx(whole, rel=1e-5), name
        # A norm is that of the step itself.
        assert row["train/grad_norm"] == every[last - 1]["train/grad_norm"]
    assert metrics == {name: found[-1][name] for name in metrics}
    assert metrics.keys() == every[0].keys() - {"step", "epoch"}


def test_every_rollout_is_in_one_log(tmp_path):
    policy = save_random(tmp_path / "llama")
    options = {"prompts": 13, "prompts_per_step": 2, "optimizer": "sgd", "max_steps": 5}
    each, some = tmp_path / "each", tmp_path / "some"
    fit_grpo(policy, log_dir=each, **options)
    metrics = fit_grpo(policy, log_dir=some, log_every=3, **options)["metrics"]
    every, found = rows_of(each), rows_of(some)
    assert [row["step"] for row in found] == [2]
    # Callbacks are told of the last step, too.
    for row, steps in zip((*found, metrics), (every[:3], every[3:]), strict=True):
        for part in ("reward", "loss", "groups_trained"):
            name = f"train/{part}"
            whole = mean(steps, [1] * len(steps), name)
            assert row[name] == pytest.approx(whole, rel=1e-5, abs=1e-7), name
    assert len({row["train/reward"] for row in every}) > 1
