"""The order of the rows, without Lightning; `test_in_trainer.py` has the same with it."""

import random
from itertools import chain, islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_align.data.loader import PairLoader, Replica
from lit_align.errors import UserError


def collate(rows):
    return {"index": torch.tensor(rows)}


def loader(rows=10, *, batch_size=1, ranks=1, rank=0, **options):
    replica = Replica(rank, ranks)
    return PairLoader(range(rows), collate, batch_size=batch_size, replica=replica, **options)


def real(batches):
    """Row numbers, fillers left out."""
    return [row for batch in batches for row in batch["index"][batch["pair_mask"]].tolist()]


def epochs(count, make):
    """Batches of the first epochs."""
    made = make()
    return [list(made) for _ in range(count)]


def without_window(batch):
    """A batch as plain values."""
    return {name: value.tolist() for name, value in batch.items() if name != "window"}


SIZES = {
    "rows": st.integers(1, 40),
    "batch_size": st.integers(1, 5),
    "ranks": st.integers(1, 4),
}


@given(**SIZES, seed=st.integers(-5, 5), shuffle=st.booleans())
def test_every_row_once_an_epoch_over_all_ranks(rows, batch_size, ranks, seed, shuffle):
    sizes = {"batch_size": batch_size, "ranks": ranks, "seed": seed, "shuffle": shuffle}
    for epoch in range(2):
        per_rank = [list(loader(rows, **sizes, rank=rank, epoch=epoch)) for rank in range(ranks)]
        assert {len(batches) for batches in per_rank} == {len(loader(rows, **sizes))}
        assert sorted(real(chain(*per_rank))) == list(range(rows))
        assert all(len(batch["index"]) <= batch_size for batch in chain(*per_rank))


