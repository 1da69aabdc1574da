"""Each loss by hand, by property, against a second source, and where it must refuse."""

import math
from decimal import Decimal, getcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from lit_align.losses import dpo_loss, simpo_loss, wpo_loss, wpo_weights

LOGP = st.floats(-50, 0)
PAIRS = st.lists(st.tuples(LOGP, LOGP, LOGP, LOGP), min_size=1, max_size=4)
LENGTH = st.integers(1, 60)
WEIGHED = st.lists(st.tuples(LOGP, LOGP, LENGTH, LENGTH), min_size=1, max_size=4)
BETA = st.floats(0.01, 10)
SMOOTHING = st.floats(0, 0.49)


def columns(rows):
    return torch.tensor(rows, dtype=torch.float64).T.unbind()


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


# DPO


def test_dpo_by_hand():
    # margin = 0.5 * ((-1 - -2) - (-3 - -2)) = 1, so loss = log(1 + e^-1) and rewards 0.5 and -0.5.
    losses, chosen_rewards, rejected_rewards = dpo_loss(*columns([(-1, -3, -2, -2)]), beta=0.5)
    assert_close(losses, numbers(math.log1p(math.exp(-1))))
    assert_close(chosen_rewards, numbers(0.5))
    assert_close(rejected_rewards, numbers(-0.5))


def test_dpo_with_smoothed_labels_by_hand():
    # margin 1 as above: 0.9 * log(1 + e^-1) + 0.1 * log(1 + e) = log(1 + e^-1) + 0.1.
    losses, *_ = dpo_loss(*columns([(-1, -3, -2, -2)]), beta=0.5, label_smoothing=0.1)
    assert_close(losses, numbers(math.log1p(math.exp(-1)) + 0.1))


def test_dpo_gradient_by_hand():
    # At margin 0 the slope of -log sigmoid is -1/2, so +-beta/2 on the two responses.
    chosen, rejected = numbers(-3.0).requires_grad_(), numbers(-4.0).requires_grad_()
    losses, *_ = dpo_loss(chosen, rejected, numbers(-3.0), numbers(-4.0), beta=0.1)
    losses.sum().backward()
    assert_close(chosen.grad, numbers(-0.05))
    assert_close(rejected.grad, numbers(0.05))


@given(PAIRS, BETA, SMOOTHING)
def test_dpo_of_an_unmoved_policy_is_log_2(pairs, beta, smoothing):
    chosen, rejected, _, _ = columns(pairs)
    losses, *_ = dpo_loss(chosen, rejected, chosen, rejected, beta=beta, label_smoothing=smoothing)
    assert_close(losses, torch.full_like(losses, math.log(2)))


@given(PAIRS)
def test_dpo_falls_as_the_chosen_response_gains(pairs):
    chosen, *others = columns(pairs)
    before = dpo_loss(chosen, *others, beta=0.1).losses
    after = dpo_loss(chosen + 1, *others, beta=0.1).losses
    assert (after < before).all()


@given(PAIRS, SMOOTHING)
def test_dpo_of_the_swapped_pair_smooths_the_other_way(pairs, smoothing):
    w, l, ref_w, ref_l = columns(pairs)
    one = dpo_loss(w, l, ref_w, ref_l, beta=0.1, label_smoothing=smoothing).losses
    other = dpo_loss(l, w, ref_l, ref_w, beta=0.1, label_smoothing=1 - smoothing).losses
    assert_close(one, other)


@given(PAIRS, st.floats(-5, 5))
def test_dpo_does_not_see_what_policy_and_reference_share(pairs, shift):
    w, l, ref_w, ref_l = columns(pairs)
    losses = dpo_loss(w, l, ref_w, ref_l, beta=0.3).losses
    shifted = dpo_loss(w + shift, l, ref_w + shift, ref_l, beta=0.3).losses
    assert_close(losses, shifted)


@given(PAIRS, BETA)
def test_beta_scales_the_log_ratios(pairs, beta):
    w, l, ref_w, ref_l = columns(pairs)
    scaled = dpo_loss(beta * w, beta * l, beta * ref_w, beta * ref_l, beta=1.0)
    for part, expected in zip(dpo_loss(w, l, ref_w, ref_l, beta=beta), scaled, strict=True):
        assert_close(part, expected)


