"""Steps cut by tokens, without Lightning: the same rows in each, and never too many tokens."""

import math
from itertools import chain, islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_align.data.loader import PairLoader, Replica
from lit_align.data.token_loader import StepCut, TokenPairLoader
from lit_align.errors import UserError
from lit_align.logprobs import Item, Ways, tokens_of

PADDED = Ways(packs=False, shares=False, chooses=False)
SHARED = Ways(packs=True, shares=True, chooses=True)


def collate(rows):
    return {"index": torch.tensor(rows)}


def length(row):
    """Of the prompt and of two answers: unequal, and no simple function of the row."""
    return (16 + 37 * row % 53, 1 + 13 * row % 29, 1 + 7 * row % 31)


def loader(rows=20, *, budget=400, step=6, ranks=1, rank=0, how=PADDED, **options):
    cut = StepCut([length(row) for row in range(rows)], how, budget, ranks)
    replica = Replica(rank, ranks)
    return TokenPairLoader(range(rows), collate, cut, batch_size=step, replica=replica, **options)


def real(batches):
    """Row numbers, fillers left out."""
    return [row for batch in batches for row in batch["index"][batch["pair_mask"]].tolist()]


def steps_of(per_rank, micro_batches):
    """The batches of all ranks, by optimizer step."""
    turns = list(zip(*per_rank, strict=True))
    return [
        list(chain(*turns[first : first + micro_batches]))
        for first in range(0, len(turns), micro_batches)
    ]


SIZES = {
    "rows": st.integers(1, 30),
    "step": st.integers(1, 7),
    "ranks": st.integers(1, 3),
    "budget": st.integers(1, 700),
    "how": st.sampled_from([PADDED, SHARED]),
}


@given(**SIZES, shuffle=st.booleans())
def test_a_step_has_the_rows_that_it_has_without_a_budget(rows, step, ranks, budget, how, shuffle):
    options = {"shuffle": shuffle, "seed": 3}
    made = [
        loader(rows, step=step, ranks=ranks, rank=rank, budget=budget, how=how, epochs=2, **options)
        for rank in range(ranks)
    ]
    plain = PairLoader(range(rows), collate, batch_size=step * ranks, **options)
    for _ in range(2):
        per_rank = [list(one) for one in made]
        assert {len(batches) for batches in per_rank} == {len(made[0])}
        found = steps_of(per_rank, made[0].micro_batches)
        expected = list(plain)
        assert [sorted(real(window)) for window in found] == [
            sorted(real([batch])) for batch in expected
        ]
        for window, batch in zip(found, expected, strict=True):
            assert {one["window_pairs"].item() for one in window} == {batch["window_pairs"].item()}


@given(**SIZES)
def test_no_micro_batch_runs_more_than_it_may_and_none_is_to_spare(rows, step, ranks, budget, how):
    made = [
        loader(rows, step=step, ranks=ranks, rank=rank, budget=budget, how=how)
        for rank in range(ranks)
    ]
    for batch in chain(*made):
        items = [Item(row, length(row)[0], length(row)[1:]) for row in batch["index"].tolist()]
        assert len(items) == 1 or tokens_of(items, how) <= budget
    # With one micro-batch less, some step would not do.
    fewer, cut = made[0].micro_batches - 1, made[0].cut
    order = made[0]._order(0)
    steps = [order[first : first + step * ranks] for first in range(0, rows, step * ranks)]
    assert max(map(cut.needs, steps)) == fewer + 1


@given(**SIZES)
def test_only_a_step_of_fewer_rows_than_parts_has_fillers(rows, step, ranks, budget, how):
    per_rank = [
        list(loader(rows, step=step, ranks=ranks, rank=rank, budget=budget, how=how))
        for rank in range(ranks)
    ]
    micro_batches = loader(rows, step=step, ranks=ranks, budget=budget, how=how).micro_batches
    for window in steps_of(per_rank, micro_batches):
        fillers = sum(not batch["pair_mask"].any() for batch in window)
        assert fillers == max(len(window) - len(real(window)), 0)
        assert all(len(batch["index"]) == 1 for batch in window if not batch["pair_mask"].any())


def test_the_longest_come_first_and_ranks_have_about_as_much():
    """Eight rows of a prompt of 20 and answers that tell them apart, packed, on two ranks."""
    answers = [5, 1, 8, 2, 7, 3, 6, 4]
    packed = Ways(packs=True, shares=True, chooses=False)
    cut = StepCut([(20, tokens, tokens) for tokens in answers], packed, 66, ranks=2)
    window = cut(range(8), 2)
    found = [[[answers[row] for row in share] for share in shares] for shares in window]
    assert found == [[[8, 7], [6, 5]], [[4, 3], [2, 1]]]
    assert cut.needs(range(8)) == 2
    assert cut.needs([0]) == 1


