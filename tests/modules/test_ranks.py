"""How work is shared."""

from types import SimpleNamespace

import lightning as L
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_align.modules.ranks import from_all_ranks, replica, turns


def ranks(replicas):
    return [
        SimpleNamespace(distributed_sampler_kwargs={"rank": rank, "num_replicas": replicas})
        for rank in range(replicas)
    ]


@given(st.integers(1, 6), st.integers(0, 20))
def test_every_batch_counts_once_and_all_ranks_take_as_many_turns(replicas, batches):
    taken = [list(turns(rank, range(batches))) for rank in ranks(replicas)]
    assert sorted(batch for turn in taken for batch, counts in turn if counts) == [*range(batches)]
    assert len({len(turn) for turn in taken}) == 1


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_the_batches_of_a_round_are_neighbours(replicas):
    first, *_ = zip(*(turns(rank, range(7)) for rank in ranks(replicas)), strict=True)
    assert [batch for batch, _ in first] == [*range(replicas)]


def test_one_process_is_the_only_replica():
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    assert replica(trainer) == (0, 1)
    assert from_all_ranks(trainer, "mine") == ["mine"]
