"""KL estimators: values by hand, and what their gradients are on average, worked out exactly."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from lit_align.errors import UserError
from lit_align.losses import KL_ESTIMATORS, kl_estimator

NUMBERED = ["k1", "k2", "k3", "ratio_k1", "ratio_k3"]
NAMES = [*NUMBERED, "k1_plus", "k3_plus", "absolute"]


def of(values):
    return torch.tensor([values], dtype=torch.float64)


def estimate(name, new, ref, ratio):
    tensors = {"new_logprobs": new, "ref_logprobs": ref, "ratio": ratio}
    return KL_ESTIMATORS[name](tensors, None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        # d = -1 - -1.5 = 0.5 and a ratio of 2.
        ("k1", 0.5),
        ("k2", 0.125),
        ("k3", math.exp(-0.5) - 1 + 0.5),
        ("ratio_k1", 1.0),
        ("ratio_k3", 2 * (math.exp(-0.5) - 0.5)),
        ("k1_plus", 0.5),
        ("k3_plus", math.exp(-0.5) - 1 + 0.5),
        ("absolute", 0.5),
    ],
)
def test_by_hand(name, value):
    assert_close(estimate(name, of([-1.0]), of([-1.5]), of([2.0])), of([value]))


@pytest.mark.parametrize(("number", "name"), list(enumerate(NUMBERED)))
def test_each_has_the_number_it_has_elsewhere(number, name):
    assert kl_estimator(number) is kl_estimator(str(number)) is KL_ESTIMATORS[name]


@pytest.mark.parametrize("unknown", [5, -1, True, "k4", None, 2.0])
def test_an_unknown_estimator_is_refused_with_the_known_ones(unknown):
    with pytest.raises(UserError, match=r"unknown kl_estimator .* k2, k3, .* 0 \(= k1\)"):
        kl_estimator(unknown)


# Three distributions over four tokens; every expectation is a sum of four terms.
LOGITS = torch.tensor([0.3, -1.2, 0.8, 0.1], dtype=torch.float64)
REFERENCE = torch.tensor([-0.4, 0.5, 0.2, -0.9], dtype=torch.float64).log_softmax(0)
OLD = torch.tensor([0.9, 0.2, -0.3, 0.4], dtype=torch.float64).log_softmax(0)


def kl(p, q):
    return (p.exp() * (p - q)).sum()


def expected(name, drawn_from):
    """Value and gradient of the mean over tokens drawn from `drawn_from`; None: from the policy."""
    logits = LOGITS.clone().requires_grad_()
    policy = logits.log_softmax(0)
    drawn = policy.detach() if drawn_from is None else drawn_from
    ratio = (policy - drawn).exp()
    mean = (drawn.exp() * estimate(name, policy, REFERENCE, ratio)).sum()
    return mean.detach(), torch.autograd.grad(mean, logits)[0]


def gradient_of(direction):
    logits = LOGITS.clone().requires_grad_()
    return torch.autograd.grad(direction(logits.log_softmax(0)), logits)[0]


FORWARD = gradient_of(lambda policy: kl(policy, REFERENCE))
BACKWARD = gradient_of(lambda policy: kl(REFERENCE, policy))


@pytest.mark.parametrize("name", ["k1", "k3", "ratio_k1", "ratio_k3", "k1_plus", "k3_plus"])
def test_all_but_k2_are_unbiased_on_policy(name):
    assert_close(expected(name, None)[0], kl(LOGITS.log_softmax(0), REFERENCE))


@pytest.mark.parametrize(
    ("name", "gradient"),
    [
        ("k1", torch.zeros(4).double()),
        ("k2", FORWARD),
        ("k3", BACKWARD),
        ("ratio_k1", FORWARD),
        ("ratio_k3", FORWARD),
        ("k1_plus", FORWARD),
        ("k3_plus", FORWARD),
    ],
)
def test_the_table_of_expected_gradients(name, gradient):
    assert_close(expected(name, None)[1], gradient)
    assert not torch.allclose(FORWARD, BACKWARD)


@pytest.mark.parametrize("name", ["ratio_k1", "ratio_k3"])
def test_with_a_ratio_an_older_policy_s_tokens_will_do(name):
    value, gradient = expected(name, OLD)
    assert_close(value, kl(LOGITS.log_softmax(0), REFERENCE))
    assert_close(gradient, FORWARD)


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_without_one_they_will_not(name):
    assert not torch.allclose(expected(name, OLD)[1], FORWARD)


def test_verl_s_names_are_understood():
    assert kl_estimator("k3+") is KL_ESTIMATORS["k3_plus"]
    assert kl_estimator("k1+") is KL_ESTIMATORS["k1_plus"]
    assert kl_estimator("abs") is KL_ESTIMATORS["absolute"]


@given(st.floats(-30, 0), st.floats(-30, 0))
def test_k2_and_k3_are_never_negative(new, ref):
    for name in ("k2", "k3", "ratio_k3"):
        assert (estimate(name, of([new]), of([ref]), of([1.0])) >= 0).all()


def test_near_0_k3_keeps_its_digits():
    # d^2 / 2 - d^3 / 6: written as exp(-d) - 1 + d, two digits of it would be right.
    found = estimate("k3", of([1e-7]), of([0.0]), of([1.0]))
    assert_close(found, of([5e-15]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("distance", [41.0, -41.0, 1e3, -1e3])
def test_beyond_40_nats_there_is_a_bound_and_no_gradient(name, distance):
    new = torch.tensor([distance]).requires_grad_()
    ratio = torch.tensor([1.0])
    found = estimate(name, new, torch.zeros(1), ratio)
    at_the_bound = torch.tensor([math.copysign(40.0, distance)])
    assert_close(found, estimate(name, at_the_bound, torch.zeros(1), ratio))
    assert found.isfinite().all()
    assert not torch.autograd.grad(found.sum(), new)[0].any()


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_is_a_constant(name):
    ref = of([-1.0]).requires_grad_()
    assert not estimate(name, of([-2.0]), ref, of([1.0])).requires_grad


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_is_computed_in_float32(name):
    half, ref = torch.tensor([-8.125]).bfloat16(), torch.tensor([-8.0]).bfloat16()
    found = estimate(name, half, ref, torch.ones(1).bfloat16())
    right = estimate(name, half.double(), ref.double(), torch.ones(1).double())
    assert_close(found, right.float())


@pytest.mark.parametrize("name", NAMES)
def test_estimators_refuse_to_broadcast(name):
    with pytest.raises(ValueError, match=r"ref_logprobs \(1,\)"):
        estimate(name, torch.zeros(2), torch.zeros(1), torch.zeros(2))
    if name.startswith("ratio"):
        with pytest.raises(ValueError, match=r"ratio \(1,\)"):
            estimate(name, torch.zeros(2), torch.zeros(2), torch.zeros(1))