@given(**SIZES, limit=st.integers(1, 12), stop=st.integers(0, 25))
def test_resumed_from_any_point_equals_uninterrupted(rows, step, ranks, budget, how, limit, stop):
    def make():
        return loader(
            rows,
            step=step,
            ranks=ranks,
            rank=ranks - 1,
            budget=budget,
            how=how,
            limit_batches=limit,
            epochs=30,
        )

    def told(batches):
        return [{name: values.tolist() for name, values in batch.items()} for batch in batches]

    whole = told(chain.from_iterable(iter(made) for made in [make()] for _ in range(stop + 3)))
    first = make()
    seen = told(islice(chain.from_iterable(iter(lambda: iter(first), None)), stop))
    second = make()
    second.load_state_dict(first.state_dict())
    rest = told(chain(*(list(second) for _ in range(2))))
    assert seen + rest == whole[: stop + len(rest)]


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_and_whole_windows_change_nothing(workers):
    plain = [batch["index"].tolist() for batch in loader(shuffle=True)]
    made = list(loader(num_workers=workers, whole_window=True))
    assert [batch["index"].tolist() for batch in made] == plain
    size = loader().micro_batches
    assert size > 1
    for first in range(0, len(made), size):
        window = [batch["index"].tolist() for batch in made[first]["window"]]
        assert window == plain[first : first + size]


def test_a_limit_within_a_step_drops_the_rest_of_it():
    whole = list(loader())
    size = loader().micro_batches
    limited = list(loader(limit_batches=size + 1))
    assert [batch["index"].tolist() for batch in limited] == [
        batch["index"].tolist() for batch in whole[: size + 1]
    ]
    assert limited[-1]["window_pairs"].item() == len(real(limited[-1:]))


def test_the_micro_batches_are_those_of_the_worst_step_that_is_read():
    """Of twenty epochs some step needs more than any of the first."""
    one, twenty = loader(budget=300), loader(budget=300, epochs=20)
    assert one.micro_batches < twenty.micro_batches < loader(budget=300, epochs=1e9).micro_batches
    for _ in range(20):
        for batch in twenty:
            rows = batch["index"].tolist()
            assert len(rows) == 1 or sum(twenty.cut.tokens[row] for row in rows) <= 300


def test_a_run_without_end_is_ready_for_the_worst_step_of_all():
    endless = loader(epochs=math.inf)
    heaviest = sorted(range(20), key=lambda row: -endless.cut.tokens[row])[:6]
    assert endless.micro_batches == endless.cut.needs(heaviest) >= loader(epochs=20).micro_batches
    # In their order, all epochs have the same steps.
    assert loader(epochs=math.inf, shuffle=False).micro_batches == max(
        endless.cut.needs(range(first, min(first + 6, 20))) for first in range(0, 20, 6)
    )


def test_first_rows_are_those_that_a_run_reads():
    made = loader(epochs=3)
    size = made.micro_batches
    for batches in range(3 * len(made)):
        read = set(real(islice(chain.from_iterable(loader(epochs=3) for _ in [0]), batches)))
        found = loader(epochs=3).first_rows(batches, epochs=1)
        assert read <= set(found)
        if batches % size == 0 and batches <= len(made):
            assert sorted(read) == found


def test_a_resumed_run_takes_the_micro_batches_of_the_first():
    first = loader(budget=300, epochs=20)
    list(islice(first, first.micro_batches))
    again = loader(budget=400, epochs=20)
    fewer = again.micro_batches
    again.load_state_dict(first.state_dict())
    assert again.micro_batches == first.micro_batches > fewer
    expected = list(first)  # an epoch anew
    del expected[: first.micro_batches]
    assert len(list(again)) == len(expected)


@pytest.mark.parametrize("change", [{"budget": 200}, {"step": 5}])
def test_other_steps_are_refused(change):
    state = loader(epochs=2).state_dict()
    with pytest.raises(UserError, match=r"cannot resume with steps of .*data.max_tokens_per_batch"):
        loader(epochs=2, **change).load_state_dict(state)


def test_a_checkpoint_of_a_run_without_a_budget_is_refused_and_the_other_way_round():
    plain = PairLoader(range(20), collate, batch_size=6)
    with pytest.raises(UserError, match=r"repeat its data.max_tokens_per_batch"):
        plain.load_state_dict(loader().state_dict())
    with pytest.raises(UserError, match=r"in 3 micro-batches, where .* had 6 in 1"):
        loader().load_state_dict(plain.state_dict())
