"""pass@k against counting, against exact fractions, and where it refuses."""

import math
from fractions import Fraction
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from lit_align.errors import UserError
from lit_align.losses import pass_at_k, pass_hat_k, standard_error


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_pass_at_k_by_hand():
    # Of 8 samples: none right; 1 right, 4/8; 3 right, 1 - C(5,4)/C(8,4) = 1 - 5/70; all right.
    counts = torch.tensor([8, 8, 8, 8]), torch.tensor([0, 1, 3, 8])
    assert_close(pass_at_k(*counts, 4), numbers(0, 0.5, 13 / 14, 1))
    # All four right: only C(4,4) of the C(8,4) = 70.
    assert_close(pass_hat_k(torch.tensor([8, 8]), torch.tensor([4, 3]), 4), numbers(1 / 70, 0))


@pytest.mark.parametrize("n", range(1, 8))
def test_they_are_what_is_seen_over_all_drawings(n):
    for c in range(n + 1):
        samples = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            drawings = list(combinations(samples, k))
            counts = torch.tensor([n]), torch.tensor([c])
            some = sum(map(any, drawings)) / len(drawings)
            every = sum(map(all, drawings)) / len(drawings)
            assert_close(pass_at_k(*counts, k), numbers(some))
            assert_close(pass_hat_k(*counts, k), numbers(every))


@given(st.integers(1, 20), st.integers(1, 20), st.floats(0, 1))
def test_they_are_unbiased(n, k, p):
    k = min(n, k)
    correct = torch.arange(n + 1)
    samples = torch.full_like(correct, n)
    likely = numbers(*(math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)))
    at, hat = (f(samples, correct, k) for f in (pass_at_k, pass_hat_k))
    assert_close((likely * at).sum().item(), 1 - (1 - p) ** k, rtol=1e-9, atol=1e-12)
    assert_close((likely * hat).sum().item(), p**k, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(10_000, 3, 900), (10_000, 9_999, 5_000), (4096, 1, 1)])
def test_factorials_too_large_for_floats_do_no_harm(n, c, k):
    counts = torch.tensor([n]), torch.tensor([c])
    some = float(1 - Fraction(math.comb(n - c, k), math.comb(n, k)))
    every = float(Fraction(math.comb(c, k), math.comb(n, k)))
    assert_close(pass_at_k(*counts, k), numbers(some), rtol=1e-12, atol=1e-13)
    assert_close(pass_hat_k(*counts, k), numbers(every), rtol=1e-12, atol=0)


@given(st.integers(1, 30), st.data())
def test_more_tries_never_hurt_and_never_make_sure(n, data):
    counts = torch.tensor([n]), torch.tensor([data.draw(st.integers(0, n))])
    at = [pass_at_k(*counts, k).item() for k in range(1, n + 1)]
    hat = [pass_hat_k(*counts, k).item() for k in range(1, n + 1)]
    assert all(before <= after + 1e-12 for before, after in pairwise(at))
    assert all(before >= after - 1e-12 for before, after in pairwise(hat))
    assert at[0] == pytest.approx(hat[0]) == pytest.approx(counts[1].item() / n)
    assert 0 <= hat[-1] <= at[-1] <= 1


def test_what_cannot_happen_is_0_and_not_minus_0():
    # One right sample, three tries: 1/4 * 0/3 * -1/2, were nothing done about it.
    assert math.copysign(1, pass_hat_k(torch.tensor([4]), torch.tensor([1]), 3).item()) == 1


def test_prompts_may_have_been_sampled_unequally_often():
    samples, correct = torch.tensor([2, 5]), torch.tensor([1, 1])
    assert_close(pass_at_k(samples, correct, 2), numbers(1, 0.4))


@pytest.mark.parametrize("f", [pass_at_k, pass_hat_k])
def test_fewer_samples_than_tries_are_refused(f):
    # Where nothing was right as well: no sample is evidence for four tries.
    with pytest.raises(UserError, match=r"at least 4 samples.*prompt 1 has 3"):
        f(torch.tensor([4, 3]), torch.tensor([1, 0]), 4)


@pytest.mark.parametrize("k", [0, -1, 1.5])
def test_a_number_of_tries_that_is_none_is_refused(k):
    with pytest.raises(UserError, match=f"not {k}"):
        pass_at_k(torch.tensor([4]), torch.tensor([1]), k)


def test_counts_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="prompt 1 has 5 right samples of 4"):
        pass_at_k(torch.tensor([4, 4]), torch.tensor([4, 5]), 1)
    with pytest.raises(ValueError, match="prompt 0 has -1"):
        pass_hat_k(torch.tensor([4]), torch.tensor([-1]), 1)
    with pytest.raises(ValueError, match=r"num_samples \(1,\), num_correct \(2,\)"):
        pass_at_k(torch.tensor([4]), torch.tensor([1, 1]), 1)


def test_the_standard_error_by_hand():
    # Deviations +-1 around 1: variance 4/3 of four, so sqrt(4/3) / 2.
    assert_close(standard_error(numbers(0, 2, 0, 2)), torch.tensor(math.sqrt(4 / 3) / 2).double())
    assert standard_error(numbers(0.5, 0.5)) == 0


@pytest.mark.parametrize("prompts", [0, 1])
def test_of_one_prompt_no_standard_error_is_known(prompts):
    assert standard_error(torch.ones(prompts)).isnan()