@given(**SIZES, accumulate=st.integers(1, 5), share=st.one_of(st.integers(1, 50), st.just(0.5)))
def test_windows_hold_what_their_batches_hold(rows, batch_size, ranks, accumulate, share):
    """Counted from outside: the real rows of all ranks between two optimizer steps."""
    sizes = {"batch_size": batch_size, "ranks": ranks}
    options = {"accumulate": accumulate, "limit_batches": share}
    per_rank = [list(loader(rows, **sizes, rank=rank, **options)) for rank in range(ranks)]
    batches = list(zip(*per_rank, strict=True))
    whole = -(-rows // (batch_size * ranks))
    assert len(batches) == (min(whole, share) if share != 0.5 else whole // 2)
    for start in range(0, len(batches), accumulate):
        window = list(chain(*batches[start : start + accumulate]))
        held = sum(int(batch["pair_mask"].sum()) for batch in window)
        assert {float(batch["window_pairs"]) for batch in window} == {held}


@given(**SIZES, accumulate=st.integers(1, 5), limit=st.integers(1, 50))
def test_the_first_batch_of_a_step_holds_all_of_it_if_asked(
    rows, batch_size, ranks, accumulate, limit
):
    sizes = {"batch_size": batch_size, "ranks": ranks, "accumulate": accumulate}
    sizes["limit_batches"] = limit
    told = list(loader(rows, **sizes, whole_window=lambda: True))
    plain = list(loader(rows, **sizes))
    assert [without_window(batch) for batch in told] == [without_window(batch) for batch in plain]
    for first in range(0, len(told), accumulate):
        step = told[first : first + accumulate]
        if len(step) * ranks == 1:
            assert "window" not in step[0]
        else:
            assert [without_window(b) for b in step[0]["window"]] == [
                without_window(b) for b in step
            ]
        assert not any("window" in batch for batch in step[1:])
    assert not any("window" in batch for batch in plain)


def test_a_step_that_is_read_at_once_is_not_done_before_its_last_batch():
    """Two batches to a step, three steps: what is saved counts what was handed over."""
    made = loader(6, accumulate=2, whole_window=True)
    seen = [made.state_dict()["rows_seen"] for _ in made]
    assert seen == [1, 2, 3, 4, 5, 0]
    made = loader(6, accumulate=2, whole_window=True)
    made.load_state_dict({**made.state_dict(), "rows_seen": 4})
    assert real(made) == real(loader(6))[4:]


@given(**SIZES, stop=st.integers(0, 30), limit=st.integers(1, 12))
def test_resumed_from_any_point_equals_uninterrupted(rows, batch_size, ranks, stop, limit):
    def make():
        return loader(
            rows, batch_size=batch_size, ranks=ranks, rank=ranks - 1, limit_batches=limit, seed=3
        )

    whole = list(chain(*epochs(2 + stop, make)))
    first = make()
    seen = list(islice(chain.from_iterable(iter(lambda: iter(first), None)), stop))
    second = make()
    second.load_state_dict(first.state_dict())
    rest = list(chain(*(list(second) for _ in range(2))))
    assert [batch["index"].tolist() for batch in seen + rest] == [
        batch["index"].tolist() for batch in whole[: stop + len(rest)]
    ]
    assert [float(batch["window_pairs"]) for batch in rest] == [
        float(batch["window_pairs"]) for batch in whole[stop : stop + len(rest)]
    ]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("stop", [0, 1, 3, 4, 6])
def test_workers_read_ahead_and_yet_resume_exactly(workers, stop):
    def make():
        return loader(7, batch_size=2, num_workers=workers, accumulate=3)

    whole = [
        batch["index"].tolist() for batch in chain(*epochs(3, lambda: loader(7, batch_size=2)))
    ]
    first = make()
    steps = chain(iter(first), iter(first))
    seen = [batch["index"].tolist() for batch in islice(steps, stop)]
    second = make()
    second.load_state_dict(first.state_dict())
    rest = [batch["index"].tolist() for batch in chain(iter(second), iter(second))]
    assert seen + rest == whole[: stop + len(rest)]
    assert len(rest) > 4


def test_epochs_differ_and_seeds_differ_and_both_repeat():
    orders = {
        (seed, epoch): tuple(real(loader(20, seed=seed, epoch=epoch)))
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(set(orders.values())) == 9
    again = [tuple(real(batches)) for batches in epochs(3, lambda: loader(20, seed=2))]
    assert again == [orders[2, epoch] for epoch in range(3)]


def test_the_order_does_not_depend_on_how_it_is_cut():
    order = real(loader(11, batch_size=1))
    assert real(loader(11, batch_size=4)) == order
    per_rank = [list(loader(11, batch_size=2, ranks=2, rank=rank)) for rank in range(2)]
    dealt = [[real([batch]) for batch in batches] for batches in per_rank]
    # Rows 0, 2 of each four go to rank 0 and 1, 3 to rank 1; of the last three, two and one.
    assert dealt[0] == [[order[0], order[2]], [order[4], order[6]], [order[8], order[10]]]
    assert dealt[1] == [[order[1], order[3]], [order[5], order[7]], [order[9]]]


def test_a_rank_without_a_row_gets_a_filler():
    first, second = (next(iter(loader(1, ranks=2, rank=rank))) for rank in range(2))
    assert first["index"].tolist() == second["index"].tolist() == [0]
    assert (first["pair_mask"].tolist(), second["pair_mask"].tolist()) == ([True], [False])
    assert first["window_pairs"] == second["window_pairs"] == 1
    assert first["window_pairs"].dtype == torch.float32


@pytest.mark.parametrize("workers", [0, 1])
def test_global_random_states_are_left_alone(workers):
    torch.manual_seed(1)
    random.seed(1)
    before = torch.get_rng_state(), random.getstate()
    list(loader(5, num_workers=workers))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_the_epoch_is_over_when_its_last_batch_is_handed_over():
    made = loader(3)
    batches = iter(made)
    positions = [(made.state_dict()["epoch"], made.state_dict()["rows_seen"])]
    for _ in range(3):
        next(batches)
        positions.append((made.state_dict()["epoch"], made.state_dict()["rows_seen"]))
    assert positions == [(0, 0), (0, 1), (0, 2), (1, 0)]


def test_iterating_anew_without_a_state_begins_the_epoch_anew():
    made = loader(5)
    list(islice(made, 2))
    assert real(made) == real(loader(5))


def test_asking_for_iterators_changes_nothing():
    """Lightning asks for some that it never uses, one of them before a resumed epoch."""
    made = loader(5)
    made.load_state_dict({**made.state_dict(), "rows_seen": 3})
    iter(made), iter(made)
    assert real(made) == real(loader(5))[3:]


def test_accumulation_is_asked_for_when_the_batch_is_due():
    accumulate = [2]
    batches = iter(loader(6, accumulate=lambda: accumulate[0]))
    assert next(batches)["window_pairs"] == 2
    accumulate[0] = 3
    assert next(batches)["window_pairs"] == 3


@given(rows=st.integers(2, 30), stop=st.integers(1, 29), data=st.data())
def test_another_number_of_ranks_goes_on_where_as_many_rows_are_read_at_once(rows, stop, data):
    ranks = data.draw(st.integers(1, 4))
    first = loader(rows, batch_size=ranks)
    seen = real(islice(first, min(stop, len(first) - 1)))
    others = [loader(rows, ranks=ranks, rank=rank) for rank in range(ranks)]
    for other in others:
        other.load_state_dict(first.state_dict())
    assert sorted(real(chain(*others))) == sorted(set(range(rows)) - set(seen))


@pytest.mark.parametrize(("at_once", "stop"), [(1, 2), (4, 2), (1, 6)])
def test_other_sizes_are_refused(at_once, stop):
    """Lightning goes on counting batches, and after an epoch of six it would want six more."""
    first = loader(12, batch_size=2)
    list(islice(first, stop))
    message = rf"cannot resume with {at_once} rows .* read 2: set data.batch_size"
    with pytest.raises(UserError, match=message):
        loader(12, batch_size=at_once).load_state_dict(first.state_dict())


@pytest.mark.parametrize("stop", [0, 6])
def test_more_rows_at_a_time_go_on_between_epochs(stop):
    first = loader(12, batch_size=2)
    list(islice(first, stop))
    again = loader(12, batch_size=2, ranks=2)
    again.load_state_dict(first.state_dict())
    assert (again.epoch, len(list(again))) == (stop // 6, 3)


@pytest.mark.parametrize(("stop", "accumulate"), [(1, 2), (3, 2), (2, 4)])
def test_half_a_step_is_refused(stop, accumulate):
    first = loader(12)
    list(islice(first, stop))
    again = loader(12, accumulate=accumulate)
    again.load_state_dict(first.state_dict())
    with pytest.raises(UserError, match=f"after {stop} .*accumulate_grad_batches={accumulate}"):
        next(iter(again))


def test_another_accumulation_goes_on_between_steps():
    first = loader(12)
    list(islice(first, 4))
    again = loader(12, accumulate=2)
    again.load_state_dict(first.state_dict())
    assert [float(batch["window_pairs"]) for batch in again] == [2.0] * 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 11}, "rows=10 in the data, not 11"),
        ({"seed": 1}, "seed=0 in the data, not 1"),
        ({"shuffle": False}, "shuffle=1 in the data, not 0"),
    ],
)
def test_another_data_set_or_order_is_refused(change, message):
    state = loader().state_dict()
    with pytest.raises(UserError, match=f"cannot resume.*{message}"):
        loader(**change).load_state_dict(state)


