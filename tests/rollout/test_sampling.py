import math

import pytest
import torch
from frequencies import agree
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from lit_align.rollout import Sampling
from lit_align.rollout.sampling import (
    BLOCK,
    cut_at_stop,
    inverse_cdf,
    token_sampler,
    uniforms_of,
)

NEARLY_1 = 1 - 2**-53  # the largest number that a generator gives


def drawn(probs, uniforms):
    uniforms = torch.tensor(uniforms, dtype=torch.float64)
    return inverse_cdf(torch.tensor(probs).expand(len(uniforms), -1), uniforms).tolist()


def test_each_token_owns_its_share_of_the_numbers_below_1():
    # Cumulative: 0.25, 0.75, 1; a number on a border belongs to the token that begins there.
    numbers = [0.0, 0.2499, 0.25, 0.7499, 0.75, NEARLY_1]
    assert drawn([0.25, 0.5, 0.25], numbers) == [0, 0, 1, 1, 2, 2]


def test_a_token_of_probability_0_is_never_drawn():
    # At the beginning, in the middle and at the end, at the borders where it could slip in.
    numbers = [0.0, 0.4999, 0.5, NEARLY_1]
    assert drawn([0.0, 0.5, 0.0, 0.0, 0.5, 0.0], numbers) == [1, 1, 4, 4]


def test_a_token_rarer_than_float32_can_add_is_drawn_all_the_same():
    assert drawn([1.0, 1e-9], [0.5, NEARLY_1]) == [0, 1]


@pytest.mark.parametrize("vocabulary", [BLOCK, BLOCK + 1, 3 * BLOCK - 1, 3 * BLOCK])
def test_a_token_of_any_block_is_drawn_by_its_own_share(vocabulary):
    # Every third token is as likely as any other third one, the rest impossible.
    probs = torch.zeros(vocabulary)
    probs[1::3] = 0.25
    possible = list(range(1, vocabulary, 3))
    numbers = [(n + 0.5) / len(possible) for n in range(len(possible))]
    assert drawn(probs.tolist(), numbers) == possible


@given(
    st.lists(st.floats(0, 1, width=32), min_size=1, max_size=40).filter(lambda p: sum(p) > 0),
    st.floats(0, NEARLY_1),
)
def test_what_is_drawn_is_possible_and_lies_where_the_number_says(weights, number):
    [token] = drawn(weights, [number])
    assert weights[token] > 0
    total = math.fsum(weights)
    below, above = math.fsum(weights[:token]), math.fsum(weights[: token + 1])
    assert below - 1e-9 * total <= number * total <= above + 1e-9 * total


def test_the_numbers_of_a_completion_are_its_seeds_and_begin_alike_however_many_are_drawn():
    state = torch.get_rng_state()
    many = uniforms_of(5, 100)
    for count in (1, 3, 17):
        assert_close(uniforms_of(5, count), many[:count], rtol=0, atol=0)
    assert not torch.equal(uniforms_of(6, 100), many)
    assert (many >= 0).all()
    assert (many < 1).all()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_the_tempered_softmax_says(temperature):
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, 0.5])
    draws = 20_000
    sample = token_sampler(Sampling(temperature=temperature))
    uniforms = torch.cat([uniforms_of(seed, 1) for seed in range(draws)])
    ids = sample(logits.expand(draws, -1), uniforms).ids
    counts = ids.bincount(minlength=5).double()
    weights = [math.exp(logit / temperature) for logit in logits.tolist()]
    probs = torch.tensor([weight / sum(weights) for weight in weights], dtype=torch.float64)
    assert agree(counts, probs)
    # The same counts are far from another temperature's.
    other = (logits / (1.3 * temperature)).double().softmax(-1)
    assert not agree(counts, other)


# Probabilities 0.4, 0.3, 0.2, 0.07, 0.03, not in this order.
SPREAD = torch.tensor([0.07, 0.4, 0.03, 0.3, 0.2])
KEPT = {
    "top_k": (2, [1, 3]),
    # 0.4 + 0.3 is short of 0.75: the third likeliest completes it.
    "top_p": (0.75, [1, 3, 4]),
    # At least 0.15 * 0.4 = 0.06.
    "min_p": (0.15, [0, 1, 3, 4]),
}


@pytest.mark.parametrize("option", KEPT)
def test_what_is_cut_off_never_comes_and_the_rest_keeps_its_proportions(option):
    value, kept = KEPT[option]
    draws = 20_000
    sample = token_sampler(Sampling(**{option: value}))
    uniforms = torch.cat([uniforms_of(seed, 1) for seed in range(draws)])
    ids = sample(SPREAD.log().expand(draws, -1), uniforms).ids
    counts = ids.bincount(minlength=5).double()
    assert counts.nonzero().squeeze(-1).tolist() == kept
    probs = (SPREAD[kept] / SPREAD[kept].sum()).double()
    assert agree(counts[kept], probs)


def test_a_cut_changes_what_is_drawn_and_not_what_its_log_prob_is():
    """Both over the whole vocabulary, as the trainer has them."""
    uniforms = torch.tensor([0.1, 0.9], dtype=torch.float64)
    ids, logprobs = token_sampler(Sampling(top_k=1))(SPREAD.log().expand(2, -1), uniforms)
    assert ids.tolist() == [1, 1]
    assert_close(logprobs, torch.full((2,), math.log(0.4)))


def test_a_log_prob_is_that_of_the_tempered_distribution():
    # softmax([2, 0] / 0.5) = 1 / (1 + e^-4) for the first: log is -log(1 + e^-4)
    logits = torch.tensor([[2.0, 0.0]])
    half = token_sampler(Sampling(temperature=0.5))
    ids, logprobs = half(logits, torch.zeros(1, dtype=torch.float64))
    assert ids.item() == 0
    assert logprobs.item() == pytest.approx(-math.log1p(math.exp(-4)), abs=1e-7)


def test_greedy_takes_the_likeliest_token_and_its_log_prob_at_temperature_1():
    logits = torch.tensor([[0.0, 2.0], [1.0, 0.0]])
    uniforms = torch.full((2,), NEARLY_1, dtype=torch.float64)
    ids, logprobs = token_sampler(Sampling(temperature=0))(logits, uniforms)
    assert ids.tolist() == [1, 0]
    expected = torch.tensor([-math.log1p(math.exp(-2)), -math.log1p(math.exp(-1))])
    assert_close(logprobs, expected)


def test_low_precision_logits_are_sampled_as_the_same_numbers_in_float32():
    logits = torch.linspace(-3, 3, 1000).bfloat16().expand(100, -1)
    sample, uniforms = token_sampler(Sampling()), uniforms_of(0, 100)
    found, right = sample(logits, uniforms), sample(logits.float(), uniforms)
    assert_close(found.ids, right.ids)
    assert_close(found.logprobs, right.logprobs, rtol=0, atol=0)
    assert found.logprobs.dtype == torch.float32


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([5, 2, 9, 9], ([5, 2], "stop")),
        ([5, 9, 3], ([5, 9, 3], "stop")),
        ([3], ([3], "stop")),
        ([5, 6, 7], ([5, 6, 7], "length")),
    ],
)
def test_a_completion_ends_with_the_first_stop_of_any_kind(ids, expected):
    assert cut_at_stop(ids, frozenset({2, 3})) == expected
