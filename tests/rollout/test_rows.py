"""What a rollout is made of, and how a checkpoint keeps it."""

import io
import math
from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_samples import sample

from lit_align.rollout import Rollout, Sample, grouped
from lit_align.rollout.rows import PER_TOKEN, known

IDS = st.lists(st.integers(0, 2**31), max_size=4)
# Of all magnitudes: what float32 would round shows.
LOGPROB = st.floats(-1e6, 0) | st.sampled_from([-0.0, -1e-310, -0.1])
NOT_KEPT = {"prompt", "completion", "rewards"}


@st.composite
def samples(draw):
    """All with the same kinds of log-probs, one for each token of their completions."""
    kinds = draw(st.sets(st.sampled_from(PER_TOKEN)))
    made = []
    for number, ids in enumerate(draw(st.lists(IDS, min_size=1, max_size=5))):
        one = sample(
            draw(st.integers(0, 2**40)),
            number,
            prompt=draw(IDS),
            completion=ids,
            row=draw(st.integers(0, 2**40)),
            finish_reason=draw(st.sampled_from(["stop", "length"])),
            is_trained=draw(st.booleans()),
            reward=draw(st.floats(allow_infinity=False)),
            advantage=draw(st.floats(-1e9, 1e9)),
        )
        for kind in kinds:
            logprobs = draw(st.lists(LOGPROB, min_size=len(ids), max_size=len(ids)))
            setattr(one, kind, logprobs)
        made.append(one)
    return made


def told(one):
    """Every field as text that tells floats apart to the last bit, the sign of zero included."""
    return {f.name: repr(getattr(one, f.name)) for f in fields(Sample) if f.name not in NOT_KEPT}


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@given(samples())
def test_what_training_needs_comes_back_to_the_bit(made):
    again = Rollout.from_state(through_a_file(Rollout(3, 14, made).state_dict()))
    assert (again.number, again.version) == (3, 14)
    assert [told(one) for one in again.samples] == [told(one) for one in made]


def test_texts_metrics_and_what_was_left_out_do_not_come_back():
    one = sample(0, prompt=[1], reward=1.0)
    one.prompt, one.completion, one.rewards = "1+1=", "2", {"exact": 1.0}
    rollout = Rollout(0, 0, [one], {"reward": 1.0}, [sample(1)])
    again = Rollout.from_state(rollout.state_dict())
    assert again.samples == [sample(0, prompt=[1], reward=1.0)]
    assert (again.metrics, again.left_out) == ({}, [])


def test_log_probs_that_some_lack_are_none():
    """As a recording may have them; half of them are no use to anyone."""
    both = {"sampler_logprobs": [-1.0], "old_logprobs": [-2.0]}
    made = [sample(0, 0, **both), sample(0, 1, **{**both, "sampler_logprobs": None})]
    assert known(made) == ["old_logprobs"]
    again = Rollout.from_state(Rollout(0, 0, made).state_dict())
    assert [one.sampler_logprobs for one in again.samples] == [None, None]
    assert [one.old_logprobs for one in again.samples] == [[-2.0], [-2.0]]


def test_a_state_is_written_once_however_many_parts_of_a_checkpoint_hold_it():
    rollout = Rollout(0, 0, [sample(0, completion=range(100_000))])
    alone, twice = io.BytesIO(), io.BytesIO()
    torch.save([rollout.state_dict()], alone)
    torch.save([rollout.state_dict(), rollout.state_dict()], twice)
    assert twice.tell() < 1.01 * alone.tell()


def test_groups_are_told_by_their_numbers_and_not_by_what_they_say():
    made = [sample(7, 0), sample(7, 1), sample(3, 0), sample(7, 2)]
    assert [[one.number for one in group] for group in grouped(made)] == [[0, 1], [0], [2]]
    assert Rollout(0, 0, made[:3]).groups() == [made[:2], made[2:3]]


@pytest.mark.parametrize(("is_trained", "tokens"), [(True, 3), (False, 0)])
def test_a_sample_counts_its_tokens(is_trained, tokens):
    one = sample(0, prompt=[1, 2], completion=[3, 4, 5], is_trained=is_trained)
    assert (one.trained_tokens, one.length) == (tokens, 5)


def test_a_sample_has_no_reward_until_it_is_given_one():
    assert math.isnan(sample(0).reward)