@given(PAIRS, st.floats(0.01, 2), SMOOTHING)
def test_dpo_is_the_likelihood_of_a_bradley_terry_model(pairs, beta, smoothing):
    """The paper's eq. 6, where rewards compete as exponentials, in fifty decimal digits."""
    getcontext().prec = 50
    losses = dpo_loss(*columns(pairs), beta=beta, label_smoothing=smoothing).losses.tolist()
    for loss, (w, l, ref_w, ref_l) in zip(losses, pairs, strict=True):
        strength_w = (Decimal(beta) * (Decimal(w) - Decimal(ref_w))).exp()
        strength_l = (Decimal(beta) * (Decimal(l) - Decimal(ref_l))).exp()
        total = strength_w + strength_l
        eps = Decimal(smoothing)
        expected = -(1 - eps) * (strength_w / total).ln() - eps * (strength_l / total).ln()
        assert loss == pytest.approx(float(expected), rel=1e-9, abs=1e-12)


def test_dpo_refuses_to_broadcast():
    with pytest.raises(ValueError, match=r"reference_chosen_logps \(1,\)"):
        dpo_loss(torch.zeros(2), torch.zeros(2), torch.zeros(1), torch.zeros(2), beta=0.1)


# SimPO


def test_simpo_by_hand():
    # margin = 2 * (-1 - -1.75 - 0.25) = 1; rewards 2 * -1 and 2 * -1.75.
    losses, chosen_rewards, rejected_rewards = simpo_loss(
        *columns([(-1, -1.75)]), beta=2.0, gamma_beta_ratio=0.25
    )
    assert_close(losses, numbers(math.log1p(math.exp(-1))))
    assert_close(chosen_rewards, numbers(-2.0))
    assert_close(rejected_rewards, numbers(-3.5))


def test_simpo_reads_its_margin_as_a_share_of_beta():
    # The published mix-up: 0.474077 if 0.25 is gamma / beta, 0.386871 if it is gamma.
    losses, *_ = simpo_loss(*columns([(-1, -1.5)]), beta=2.0, gamma_beta_ratio=0.25)
    assert_close(losses, numbers(0.474077), atol=1e-6, rtol=0)


def test_simpo_smooths_around_the_same_margin():
    # margin 1 again: 0.8 * log(1 + e^-1) + 0.2 * log(1 + e) = log(1 + e^-1) + 0.2.
    losses, *_ = simpo_loss(
        *columns([(-1, -1.75)]), beta=2.0, gamma_beta_ratio=0.25, label_smoothing=0.2
    )
    assert_close(losses, numbers(math.log1p(math.exp(-1)) + 0.2))


@given(PAIRS, BETA, st.floats(0, 2))
def test_simpo_is_log_2_exactly_where_the_lead_is_reached(pairs, beta, ratio):
    _, rejected, _, _ = columns(pairs)
    losses, *_ = simpo_loss(rejected + ratio, rejected, beta=beta, gamma_beta_ratio=ratio)
    assert_close(losses, torch.full_like(losses, math.log(2)))


@given(PAIRS, st.floats(0, 1), st.floats(0.1, 1))
def test_simpo_asks_more_of_a_larger_margin(pairs, ratio, more):
    chosen, rejected, _, _ = columns(pairs)
    easy = simpo_loss(chosen, rejected, gamma_beta_ratio=ratio, beta=0.2).losses
    hard = simpo_loss(chosen, rejected, gamma_beta_ratio=ratio + more, beta=0.2).losses
    assert (hard > easy).all()


@given(PAIRS, BETA, SMOOTHING)
def test_simpo_without_a_margin_is_dpo_with_a_flat_reference(pairs, beta, smoothing):
    chosen, rejected, flat, _ = columns(pairs)
    simpo = simpo_loss(chosen, rejected, beta=beta, gamma_beta_ratio=0, label_smoothing=smoothing)
    dpo = dpo_loss(chosen, rejected, flat, flat, beta=beta, label_smoothing=smoothing)
    assert_close(simpo.losses, dpo.losses)


