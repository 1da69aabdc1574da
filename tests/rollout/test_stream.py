"""The order of the prompts."""

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_samples import Prompts

from lit_align.errors import UserError
from lit_align.rollout import PromptStream

COUNTS = st.lists(st.integers(1, 12), min_size=1, max_size=12)


@given(st.integers(1, 9), st.integers(-3, 3), st.booleans(), COUNTS)
def test_each_pass_draws_every_prompt_once(rows, seed, shuffle, counts):
    stream = PromptStream(Prompts(rows), seed=seed, shuffle=shuffle)
    draws = [stream.draw(count) for count in counts]
    drawn = list(chain(*draws))
    assert [one.group for one in drawn] == list(range(len(drawn)))
    assert [one.draw for one in drawn] == [one.group // rows for one in drawn]
    for start in range(0, len(drawn) - rows + 1, rows):
        assert sorted(one.prompt for one in drawn[start : start + rows]) == list(range(rows))


@given(st.integers(1, 9), COUNTS)
def test_a_draw_is_as_large_as_asked_for_or_ends_a_pass_and_is_never_empty(rows, counts):
    stream = PromptStream(Prompts(rows))
    for count in counts:
        drawn = stream.draw(count)
        assert 1 <= len(drawn) <= count
        assert len(drawn) == count or stream.drawn % rows == 0


@given(st.integers(1, 9), COUNTS, COUNTS)
def test_a_stream_goes_on_anywhere(rows, before, after):
    whole, again = (PromptStream(Prompts(rows), seed=5) for _ in range(2))
    for count in before:
        whole.draw(count)
    again.load_state_dict(whole.state_dict())
    assert [again.draw(count) for count in after] == [whole.draw(count) for count in after]


def passes(seed, rows=50, count=3, **options):
    stream = PromptStream(Prompts(rows), seed=seed, **options)
    return [tuple(one.prompt for one in stream.draw(rows)) for _ in range(count)]


def test_passes_and_seeds_have_orders_of_their_own():
    assert len({*passes(0, count=9), *passes(1, count=9)}) == 18
    assert passes(0) == passes(0)


def test_without_shuffling_prompts_come_as_they_stand():
    assert passes(0, rows=4, shuffle=False) == [(0, 1, 2, 3)] * 3


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (PromptStream(Prompts(5)), "rows=4 in the prompts, not 5"),
        (PromptStream(Prompts(4, "others")), "data=these in the prompts, not others"),
        (PromptStream(Prompts(4), seed=1), "seed=0 in the prompts, not 1"),
        (PromptStream(Prompts(4), shuffle=False), "shuffle=True in the prompts, not False"),
    ],
)
def test_other_prompts_or_another_order_are_refused(other, named):
    stream = PromptStream(Prompts(4))
    stream.draw(3)
    with pytest.raises(UserError, match=f"cannot resume.*{named}; resume with the same prompts"):
        other.load_state_dict(stream.state_dict())
    assert other.drawn == 0
