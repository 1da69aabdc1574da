"""What a batch is said to run is what it runs, and no batch runs more than it may."""

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_align.logprobs import Item, Ways, balance, fill, ways
from lit_align.logprobs.budget import Load
from lit_align.logprobs.layouts import packed_batch

ITEMS = st.lists(
    st.builds(
        Item,
        st.integers(0, 4),
        st.integers(0, 40),
        st.lists(st.integers(1, 30), min_size=1, max_size=3).map(tuple),
    ).map(lambda item: item._replace(prompt_tokens=item.prompt_tokens + item.prompt)),
    min_size=1,
    max_size=12,
)
WAYS = st.builds(Ways, st.booleans(), st.booleans(), st.booleans()).filter(
    lambda ways: ways.packs or not ways.shares
)


def batch_of(items):
    """Token ids of items: prompts are equal where they are said to be, no two answers begin so."""
    rows, first = [], 50
    for item in items:
        for tokens in item.responses:
            prompt = [10 + item.prompt] * item.prompt_tokens
            rows.append((prompt, [first, *[1] * (tokens - 1)]))
            first += 1
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, (prompt, answer) in enumerate(rows):
        length = len(prompt) + len(answer)
        ids[row, :length] = torch.tensor([*prompt, *answer])
        mask[row, :length] = 1
        labels[row, len(prompt) : length] = torch.tensor(answer)
    return ids, mask, labels


@pytest.mark.parametrize("layout", ["auto", "padded", "packed", "shared"])
@pytest.mark.parametrize(
    "items",
    [
        [Item(0, 20, (7, 9))],
        [Item(0, 20, (7, 9)), Item(1, 30, (5, 5))],
        [Item(0, 20, (7,)), Item(1, 30, (5, 6, 7)), Item(0, 20, (12,))],
        # A prompt too short to be worth sharing, and rows so alike that padding is as cheap.
        [Item(0, 8, (7, 7)), Item(1, 8, (7, 7))],
        [Item(0, 3, (2, 30))],
        [Item(0, 17, (1, 1, 1))],
    ],
    ids=str,
)
def test_a_load_counts_the_tokens_that_the_model_runs(build, layout, items):
    model = build("llama").train()
    load = Load(ways(model, layout))
    for item in items:
        load.add(item)
    ids, mask, labels = batch_of(items)
    packed = packed_batch(model, layout, ids, mask, labels)
    assert load.tokens == (ids if packed is None else packed.input_ids).numel()


def test_ways_are_those_of_the_model_at_the_moment(build):
    model = build("llama", attention_dropout=0.1)
    assert ways(model.train(), "auto") == Ways(packs=True, shares=False, chooses=True)
    assert ways(model.eval(), "shared") == Ways(packs=True, shares=True, chooses=False)
    assert ways(model, "packed") == Ways(packs=True, shares=False, chooses=False)
    assert ways(model, "padded") == Ways(packs=False, shares=False, chooses=False)
    assert not ways(build("gpt2", reorder_and_upcast_attn=True), "padded").packs


def loads(items, batches, how):
    """Tokens and rows of each batch."""
    for places in batches:
        load = Load(how)
        for place in places:
            load.add(items[place])
        yield load.tokens, load.rows


@given(ITEMS, WAYS, st.integers(1, 200), st.one_of(st.none(), st.integers(1, 6)))
def test_no_batch_is_too_large_but_for_a_single_item(items, how, most_tokens, most_rows):
    batches = fill(items, how, most_tokens, most_rows)
    assert [place for places in batches for place in places] == list(range(len(items)))
    for places, (tokens, rows) in zip(batches, loads(items, batches, how), strict=True):
        fits = tokens <= most_tokens and (most_rows is None or rows <= most_rows)
        assert fits or len(places) == 1
    # The first of each batch had no room in the one before.
    for before, after in pairwise(batches):
        [(tokens, rows)] = loads(items, [range(before.start, after.start + 1)], how)
        assert tokens > most_tokens or (most_rows is not None and rows > most_rows)


def test_a_batch_is_filled_to_the_last_token():
    """Packed, (20, 7) runs 26 tokens: 26, 52, and 78 only where 78 are allowed."""
    items = [Item(n, 20, (7,)) for n in range(6)]
    packed = Ways(packs=True, shares=False, chooses=False)
    assert fill(items, packed, 78) == [range(3), range(3, 6)]
    assert fill(items, packed, 77) == [range(2), range(2, 4), range(4, 6)]
    # One prompt: 20 + 6 for the first, 6 for each other.
    alike = [Item(0, 20, (7,)) for _ in range(6)]
    assert fill(alike, packed._replace(shares=True), 56) == [range(6)]
    assert fill(alike, packed._replace(shares=True), 55) == [range(5), range(5, 6)]
    assert fill(alike, Ways(packs=False, shares=False, chooses=False), 81) == [
        range(3),
        range(3, 6),
    ]


def test_nothing_makes_no_batch():
    assert fill([], Ways(packs=True, shares=True, chooses=True), 10) == []


def every_cut(items, batches):
    """All ways to cut neighbours into at most so many batches."""
    for count in range(min(batches, len(items))):
        for ends in combinations(range(1, len(items)), count):
            yield [range(a, b) for a, b in pairwise([0, *ends, len(items)])]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30)), min_size=1, max_size=7),
    WAYS.map(lambda how: how._replace(chooses=False)),
    st.integers(1, 8),
)
def test_no_other_cut_has_a_smaller_largest_batch(rows, how, batches):
    items = [Item(prompt, 20, (tokens,)) for prompt, tokens in rows]
    found = balance(items, how, batches)
    assert [place for places in found for place in places] == list(range(len(items)))
    assert len(found) == min(batches, len(items))
    largest = max(tokens for tokens, _ in loads(items, found, how))
    others = [max(t for t, _ in loads(items, cut, how)) for cut in every_cut(items, batches)]
    assert largest == min(others)


@given(ITEMS, WAYS, st.integers(1, 5), st.integers(3, 6))
def test_a_balance_keeps_to_the_number_of_responses(items, how, batches, most_rows):
    batches = max(batches, len(fill(items, how, 10**9, most_rows)))
    found = balance(items, how, batches, most_rows)
    assert len(found) <= batches
    assert all(rows <= most_rows for _, rows in loads(items, found, how))


def test_no_batch_stays_empty_while_another_has_several_items():
    """Seven of 10 tokens: 20 suffice for four batches, and no less would do for five."""
    padded = Ways(packs=False, shares=False, chooses=False)
    items = [Item(n, 0, (10,)) for n in range(7)]
    assert [len(places) for places in balance(items, padded, 5)] == [1, 1, 2, 2, 1]
    # One that is larger than all others together keeps none of them company.
    items[0] = Item(0, 0, (100,))
    assert [len(places) for places in balance(items, padded, 4)] == [1, 2, 2, 2]