@given(
    st.lists(st.floats(-5, 0), min_size=1, max_size=6),
    st.lists(st.floats(-5, 0), min_size=1, max_size=6),
)
def test_simpo_is_the_paper_s_formula_over_tokens(chosen_tokens, rejected_tokens):
    """Eq. 6 with its own symbols, beta/|y| and gamma, in plain floats."""
    beta, gamma = 2.5, 1.375
    reward_w = beta / len(chosen_tokens) * math.fsum(chosen_tokens)
    reward_l = beta / len(rejected_tokens) * math.fsum(rejected_tokens)
    expected = math.log(1 + math.exp(-(reward_w - reward_l - gamma)))
    losses, *_ = simpo_loss(
        numbers(*chosen_tokens).mean(0, keepdim=True),
        numbers(*rejected_tokens).mean(0, keepdim=True),
        beta=beta,
        gamma_beta_ratio=gamma / beta,
    )
    assert_close(losses, numbers(expected))


def test_simpo_refuses_to_broadcast():
    with pytest.raises(ValueError, match=r"policy_rejected_logps \(1,\)"):
        simpo_loss(torch.zeros(2), torch.zeros(1))


# WPO


def test_wpo_by_hand():
    # means -4/4 and -6/3, weight e^-3; DPO's margin 0.5 * ((-4 - -5) - (-6 - -5)) = 1.
    losses, chosen_rewards, rejected_rewards = wpo_loss(
        *columns([(-4, -6, -5, -5)]), torch.tensor([4]), torch.tensor([3]), beta=0.5
    )
    assert_close(losses, numbers(math.exp(-3) * math.log1p(math.exp(-1))))
    assert_close(chosen_rewards, numbers(0.5))
    assert_close(rejected_rewards, numbers(-0.5))


def test_wpo_weights_by_hand():
    # With alignment: (-4 - -3)/4 + (-6 - -4.5)/3 = -0.25 - 0.5; without: -1 - 2.
    pair = (*columns([(-4, -6)]), torch.tensor([4]), torch.tensor([3]))
    assert_close(wpo_weights(*pair), numbers(math.exp(-3)))
    assert_close(wpo_weights(*pair, numbers(-3.0), numbers(-4.5)), numbers(math.exp(-0.75)))


def test_no_weight_passes_1():
    # Greedy text under sampled alignment: (-2 - -6)/2 = 2 nats per token too likely, twice.
    pair = (*columns([(-2, -2)]), torch.tensor([2]), torch.tensor([2]))
    assert wpo_weights(*pair, numbers(-6.0), numbers(-6.0)).item() == 1


def test_an_empty_response_counts_as_a_mean_of_0():
    weights = wpo_weights(*columns([(0, -6)]), torch.tensor([0]), torch.tensor([3]))
    assert_close(weights, numbers(math.exp(-2)))


@given(WEIGHED)
def test_weights_lie_between_0_and_1_and_carry_no_gradient(rows):
    chosen, rejected, chosen_lengths, rejected_lengths = columns(rows)
    weights = wpo_weights(
        chosen.requires_grad_(), rejected.requires_grad_(), chosen_lengths, rejected_lengths
    )
    assert ((weights >= 0) & (weights <= 1)).all()
    assert not weights.requires_grad


@given(WEIGHED, st.integers(2, 5))
def test_a_response_said_twice_weighs_the_same(rows, times):
    chosen, rejected, chosen_lengths, rejected_lengths = columns(rows)
    once = wpo_weights(chosen, rejected, chosen_lengths, rejected_lengths)
    repeated = wpo_weights(
        times * chosen, times * rejected, times * chosen_lengths, times * rejected_lengths
    )
    assert_close(once, repeated)


@given(WEIGHED)
def test_what_the_policy_expects_of_itself_weighs_1(rows):
    chosen, rejected, *lengths = columns(rows)
    weights = wpo_weights(chosen, rejected, *lengths, chosen, rejected)
    assert_close(weights, torch.ones_like(weights))


