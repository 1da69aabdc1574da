"""The search for the completions to blame: whom it finds, and when it gives up."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_align.rewards.calls import Failed
from lit_align.rewards.halving import halved


def search(call, count, timeout=100.0, ready=lambda: None):
    """Marks, and the size of each part whose failure was noted."""
    noted = []
    marks = halved(call, count, timeout, ready=ready, note=lambda _, size: noted.append(size))
    return marks, noted


@given(st.lists(st.booleans(), min_size=1, max_size=70))
def test_just_the_bad_ones_have_no_score(bad):
    def call(part, seconds):
        return Failed("raised") if any(bad[i] for i in part) else [float(i) for i in part]

    marks, _ = search(call, len(bad))
    assert marks == [
        "was not reached in time" if is_bad else float(i) for i, is_bad in enumerate(bad)
    ]


def test_a_part_has_its_share_of_the_time_and_an_eighth_at_least():
    allowed = {}

    def call(part, seconds):
        allowed[len(part)] = seconds
        return Failed("raised") if 5 in part else [1.0] * len(part)

    search(call, 64, timeout=8.0)
    assert allowed == pytest.approx({64: 8, 32: 4, 16: 2, 8: 1, 4: 1, 2: 1, 1: 1})


def test_the_search_ends_after_four_timeouts_in_all():
    def call(part, seconds):
        time.sleep(seconds)
        return Failed("took longer")

    start = time.monotonic()
    marks, noted = search(call, 64, timeout=0.2)
    assert 0.8 <= time.monotonic() - start < 1.3
    # By hand: 1 + 2/2 + 4/4 + 8/8 timeouts.
    assert noted == [64, 32, 32, *[16] * 4, *[8] * 8]
    assert all(isinstance(mark, str) for mark in marks)


def test_starting_is_bounded_apart_from_calling(monkeypatch):
    monkeypatch.setattr("lit_align.rewards.halving.STARTING_SECONDS", 0.3)
    begun = []

    def ready():
        begun.append(time.monotonic())
        time.sleep(0.1)

    search(lambda part, seconds: Failed("ended its process"), 64, timeout=0.1, ready=ready)
    # More than four timeouts passed, none of them in a call.
    assert len(begun) == 3


def test_what_cannot_be_one_is_not_searched():
    def call(part, seconds):
        return Failed("wrong length", may_be_one=False) if len(part) > 1 else [1.0]

    marks, noted = search(call, 8)
    assert noted == [8]
    assert 1.0 not in marks


def test_complaints_about_single_scores_stand():
    marks, noted = search(lambda part, seconds: [1.0, "gave the score inf", None], 3)
    assert marks == [1.0, "gave the score inf", None]
    assert noted == [3]
