import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_align.logprobs.attention import Segment
from lit_align.logprobs.packing import Prefix, no_prefixes, pack, packable_rows, shared_prefixes

CPU = torch.device("cpu")


def batch_of(*rows):
    """Ids, attention mask and labels of rows (prompt, response), padded right and left by turns."""
    width = max(len(prompt) + len(response) for prompt, response in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, (prompt, response) in enumerate(rows):
        length = len(prompt) + len(response)
        start = (width - length) * (row % 2)
        ids[row, start : start + length] = torch.tensor([*prompt, *response])
        mask[row, start : start + length] = 1
        labels[row, start + len(prompt) : start + length] = torch.tensor(response)
    return ids, mask, labels


def packed_rows(*rows, smallest=None):
    found = packable_rows(*batch_of(*rows))
    prefixes = no_prefixes(found) if smallest is None else shared_prefixes(found, smallest)
    return pack(found, prefixes, CPU)


def test_rows_stand_one_after_another_without_padding_and_last_tokens():
    # [1 2 3 4] predicts 3 from 2 and 4 from 3; the 4 itself predicts nothing.
    found = packed_rows(([1, 2], [3, 4]), ([5], [6]))
    assert found.input_ids.tolist() == [[1, 2, 3, 5]]
    assert found.position_ids.tolist() == [[0, 1, 2, 0]]
    assert list(found.segments) == [Segment(0, 3), Segment(3, 4, 3, 3)]
    assert found.sources.tolist() == [1, 2, 3]


def test_a_shared_prompt_is_run_once_and_positions_go_on_behind_it():
    found = packed_rows(([1, 2], [3, 4]), ([1, 2], [5, 6, 7]), smallest=2)
    assert found.input_ids.tolist() == [[1, 2, 3, 5, 6]]
    assert found.position_ids.tolist() == [[0, 1, 2, 2, 3]]
    assert list(found.segments) == [Segment(0, 3, 0, 0), Segment(3, 5, 0, 2)]
    # 3 and 5 are both predicted by the last token of the prompt.
    assert found.sources.tolist() == [1, 2, 1, 3, 4]


def test_responses_that_begin_alike_share_their_beginnings_too():
    rows = packable_rows(*batch_of(([1, 2], [3, 4, 5]), ([1, 2], [3, 9, 8]), ([1], [2, 3, 4])))
    # The third has another prompt: its response begins elsewhere.
    assert shared_prefixes(rows, 2) == [Prefix(0, 0), Prefix(0, 3), Prefix(2, 0)]


def test_the_same_row_twice_adds_nothing_to_run():
    found = packed_rows(([1, 2], [3, 4]), ([1, 2], [3, 4]), smallest=2)
    assert found.input_ids.tolist() == [[1, 2, 3]]
    assert found.sources.tolist() == [1, 2, 1, 2]


def test_a_prompt_shorter_than_asked_for_is_run_again():
    found = packed_rows(([1, 2], [3, 4]), ([1, 2], [5, 6]), smallest=3)
    assert found.input_ids.tolist() == [[1, 2, 3, 1, 2, 5]]


def test_rows_without_a_response_are_left_out():
    found = packed_rows(([7, 8, 9], []), ([1], [2]), ([7, 8], []), smallest=1)
    assert found.input_ids.tolist() == [[1]]
    assert found.sources.tolist() == [0]


def test_a_batch_without_responses_still_runs_one_token():
    found = packed_rows(([7, 8], []), ([1], []))
    assert found.input_ids.tolist() == [[7]]
    assert found.sources.tolist() == []


def test_what_stands_behind_the_last_scored_token_is_not_run():
    ids, mask, labels = batch_of(([1, 2], [3, 4, 5]))
    labels[0, 3:] = -100
    rows = packable_rows(ids, mask, labels)
    assert pack(rows, no_prefixes(rows), CPU).input_ids.tolist() == [[1, 2]]


def test_holes_in_a_row_are_closed():
    ids, mask, labels = batch_of(([1, 2, 3], [4, 5]))
    mask[0, 1] = 0
    rows = packable_rows(ids, mask, labels)
    found = pack(rows, no_prefixes(rows), CPU)
    assert found.input_ids.tolist() == [[1, 3, 4]]
    assert found.sources.tolist() == [1, 2]


@pytest.mark.parametrize("column", [1, 2], ids=["predicted by padding", "padding itself"])
def test_padding_that_is_scored_cannot_be_packed(column):
    ids, mask, labels = batch_of(([1, 2], [3, 4]))
    mask[0, 1] = 0
    labels[0, column] = 3
    assert packable_rows(ids, mask, labels) is None


ROWS = st.lists(
    st.tuples(
        st.lists(st.integers(1, 2), min_size=1, max_size=4), st.lists(st.integers(1, 2), max_size=4)
    ),
    min_size=1,
    max_size=6,
)


@given(rows=ROWS, smallest=st.integers(1, 4))
def test_along_its_segments_each_prediction_sees_exactly_its_own_row(rows, smallest):
    found = packed_rows(*rows, smallest=smallest)
    ids, positions = found.input_ids[0], found.position_ids[0]
    contexts = []
    for source in found.sources.tolist():
        (segment,) = (s for s in found.segments if s.start <= source < s.stop)
        seen = [
            *range(segment.prefix_start, segment.prefix_stop),
            *range(segment.start, source + 1),
        ]
        contexts.append((ids[seen].tolist(), positions[seen].tolist()))
    right = [
        ([*prompt, *response[:n]], [*range(len(prompt) + n)])
        for prompt, response in rows
        for n in range(len(response))
    ]
    assert contexts == right