def test_the_state_is_plain_and_equal_on_all_ranks():
    states = []
    for rank in range(2):
        made = loader(10, ranks=2, rank=rank)
        list(islice(made, 3))
        states.append(made.state_dict())
    assert states[0] == states[1]
    assert states[0]["rows_seen"] == 6
    assert all(type(value) is int for value in states[0].values())


@settings(max_examples=20)
@given(st.integers(1, 10), st.integers(1, 12), st.integers(1, 12))
def test_a_shorter_limit_on_resume_ends_the_epoch(rows, before, after):
    first = loader(rows, limit_batches=before)
    list(islice(first, min(before, rows)))
    second = loader(rows, limit_batches=after)
    second.load_state_dict(first.state_dict())
    assert len(real(second)) > 0


@given(**SIZES, batches=st.integers(0, 60), limit=st.one_of(st.integers(1, 9), st.just(1.0)))
def test_first_rows_are_those_that_a_run_reads(rows, batch_size, ranks, batches, limit):
    """Read for real, epoch after epoch, until so many micro-batches are done."""
    options = {"batch_size": batch_size, "ranks": ranks, "seed": 1, "limit_batches": limit}
    read = set()
    for rank in range(ranks):
        made = loader(rows, **options, rank=rank)
        endless = (batch for _ in range(60) for batch in made)
        read.update(real(islice(endless, batches)))
    assert loader(rows, **options).first_rows(batches) == sorted(read)


def test_first_rows_end_with_the_last_epoch_and_never_run_for_ever():
    assert len(loader(10, limit_batches=2).first_rows(float("inf"), epochs=1)) == 2
    assert loader(10).first_rows(float("inf")) == list(range(10))
    assert loader(10, shuffle=False, limit_batches=3).first_rows(float("inf")) == [0, 1, 2]