@given(WEIGHED, SMOOTHING)
def test_wpo_is_weights_times_dpo_in_value_and_gradient(rows, smoothing):
    chosen, rejected, *lengths = columns(rows)
    chosen, rejected = chosen.requires_grad_(), rejected.requires_grad_()
    flat = torch.full_like(chosen, -20)
    wpo = wpo_loss(chosen, rejected, flat, flat, *lengths, beta=0.1, label_smoothing=smoothing)
    dpo = dpo_loss(chosen, rejected, flat, flat, beta=0.1, label_smoothing=smoothing)
    weights = wpo_weights(chosen, rejected, *lengths)
    assert_close(wpo.losses, weights * dpo.losses)
    assert_close(wpo.chosen_rewards, dpo.chosen_rewards)
    assert_close(wpo.rejected_rewards, dpo.rejected_rewards)
    gradients = torch.autograd.grad(wpo.losses.sum(), (chosen, rejected))
    expected = torch.autograd.grad((weights * dpo.losses).sum(), (chosen, rejected))
    for gradient, of_dpo in zip(gradients, expected, strict=True):
        assert_close(gradient, of_dpo)


@pytest.mark.parametrize("kind", ["none", "sampled", "greedy"])
def test_wpo_is_the_paper_s_formula_over_a_vocabulary(kind):
    """Probabilities by a plain softmax, geometric means by products, one token at a time."""
    generator = torch.Generator().manual_seed(0)
    beta, pairs = 0.1, []
    for _ in range(4):
        lengths = torch.randint(1, 6, (2,), generator=generator).tolist()
        pairs.append([torch.randn(n, 7, generator=generator).double() * 2 for n in lengths])
    own = {
        "none": lambda p: 1.0,
        "sampled": lambda p: math.fsum(x * x for x in p),
        "greedy": max,
    }[kind]
    sums, terms, expected = [], [], []
    for responses in pairs:
        likelihoods, alignments, weight = [], [], 1.0
        for logits in responses:
            rows = [[math.exp(x) for x in row] for row in logits.tolist()]
            rows = [[x / math.fsum(row) for x in row] for row in rows]
            # The token said is the first of the vocabulary, always.
            likelihoods.append(math.prod(p[0] for p in rows))
            alignments.append(math.prod(own(p) for p in rows))
            weight *= (likelihoods[-1] / alignments[-1]) ** (1 / len(rows))
        sums.append([math.log(x) for x in likelihoods])
        terms.append([math.log(x) for x in alignments])
        odds = (likelihoods[0] / likelihoods[1]) ** beta
        expected.append(min(1.0, weight) * math.log(1 + 1 / odds))
    lengths = torch.tensor([[len(logits) for logits in pair] for pair in pairs])
    flat = torch.full((4,), -9.0, dtype=torch.float64)
    result = wpo_loss(
        *columns(sums), flat, flat, *lengths.unbind(1), *columns(terms), beta=beta, alignment=kind
    )
    assert_close(result.losses, numbers(*expected))


def test_alignment_none_leaves_the_terms_out():
    pair = (*columns([(-4, -6, -5, -5)]), torch.tensor([4]), torch.tensor([3]))
    terms = (numbers(-3.0), numbers(-4.5))
    without = wpo_loss(*pair, beta=0.5).losses
    assert_close(wpo_loss(*pair, *terms, beta=0.5, alignment="none").losses, without)
    assert (wpo_loss(*pair, *terms, beta=0.5).losses > without).all()


@pytest.mark.parametrize("kind", ["sampled", "greedy"])
def test_alignment_asked_for_by_name_needs_the_terms(kind):
    pair = (*columns([(-4, -6, -5, -5)]), torch.tensor([4]), torch.tensor([3]))
    named = rf"'{kind}' needs chosen_alignment_logps and rejected_alignment_logps"
    with pytest.raises(ValueError, match=named):
        wpo_loss(*pair, alignment=kind)


def test_one_alignment_term_without_the_other_is_refused():
    pair = (*columns([(-4, -6)]), torch.tensor([4]), torch.tensor([3]))
    with pytest.raises(ValueError, match="needs rejected_alignment_logps"):
        wpo_weights(*pair, numbers(-3.0))


def test_wpo_refuses_to_broadcast():
    rows = [torch.zeros(2)] * 4
    with pytest.raises(ValueError, match=r"rejected_lengths \(1,\)"):
        wpo_loss(*rows, torch.ones(2), torch.ones(1))
    with pytest.raises(ValueError, match=r"chosen_alignment_logps \(2, 3\)"):
        wpo_loss(*rows, torch.ones(2), torch.ones(2), torch.zeros(2, 3), torch.zeros(2))
