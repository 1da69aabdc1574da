"""What must hold of every preference loss: gradients, precision, large margins."""

import pytest
import torch
from torch.testing import assert_close

from lit_align.losses import PREFERENCE_LOSSES, dpo_loss, wpo_loss, wpo_weights


def arguments(name, rows, dtype, scale=1.0):
    """Tensors for every tensor the loss reads, `rows` pairs."""
    variant = PREFERENCE_LOSSES[name]
    generator = torch.Generator().manual_seed(rows)
    return {
        tensor: torch.full((rows,), 5)
        if tensor.endswith("_lengths")
        else -scale * torch.rand(rows, generator=generator, dtype=torch.float64).to(dtype)
        for tensor in (*variant.tensors, *variant.optional_tensors)
    }


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("name", [name for name in PREFERENCE_LOSSES if name != "wpo"])
def test_gradients_are_those_of_the_value(name, smoothing):
    tensors = arguments(name, 3, torch.float64, scale=4.0)

    def losses(policy_chosen_logps, policy_rejected_logps):
        policy = (policy_chosen_logps, policy_rejected_logps)
        others = list(tensors.values())[2:]
        return PREFERENCE_LOSSES[name].fn(*policy, *others, label_smoothing=smoothing).losses

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
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_values_and_gradients_are_finite_at_large_margins(name, smoothing, margin):
    tensors = arguments(name, 2, torch.float32)
    tensors["policy_chosen_logps"] += margin
    leaves = [tensors[f"policy_{side}_logps"].requires_grad_() for side in ("chosen", "rejected")]
    result = PREFERENCE_LOSSES[name].fn(**tensors, beta=1.0, label_smoothing=smoothing)
    gradients = torch.autograd.grad(result.losses.sum(), leaves)
    assert all(part.isfinite().all() for part in (*result, *gradients))


def test_a_large_negative_margin_costs_itself():
    # -log sigmoid(-1e4) = 1e4, slope -1; a product of exponentials would say inf and nan.
    chosen = torch.tensor([-1e4], requires_grad=True)
    losses, *_ = dpo_loss(chosen, torch.zeros(1), torch.zeros(1), torch.zeros(1), beta=1.0)
    losses.sum().backward()
    assert losses.item() == 1e4
    assert chosen.grad.item() == -1
