"""Two gloo processes give what one process gives."""

import pytest
import torch
from distributed.fit import fit

from lit_align.policies import PolicyRecipe

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def relative_difference(weights, others):
    assert weights.keys() == others.keys()
    flat, other = (torch.cat([w.flatten() for w in each.values()]) for each in (weights, others))
    return float((flat - other).norm() / flat.norm())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("loss", ["dpo", "simpo"])
def test_two_ranks_train_the_weights_of_one(pairs33, fit_ranks, tmp_path, strategy, loss):
    """Five optimizer steps; the last window has one row, so one rank runs on a filler."""
    alone = fit(pairs33, cache=tmp_path / "alone", batch_size=8, max_steps=5, loss=loss)
    ranks = fit_ranks(pairs33, strategy=strategy, batch_size=4, max_steps=5, loss=loss)
    start = {name: p.detach() for name, p in PolicyRecipe().model().named_parameters()}
    assert relative_difference(alone["weights"], start) > 1e-4
    for rank in ranks:
        assert relative_difference(alone["weights"], rank["weights"]) < 5e-6


def test_ranks_read_every_row_once(pairs33, fit_ranks):
    ranks = fit_ranks(pairs33, strategy="ddp", batch_size=4, max_epochs=1)
    rows = [row for rank in ranks for batch in rank["rows"] for row in batch]
    assert sorted(rows) == list(range(33))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_resume_under_two_ranks_is_bit_identical(pairs33, fit_ranks, tmp_path, strategy):
    options = {"strategy": strategy, "batch_size": 2, "accumulate": 2, "max_epochs": 2}
    saved = str(tmp_path / "checkpoints")
    whole = fit_ranks(pairs33, checkpoint_dir=saved, checkpoint_every=3, **options)
    resumed = fit_ranks(pairs33, ckpt_path=f"{saved}/step=3.ckpt", **options)
    for before, after in zip(whole, resumed, strict=True):
        assert before["rows"][6:] == after["rows"]
        for name, weight in before["weights"].items():
            assert torch.equal(weight, after["weights"][name]), name
