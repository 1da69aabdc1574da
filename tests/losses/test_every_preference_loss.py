"""What must hold of every preference loss: gradients, precision, large margins."""

import pytest
import torch
from losses.pair_formulas import FORMULAS
from torch.testing import assert_close

from lit_align.losses import PREFERENCE_LOSSES, dpo_loss, wpo_loss, wpo_weights

SMOOTHINGS = [0.01, 0.3]
# What losses remember of earlier steps.
SCALARS = {"delta": 0.25, "lead_mean": 0.25, "lead_std": 2.0}
# They have parts that are taken to be constant.
DETACHED = {"wpo", "beta_dpo"}


def arguments(name, rows, dtype, scale=1.0):
    """Tensors for every tensor the loss reads, `rows` pairs."""
    variant = PREFERENCE_LOSSES[name]
    generator = torch.Generator().manual_seed(rows)

    def tensor(name):
        if name.endswith("_lengths"):
            return torch.arange(rows) + (5 if name.startswith("chosen") else 2)
        if name in SCALARS:
            return torch.tensor(SCALARS[name], dtype=dtype)
        if name in ("draws", "label_prob"):
            return torch.rand(rows, generator=generator, dtype=torch.float64).to(dtype)
        logps = -scale * torch.rand(rows, generator=generator, dtype=torch.float64).to(dtype)
        return -logps if name == "margin" else logps

    return {name: tensor(name) for name in (*variant.tensors, *variant.optional_tensors)}


def options(name, **wanted):
    """Of these hyperparameters those that the loss has."""
    return {key: wanted[key] for key in wanted if key in PREFERENCE_LOSSES[name].hyperparameters}


def test_the_formulas_of_the_papers_are_all_there():
    assert sorted(FORMULAS) == sorted(PREFERENCE_LOSSES)


@pytest.mark.parametrize("rows", [2, 16])
@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_a_loss_and_its_gradient_are_those_of_the_paper_s_formula(name, rows):
    """At its defaults, which the formula has written out."""
    tensors = arguments(name, rows, torch.float64, scale=4.0)
    leaves = [tensors[f"policy_{side}_logps"].requires_grad_() for side in ("chosen", "rejected")]
    variant = PREFERENCE_LOSSES[name]
    losses = variant.fn(**tensors, **variant.settings({})).losses
    expected = FORMULAS[name](**tensors)
    assert_close(losses, expected, rtol=1e-9, atol=1e-12)
    assert (losses != 0).any()
    for ours, theirs in zip(gradients(losses, leaves), gradients(expected, leaves), strict=True):
        assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def gradients(losses, leaves):
    """By each of the leaves; 0 by one that the losses do not depend on."""
    return torch.autograd.grad(losses.sum(), leaves, materialize_grads=True)


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
@pytest.mark.parametrize("name", [name for name in PREFERENCE_LOSSES if name not in DETACHED])
def test_gradients_are_those_of_the_value(name, smoothing):
    tensors = arguments(name, 3, torch.float64, scale=4.0)

    def losses(policy_chosen_logps, policy_rejected_logps):
        policy = (policy_chosen_logps, policy_rejected_logps)
        others = list(tensors.values())[2:]
        given = options(name, label_smoothing=smoothing)
        return PREFERENCE_LOSSES[name].fn(*policy, *others, **given).losses

    leaves = [tensors[f"policy_{side}_logps"].requires_grad_() for side in ("chosen", "rejected")]
    assert torch.autograd.gradcheck(losses, leaves)


