"""Losses of labelled completions: by hand, by property, and what must hold of all of them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from losses.small_pairs import BETA, LOGP, numbers
from torch.testing import assert_close

from lit_align.errors import UserError
from lit_align.losses import (
    UNPAIRED_LOSSES,
    TensorCache,
    UnpairedConfig,
    apo_zero_loss,
    apo_zero_unpaired_loss,
    bco_loss,
    bco_pair_loss,
    compute_unpaired_loss,
    kto_loss,
    reference_point,
)

ROWS = st.lists(st.tuples(LOGP, LOGP, st.booleans()), min_size=1, max_size=5)
WEIGHTS = {"desirable_weight": 1.5, "undesirable_weight": 0.75}
BOTH = torch.tensor([True, False])


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def table(rows):
    policy, reference, labels = zip(*rows, strict=True)
    return numbers(*policy), numbers(*reference), torch.tensor(labels)


def arguments(name, rows, dtype, scale=1.0):
    """Tensors for every tensor the loss reads; labels take turns."""
    generator = torch.Generator().manual_seed(rows)
    logps = -scale * torch.rand(2, rows, generator=generator, dtype=torch.float64).to(dtype)
    others = {"kl": torch.tensor(0.5, dtype=dtype), "delta": torch.tensor(0.25, dtype=dtype)}
    variant = UNPAIRED_LOSSES[name]
    return {
        "policy_logps": logps[0],
        "reference_logps": logps[1],
        "labels": torch.arange(rows) % 2 == 0,
        **{
            key: others[key]
            for key in (*variant.tensors, *variant.optional_tensors)
            if key in others
        },
    }


# --- by hand


def test_kto_by_hand():
    # Log-ratios 3 and -1, z0 = 1: gains 0.5 * (3 - 1) = 1 and 0.5 * (1 - -1) = 1.
    policy, reference = numbers(-6, -8), numbers(-9, -7)
    losses, rewards = kto_loss(policy, reference, BOTH, numbers(1).squeeze(), beta=0.5, **WEIGHTS)
    assert_close(losses, numbers(1.5 * (1 - sigmoid(1)), 0.75 * (1 - sigmoid(1))))
    assert_close(rewards, numbers(1.5, -0.5))


def test_bco_by_hand():
    # Rewards 1.5 and -0.5, shift 0.25: logits of being right 1.25 and 0.75.
    policy, reference = numbers(-6, -8), numbers(-9, -7)
    delta = torch.tensor(0.25, dtype=torch.float64)
    losses, rewards = bco_loss(policy, reference, BOTH, delta, beta=0.5, **WEIGHTS)
    by_hand = (1.5 * math.log1p(math.exp(-1.25)), 0.75 * math.log1p(math.exp(-0.75)))
    assert_close(losses, numbers(*by_hand))
    assert_close(rewards, numbers(1.5, -0.5))


def test_apo_zero_by_hand():
    policy, reference = numbers(-6, -8), numbers(-9, -7)
    losses, rewards = apo_zero_unpaired_loss(policy, reference, BOTH, beta=0.5, **WEIGHTS)
    assert_close(losses, numbers(1.5 * (1 - sigmoid(1.5)), 0.75 * sigmoid(-0.5)))
    assert_close(rewards, numbers(1.5, -0.5))


def test_the_reference_point_by_hand():
    assert reference_point(numbers(3, -1, 0, 0)).item() == 0.5
    # Zeros count, and a policy is never nearer to its reference than it is to itself.
    assert reference_point(numbers(-3, 1)).item() == 0
    assert reference_point(numbers()).item() == 0
    point = reference_point(torch.tensor([1.0, 2.0], dtype=torch.bfloat16, requires_grad=True))
    assert (point.item(), point.dtype, point.requires_grad) == (1.5, torch.float32, False)


# --- by property


@given(ROWS, BETA)
def test_kto_at_a_reference_point_of_0_is_apo_zero(rows, beta):
    zero = torch.zeros((), dtype=torch.float64)
    kto = kto_loss(*table(rows), zero, beta=beta, **WEIGHTS)
    assert_close(tuple(kto), tuple(apo_zero_unpaired_loss(*table(rows), beta=beta, **WEIGHTS)))


@given(ROWS, BETA)
def test_two_answers_of_a_pair_add_up_to_the_losses_of_pairs(rows, beta):
    policy, reference, _ = table(rows)
    chosen, rejected = torch.ones(len(rows)).bool(), torch.zeros(len(rows)).bool()
    pair = (policy, policy.flip(0), reference, reference.flip(0))
    apart = [
        (apo_zero_loss, apo_zero_unpaired_loss, ()),
        (bco_pair_loss, bco_loss, (torch.tensor(0.5, dtype=torch.float64),)),
    ]
    for of_pairs, of_rows, shift in apart:
        first = of_rows(policy, reference, chosen, *shift, beta=beta)
        second = of_rows(policy.flip(0), reference.flip(0), rejected, *shift, beta=beta)
        whole = of_pairs(*pair, *shift, beta=beta)
        assert_close(first.losses + second.losses, whole.losses)
        assert_close(first.rewards, whole.chosen_rewards)
        assert_close(second.rewards, whole.rejected_rewards)


@given(st.floats(0, 20))
def test_a_policy_far_from_its_reference_has_to_gain_more_and_may_lose_less(kl):
    near, far = (
        kto_loss(numbers(-2, -2), numbers(-3, -3), BOTH, numbers(z).squeeze(), beta=0.5).losses
        for z in (kl, kl + 1)
    )
    assert far[0] > near[0]
    assert far[1] < near[1]


@pytest.mark.parametrize("name", UNPAIRED_LOSSES)
def test_a_loss_falls_as_a_desirable_completion_gains_and_another_one_loses(name):
    tensors = arguments(name, 6, torch.float64, scale=9.0)
    leaf = tensors["policy_logps"].requires_grad_()
    losses, _ = UNPAIRED_LOSSES[name].fn(**tensors)
    (slopes,) = torch.autograd.grad(losses.sum(), leaf)
    assert ((slopes < 0) == tensors["labels"]).all()


@pytest.mark.parametrize("name", UNPAIRED_LOSSES)
def test_a_class_counts_by_its_weight(name):
    tensors = arguments(name, 6, torch.float64, scale=9.0)
    plain, weighted = (UNPAIRED_LOSSES[name].fn(**tensors, **w) for w in ({}, WEIGHTS))
    expected = torch.where(tensors["labels"], numbers(1.5), numbers(0.75)) * plain.losses
    assert_close(weighted.losses, expected)
    assert_close(weighted.rewards, plain.rewards)


@pytest.mark.parametrize("name", UNPAIRED_LOSSES)
def test_a_policy_that_is_its_reference_has_no_rewards(name):
    tensors = arguments(name, 4, torch.float64, scale=9.0)
    tensors["reference_logps"] = tensors["policy_logps"]
    assert not UNPAIRED_LOSSES[name].fn(**tensors).rewards.any()


# --- an independent formula: probabilities are exponentials, a sigmoid is a fraction


def gain(ratio, labels, beta, origin):
    """How probable it is that a completion is on its side, by odds (ratio / origin)^beta."""
    odds = (ratio / torch.exp(origin)) ** beta
    return torch.where(labels, odds / (1 + odds), 1 / (1 + odds))


FORMULAS = {
    "apo_zero_unpaired": lambda u, labels: 1 - gain(u, labels, 0.1, torch.zeros(())),
    "bco": lambda u, labels, delta: -torch.log(gain(u, labels, 0.01, delta / 0.01)),
    "kto": lambda u, labels, kl: 1 - gain(u, labels, 0.1, kl),
}


@pytest.mark.parametrize("rows", [1, 2, 16])
@pytest.mark.parametrize("name", UNPAIRED_LOSSES)
def test_a_loss_and_its_gradient_are_those_of_the_paper_s_formula(name, rows):
    tensors = arguments(name, rows, torch.float64, scale=4.0)
    policy, reference, labels, *others = tensors.values()
    leaf = policy.requires_grad_()
    losses = UNPAIRED_LOSSES[name].fn(**tensors).losses
    expected = FORMULAS[name](torch.exp(leaf) / torch.exp(reference), labels, *others)
    assert_close(losses, expected, rtol=1e-9, atol=1e-12)
    ours, theirs = (torch.autograd.grad(each.sum(), leaf)[0] for each in (losses, expected))
    assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


# --- precision and size


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", UNPAIRED_LOSSES)
def test_half_precision_is_computed_in_float32(name, dtype):
    tensors = arguments(name, 4, dtype, scale=30.0)
    exact = {k: v.double() if v.is_floating_point() else v for k, v in tensors.items()}
    found, expected = (UNPAIRED_LOSSES[name].fn(**each) for each in (tensors, exact))
    for part, right in zip(found, expected, strict=True):
        assert part.dtype == torch.float32
        assert_close(part.double(), right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("log_ratio", [1e4, -1e4, 100.0, -100.0, 0.0])
@pytest.mark.parametrize("name", UNPAIRED_LOSSES)
def test_values_and_gradients_are_finite_at_large_log_ratios(name, log_ratio):
    tensors = arguments(name, 2, torch.float32)
    leaf = tensors["policy_logps"] = (tensors["reference_logps"] + log_ratio).requires_grad_()
    found = UNPAIRED_LOSSES[name].fn(**tensors, beta=1.0)
    (gradient,) = torch.autograd.grad(found.losses.sum(), leaf)
    assert all(part.isfinite().all() for part in (*found, gradient))


def test_no_gradient_passes_through_the_reference_point_or_the_shift():
    scalar = torch.tensor(0.5, requires_grad=True)
    policy = torch.tensor([-1.0, -2.0], requires_grad=True)
    for loss in (kto_loss, bco_loss):
        losses, rewards = loss(policy, torch.zeros(2), BOTH, scalar)
        assert not rewards.requires_grad
        (gradient,) = torch.autograd.grad(losses.sum(), scalar, materialize_grads=True)
        assert gradient == 0


# --- refusals


@pytest.mark.parametrize("name", UNPAIRED_LOSSES)
def test_no_loss_broadcasts(name):
    tensors = arguments(name, 3, torch.float32)
    for key in tensors:
        wrong = torch.zeros(2) if key in ("kl", "delta") else tensors[key][:1]
        with pytest.raises(ValueError, match=rf"one shape: .*{key} \({len(wrong)},\)"):
            UNPAIRED_LOSSES[name].fn(**{**tensors, key: wrong})


@pytest.mark.parametrize("name", UNPAIRED_LOSSES)
def test_labels_are_truths(name):
    tensors = arguments(name, 3, torch.float32)
    with pytest.raises(ValueError, match=r"labels must be bool.*int64"):
        UNPAIRED_LOSSES[name].fn(**{**tensors, "labels": tensors["labels"].long()})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"loss_type": "dpo"}, "unknown loss 'dpo'; known: apo_zero_unpaired, bco, kto"),
        ({"beta": 0.0}, "loss 'kto': beta must be a finite number above 0"),
        ({"desirable_weight": -1.0}, "desirable_weight must be a finite number not below 0"),
        ({"label_smoothing": 0.1}, "loss 'kto' takes beta, desirable_weight, .*not label_smoo"),
    ],
)
def test_a_config_refuses_what_its_loss_cannot_honour(given, message):
    with pytest.raises(UserError, match=message):
        UnpairedConfig(**given)


# --- through the dispatcher


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("name", UNPAIRED_LOSSES)
def test_every_loss_runs_from_a_batch(name, rows):
    tensors = arguments(name, rows, torch.float64)
    policy, reference = (tensors.pop(key) for key in ("policy_logps", "reference_logps"))
    config = UnpairedConfig(name, beta=0.5, **WEIGHTS)
    direct = UNPAIRED_LOSSES[name].fn(policy, reference, **tensors, beta=0.5, **WEIGHTS)
    batch = {**tensors, "index": torch.arange(rows).flip(0), "prompt": "x"}
    cache = TensorCache({"completion_logps": reference.flip(0), "mismatched_logps": reference})
    for found in (
        compute_unpaired_loss(config, batch, policy, cache),
        compute_unpaired_loss(config, {**batch, "reference_logps": reference}, policy),
    ):
        assert_close(tuple(found), tuple(direct))


def test_a_row_counts_by_its_own_weight():
    tensors = arguments("kto", 4, torch.float64)
    policy = tensors.pop("policy_logps")
    weight = torch.tensor([0.0, 1.0, 2.0, 0.5])
    plain = compute_unpaired_loss(UnpairedConfig(), tensors, policy)
    found = compute_unpaired_loss(UnpairedConfig(), {**tensors, "weight": weight}, policy)
    assert_close(found.losses, weight.double() * plain.losses)
    assert_close(found.rewards, plain.rewards)


def test_what_is_missing_is_named():
    policy = numbers(-1, -2)
    batch = {"labels": BOTH, "reference_logps": policy}
    with pytest.raises(ValueError, match="loss 'kto' needs kl"):
        compute_unpaired_loss(UnpairedConfig("kto"), batch, policy)
    with pytest.raises(UserError, match="loss 'bco' compares the policy with a reference, and"):
        compute_unpaired_loss(UnpairedConfig("bco"), {"labels": BOTH}, policy)


def test_a_config_says_what_it_reads():
    assert [name for name in UNPAIRED_LOSSES if UnpairedConfig(name).reads_mismatched] == ["kto"]
    assert all(UnpairedConfig(name).reads_reference for name in UNPAIRED_LOSSES)
    assert UnpairedConfig("bco").title == "loss 'bco'"
    assert UnpairedConfig("kto", beta=0.2) == UnpairedConfig(beta=0.2) != UnpairedConfig()
    with pytest.raises(AttributeError, match="loss 'kto' has no hyperparameter 'gamma'"):
        UnpairedConfig().gamma  # noqa: B018
