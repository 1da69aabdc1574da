"""Surrogates other than clips: values by hand, independent gradients, and what they leave out."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from lit_align.errors import UserError
from lit_align.losses import SURROGATES, GRPOConfig
from lit_align.losses.policy_covariance import clip_cov_loss, kl_cov_loss
from lit_align.losses.policy_divergence import dppo_kl_loss, dppo_tv_loss
from lit_align.losses.policy_sequence import gmpo_loss, vespo_loss
from lit_align.losses.policy_soft import dro_loss, sapo_loss

SEEDS = st.integers(0, 10_000)


def row(*values):
    return torch.tensor([values], dtype=torch.float64)


def mask(*values):
    return torch.tensor([values]).bool()


def batch_of(seed, rows=3, width=4):
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    new = -numbers(rows, width).abs() - 0.1
    trained = numbers(rows, width) > -1
    trained[:, 0] = True
    return {
        "new_logprobs": new.requires_grad_(),
        "old_logprobs": new.detach() + 0.5 * numbers(rows, width),
        "advantages": numbers(rows, 1).expand(rows, width),
        "mask": trained,
        "draws": numbers(rows, width),
    }


# --- sapo and dro


def test_sapo_by_hand():
    # sigmoid(1 * (2 - 1)) * 4; sigmoid(0) * 4 / 1.05, the advantage being 0 or negative.
    loss = sapo_loss(row(2.0, 1.0, 1.0), row(3.0, -1.0, 0.0))
    assert_close(loss.losses, row(-12 / (1 + math.exp(-1)), 2 / 1.05, 0.0))
    assert loss.unclipped is loss.losses
    assert not (loss.clipped_low | loss.clipped_high).any()


@given(st.floats(0.1, 3), st.floats(0.2, 5), st.floats(0.2, 5))
def test_sapo_s_gradient_is_largest_at_ratio_1(ratio, tau_positive, tau_negative):
    taus = {"tau_positive": tau_positive, "tau_negative": tau_negative}
    for advantage in (2.0, -2.0):
        ratios = row(1.0, ratio).requires_grad_()
        loss = sapo_loss(ratios, row(advantage, advantage), **taus)
        [(at_1, away)] = torch.autograd.grad(loss.losses.sum(), ratios)[0]
        assert_close(at_1.item(), -advantage)
        assert abs(away) <= abs(at_1)
        # The gate's own slope, 4 s (1 - s), as sech^2.
        tau = tau_positive if advantage > 0 else tau_negative
        assert_close(away.item(), -advantage / math.cosh(tau * (ratio - 1) / 2) ** 2)


def test_dro_by_hand():
    new = row(-1.0, -2.0).requires_grad_()
    loss = dro_loss(new, row(-1.5, -2.0), row(2.0, -1.0), mask(1, 1), dro_beta=0.4)
    assert_close(loss.losses, row(2.0 + 0.2 * 0.25, -2.0))
    # -A + beta * d.
    assert_close(torch.autograd.grad(loss.losses.sum(), new)[0], row(-2 + 0.4 * 0.5, 1.0))


# --- distances of probabilities


def test_dppo_tv_by_hand():
    old = row(0.5, 0.5, 0.5, 0.5, 0.001).log()
    new = row(0.8, 0.8, 0.2, 0.6, 0.1).log().requires_grad_()
    gains = row(1.0, -1.0, -1.0, 1.0, 1.0)
    loss = dppo_tv_loss(new, old, gains, mask(1, 1, 1, 1, 1), weight_cap=20.0)
    # Left out: too far up and wanted up; too far down and wanted down. Of the last the distance is
    # small, for all that its ratio is 100: it weighs 20.
    assert loss.clipped_high.tolist() == [[True, False, False, False, False]]
    assert loss.clipped_low.tolist() == [[False, False, True, False, False]]
    [gradient] = torch.autograd.grad(loss.losses.sum(), new)
    assert_close(gradient, row(0.0, 1.6, 0.0, -1.2, -20.0))
    assert_close(loss.unclipped, -gains * (new - old).exp() * new)


def test_dppo_kl_by_hand():
    # 0.5 log(0.5 / 0.8) + 0.5 log(0.5 / 0.2) = 0.223; the same downwards; from 0.5 to 0.6: 0.020.
    old = row(0.5, 0.5, 0.5).log()
    new = row(0.8, 0.2, 0.6).log()
    gains = row(1.0, -1.0, 1.0)
    loss = dppo_kl_loss(new, old, gains, mask(1, 1, 1))
    assert (loss.clipped_high | loss.clipped_low).tolist() == [[True, True, False]]
    wide = {"divergence_lower": 0.222, "divergence_higher": 0.224}
    loss = dppo_kl_loss(new, old, gains, mask(1, 1, 1), **wide)
    assert (loss.clipped_high | loss.clipped_low).tolist() == [[False, True, False]]


@pytest.mark.parametrize("loss_fn", [dppo_tv_loss, dppo_kl_loss])
@given(SEEDS)
def test_what_dppo_keeps_has_the_ratio_s_gradient(loss_fn, seed):
    batch = batch_of(seed)
    del batch["draws"]
    loss = loss_fn(**batch, weight_cap=1e9)
    [found] = torch.autograd.grad(loss.losses.sum(), batch["new_logprobs"])
    ratio = (batch["new_logprobs"] - batch["old_logprobs"]).exp().where(batch["mask"], 1.0)
    right = -batch["advantages"] * ratio.detach()
    assert_close(found, right.masked_fill(loss.clipped_low | loss.clipped_high, 0.0))


@pytest.mark.parametrize("loss_fn", [dppo_tv_loss, dppo_kl_loss])
@pytest.mark.parametrize("new", [0.0, -1e-9, -1e4])
@pytest.mark.parametrize("old", [0.0, -1e-9, -1e4])
def test_dppo_is_finite_for_what_is_certain_or_impossible(loss_fn, new, old):
    logprobs = torch.tensor([[new]], requires_grad=True)
    for advantage in (1.0, -1.0):
        gains = torch.tensor([[advantage]])
        loss = loss_fn(logprobs, torch.tensor([[old]]), gains, mask(1))
        assert loss.losses.isfinite().all()
        assert torch.autograd.grad(loss.losses.sum(), logprobs)[0].isfinite().all()


# --- whole completions


def test_gmpo_by_hand():
    # Log-ratios 0.6, -0.6, 0.1 and a masked one. Good: only 0.6 is cut to 0.4, mean -0.1 / 3.
    # Bad: only -0.6 is cut to -0.4, mean 0.3 / 3.
    old = row(-1.0, -1.0, -1.0, -1.0)
    new = row(-0.4, -1.6, -0.9, -9.0).requires_grad_()
    trained = mask(1, 1, 1, 0)
    good = gmpo_loss(new, old, row(*[2.0] * 4), trained)
    assert_close(good.losses, row(*[-2 * math.exp(-0.1 / 3)] * 4))
    assert_close(good.unclipped, row(*[-2 * math.exp(0.1 / 3)] * 4))
    assert good.clipped_high.tolist() == [[True, False, False, False]]
    assert not good.clipped_low.any()
    bad = gmpo_loss(new, old, row(*[-2.0] * 4), trained)
    assert_close(bad.losses, row(*[2 * math.exp(0.1)] * 4))
    assert bad.clipped_low.tolist() == [[False, True, False, False]]
    # A token that is cut has no gradient; the others share the completion's.
    [gradient] = torch.autograd.grad(good.losses[0, 0], new)
    assert_close(gradient, good.losses[0, 0].detach() / 3 * row(0.0, 1.0, 1.0, 0.0))


@given(SEEDS)
def test_vespo_s_gradient_is_that_of_an_independent_formula(seed):
    batch = batch_of(seed)
    del batch["draws"]
    loss = vespo_loss(**batch)
    [found] = torch.autograd.grad(loss.losses.sum(), batch["new_logprobs"])
    for r in range(3):
        trained = batch["mask"][r]
        moved = (batch["new_logprobs"] - batch["old_logprobs"])[r][trained].detach()
        weight = float(moved.exp().prod())
        advantage = float(batch["advantages"][r, 0])
        k, lambda_ = (2, 3) if advantage >= 0 else (3, 2)
        phi = weight**k * math.exp(lambda_ * (1 - weight))
        assert_close(found[r], torch.full((4,), -phi * advantage, dtype=torch.float64))


def test_a_weight_of_0_silences_the_whole_completion_for_vespo():
    new = row(-1.0, -1.0)
    arguments = (new, new, row(1.0, 1.0), mask(1, 1))
    assert_close(vespo_loss(*arguments).losses, row(1.0, 1.0))
    silent = vespo_loss(*arguments, row(1.0, 0.0)).losses
    assert silent.isfinite().all()
    assert (silent.abs() < 1e-12).all()


def test_vespo_stays_finite_whatever_its_exponents_are():
    new = torch.tensor([[-1.0]], requires_grad=True)
    for moved in (-1e4, -5.0, 3.0, 1e4):
        loss = vespo_loss(
            new,
            new.detach() - moved,
            torch.ones(1, 1),
            mask(1),
            k_positive=1000.0,
            lambda_positive=1.0,
        )
        assert loss.losses.isfinite().all()


# --- covariances

# Means over four trained tokens: log-prob -2, advantage 0. Covariances 1, -1, -2, 2; the fifth
# token is not trained.
COVARYING = {
    "new_logprobs": row(-1.0, -3.0, -1.0, -3.0, 50.0),
    "advantages": row(1.0, 1.0, -2.0, -2.0, 9.0) + row(0.5, 0.5, 0.5, 0.5, 0.0),
    "mask": mask(1, 1, 1, 1, 0),
}


def test_clip_cov_by_hand():
    ratio = row(1.0, 1.0, 1.0, 1.0, 1.0)
    gains = COVARYING["advantages"]
    # Centred advantages 1.5, 1.5, -1.5, -1.5: covariances 1.5, -1.5, -1.5, 1.5.
    arguments = {**COVARYING, "ratio": ratio, "cov_lower": 1.0, "cov_upper": 2.0}
    first = clip_cov_loss(**arguments, draws=row(0.1, 0.0, 0.0, 0.2, 0.0), cov_share=0.25)
    assert_close(first.losses, -gains.masked_fill(mask(1, 0, 0, 0, 0), 0.0))
    assert first.clipped_high.tolist() == [[True, False, False, False, False]]
    last = clip_cov_loss(**arguments, draws=row(0.3, 0.0, 0.0, 0.2, 0.0), cov_share=0.25)
    assert_close(last.losses, -gains.masked_fill(mask(0, 0, 0, 1, 0), 0.0))
    assert last.clipped_low.tolist() == [[False, False, False, True, False]]
    both = clip_cov_loss(**arguments, draws=row(*[0.0] * 5), cov_share=1.0)
    assert_close(both.losses, -gains.masked_fill(mask(1, 0, 0, 1, 0), 0.0))
    none = clip_cov_loss(**arguments | {"cov_lower": 1.6}, draws=ratio, cov_share=1.0)
    assert_close(none.losses, -gains)


def test_clip_cov_draws_nothing_that_the_clip_cuts():
    ratio = row(2.0, 1.0, 1.0, 1.0, 1.0)
    loss = clip_cov_loss(
        **COVARYING, ratio=ratio, draws=row(*[0.0] * 5), cov_share=0.25, cov_lower=1.0
    )
    assert_close(loss.losses[0, 0].item(), -1.5 * 1.2)
    assert loss.losses[0, 3] == 0


def test_kl_cov_by_hand():
    ratio = row(1.0, 1.0, 1.0, 1.0, 1.0)
    old = COVARYING["new_logprobs"] - row(0.3, 0.3, 0.3, -0.2, 0.3)
    loss = kl_cov_loss(**COVARYING, old_logprobs=old, ratio=ratio, cov_share=0.5, cov_penalty=2.0)
    assert_close(loss.unclipped, -COVARYING["advantages"])
    assert_close(loss.losses - loss.unclipped, row(0.6, 0.0, 0.0, 0.4, 0.0))
    # At least one, and of equals the first.
    loss = kl_cov_loss(**COVARYING, old_logprobs=old, ratio=ratio)
    assert_close(loss.losses - loss.unclipped, row(0.3, 0.0, 0.0, 0.0, 0.0))


@given(SEEDS, st.floats(0.01, 1))
def test_a_share_is_a_share_of_trained_tokens(seed, share):
    batch = batch_of(seed)
    del batch["draws"]
    ratio = torch.ones_like(batch["new_logprobs"])
    loss = kl_cov_loss(**batch, ratio=ratio, cov_share=share, cov_penalty=1.0)
    chosen = loss.losses != loss.unclipped
    assert chosen.sum() == max(int(share * int(batch["mask"].sum())), 1)
    assert not (chosen & ~batch["mask"]).any()


@given(SEEDS)
def test_the_same_lots_give_the_same_loss(seed):
    batch = batch_of(seed)
    ratio = (batch["new_logprobs"] - batch["old_logprobs"]).exp()
    old = batch.pop("old_logprobs")
    arguments = {**batch, "ratio": ratio, "cov_lower": 0.0, "cov_share": 0.3}
    torch.manual_seed(seed)
    first = clip_cov_loss(**arguments).losses
    torch.rand(7)
    assert torch.equal(clip_cov_loss(**arguments).losses, first)
    assert old.shape == first.shape


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov", "gmpo", "vespo", "dppo_tv", "dppo_kl"])
def test_a_batch_without_a_trained_token_is_no_trouble(name):
    variant = SURROGATES[name]
    tensors = {n: torch.zeros(2, 3) for n in variant.tensors} | {"mask": torch.zeros(2, 3).bool()}
    loss = variant(tensors, None)
    assert all(part.isfinite().all() for part in loss)


# --- refusals


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"loss_fn": "sapo", "tau_positive": 0.0}, "tau_positive must be .* above 0"),
        ({"loss_fn": "dro", "dro_beta": -1.0}, "dro_beta must be .* not below 0"),
        ({"loss_fn": "dppo_tv", "divergence_lower": -1.0}, "divergence_lower must be"),
        ({"loss_fn": "dppo_kl", "weight_cap": 0.5}, "weight_cap must be .* not below 1"),
        ({"loss_fn": "gmpo", "log_clip_lower": -0.1}, "log_clip_lower must be"),
        ({"loss_fn": "vespo", "k_positive": -1.0}, "k_positive must be"),
        ({"loss_fn": "clip_cov", "cov_share": 0.0}, "cov_share must be .* above 0"),
        ({"loss_fn": "kl_cov", "cov_penalty": -1.0}, "cov_penalty must be"),
        ({"loss_fn": "kl_cov", "clip_lower": 0.2}, "nothing that was chosen reads clip_lower"),
    ],
)
def test_a_value_that_cannot_be_honoured_is_refused(options, said):
    with pytest.raises(UserError, match=said):
        GRPOConfig(**options)


def test_other_projects_names_are_understood():
    for theirs, ours in {"gpg": "reinforce", "geo_mean": "gmpo", "vanilla": "dual_clip"}.items():
        assert GRPOConfig(theirs) == GRPOConfig(ours)
