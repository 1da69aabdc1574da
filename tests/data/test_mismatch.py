"""Which completion of another prompt stands beside a row."""

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_align.data.mismatch import mismatched_rows
from lit_align.errors import UserError

ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=2, max_size=12)


def partners(prompts, completions, order=None):
    return mismatched_rows(prompts, completions, order or range(len(prompts)))


def test_in_order_it_is_that_of_the_next_row():
    for rows in (2, 3, 5):
        assert partners(range(rows), range(rows)) == [*range(1, rows), 0]


def test_it_follows_the_order_given():
    # 2 comes before 0, 0 before 1, and 1 before 2 again.
    assert partners("abc", "xyz", [2, 0, 1]) == [1, 2, 0]


def test_by_hand_where_rows_share_prompts_and_completions():
    # Row 0: 1 has its prompt, 2 its completion. Row 4: 0 and 1 have its prompt, 2 its completion.
    assert partners("aabca", "xyxzx") == [3, 2, 3, 4, 3]
    # Nobody has another completion than row 0: the next other prompt has to do.
    assert partners("aab", "xxx") == [2, 2, 0]


@given(ROWS, st.randoms())
def test_it_is_of_another_prompt_and_another_completion_if_there_is_one(rows, draw):
    prompts, completions = zip(*rows, strict=True)
    order = draw.sample(range(len(rows)), len(rows))
    if len(set(prompts)) == 1:
        with pytest.raises(UserError, match=f"all {len(rows)} rows have the same prompt"):
            partners(prompts, completions, order)
        return
    found = partners(prompts, completions, order)
    for row, other in enumerate(found):
        assert prompts[other] != prompts[row]
        places = [order[(order.index(row) + n) % len(rows)] for n in range(1, len(rows))]
        good = [r for r in places if prompts[r] != prompts[row]]
        better = [r for r in good if completions[r] != completions[row]]
        assert other == (better or good)[0]


@pytest.mark.parametrize("rows", [0, 1, 4])
def test_one_prompt_is_refused(rows):
    if not rows:
        assert partners([], []) == []
        return
    with pytest.raises(UserError, match=r"at least two different.*such as bco"):
        partners([7] * rows, range(rows))


def test_many_rows_take_no_longer_than_their_number():
    """Not even if nearly all have one prompt, and nearly all others one completion."""
    rows = 60_000
    draw = random.Random(0)
    prompts = [0 if draw.random() < 0.5 else n for n in range(rows)]
    completions = [n if prompt == 0 and n > 9 else -1 for n, prompt in enumerate(prompts)]
    start = time.monotonic()
    partners(prompts, completions)
    assert time.monotonic() - start < 20