def test_gradients_of_wpo_are_those_of_the_value_at_fixed_weights():
    tensors = arguments("wpo", 3, torch.float64, scale=4.0)
    policy, reference, lengths = (list(tensors.values())[i : i + 2] for i in (0, 2, 4))
    weights = wpo_weights(*policy, *lengths)
    policy = [logps.requires_grad_() for logps in policy]
    losses = wpo_loss(*policy, *reference, *lengths, beta=0.5).losses
    gradients = torch.autograd.grad(losses.sum(), policy)
    eps = 1e-6
    for which, gradient in enumerate(gradients):
        step = torch.tensor([[eps], [0.0]]).roll(which, 0).double()
        up, down = (
            weights * dpo_loss(*(torch.stack(policy) + move).detach(), *reference, beta=0.5).losses
            for move in (step, -step)
        )
        assert_close(gradient, (up - down) / (2 * eps), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_half_precision_is_computed_in_float32(name, dtype):
    tensors = arguments(name, 4, dtype, scale=30.0)
    result = PREFERENCE_LOSSES[name].fn(**tensors)
    exact = {
        key: value.double() if value.is_floating_point() else value
        for key, value in tensors.items()
    }
    for part, expected in zip(result, PREFERENCE_LOSSES[name].fn(**exact), strict=True):
        assert part.dtype == torch.float32
        assert_close(part.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("margin", [1e4, -1e4, 100.0, -100.0])
@pytest.mark.parametrize("side", ["policy_chosen_logps", "policy_rejected_logps"])
@pytest.mark.parametrize("smoothing", SMOOTHINGS)
@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_values_and_gradients_are_finite_at_large_margins(name, smoothing, side, margin):
    tensors = arguments(name, 2, torch.float32)
    tensors[side] += margin
    leaves = [tensors[f"policy_{side}_logps"].requires_grad_() for side in ("chosen", "rejected")]
    given = options(name, beta=1.0, alpha=1.0, label_smoothing=smoothing)
    result = PREFERENCE_LOSSES[name].fn(**tensors, **given)
    assert all(part.isfinite().all() for part in (*result, *gradients(result.losses, leaves)))


@pytest.mark.parametrize("length", [0, 1])
@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_empty_responses_and_certain_tokens_have_a_loss(name, length):
    """Log-prob 0: of a response without tokens, or of one token with probability 1."""
    tensors = arguments(name, 2, torch.float32)
    for key in tensors:
        if key.endswith("_logps"):
            tensors[key] = torch.zeros(2)
        if key.endswith("_lengths"):
            tensors[key] = torch.full((2,), length)
    leaves = [tensors[f"policy_{side}_logps"].requires_grad_() for side in ("chosen", "rejected")]
    result = PREFERENCE_LOSSES[name].fn(**tensors)
    assert all(part.isfinite().all() for part in (*result, *gradients(result.losses, leaves)))


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_no_loss_broadcasts(name):
    tensors = arguments(name, 3, torch.float32)
    for key in tensors:
        wrong = torch.zeros(2) if key in SCALARS else tensors[key][:1]
        with pytest.raises(ValueError, match=rf"one shape: .*{key} \({len(wrong)},\)"):
            PREFERENCE_LOSSES[name].fn(**{**tensors, key: wrong})


@pytest.mark.parametrize("name", [n for n, v in PREFERENCE_LOSSES.items() if v.reads_reference])
def test_a_policy_that_is_its_reference_has_no_rewards(name):
    """What is checked before the first step: a constant in a reward would look like a fault."""
    tensors = arguments(name, 4, torch.float64, scale=9.0)
    for key in PREFERENCE_LOSSES[name].reference_tensors:
        tensors[key] = tensors[key.replace("reference", "policy")]
    result = PREFERENCE_LOSSES[name].fn(**tensors)
    assert_close(result.chosen_rewards, torch.zeros(4, dtype=torch.float64))
    assert_close(result.rejected_rewards, torch.zeros(4, dtype=torch.float64))


def test_a_large_negative_margin_costs_itself():
    # -log sigmoid(-1e4) = 1e4, slope -1; a product of exponentials would say inf and nan.
    chosen = torch.tensor([-1e4], requires_grad=True)
    losses, *_ = dpo_loss(chosen, torch.zeros(1), torch.zeros(1), torch.zeros(1), beta=1.0)
    losses.sum().backward()
    assert losses.item() == 1e4
    assert chosen.grad.item() == -1
