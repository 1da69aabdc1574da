"""The weight of an entropy bonus: by hand, by property, and what a config refuses of it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from lit_align.errors import UserError
from lit_align.losses import (
    ENTROPY_CONTROLS,
    EntropyBonus,
    GRPOConfig,
    aggregate,
    grpo_terms,
    next_entropy_bonus,
    token_losses,
    window_counts,
)

NATS = st.floats(0, 12)


def controlled(target=0.2, **options):
    return GRPOConfig(entropy_control="target", entropy_target=target, **options)


def walked(config, entropies, start=None):
    """Where the control stands after each of the steps."""
    coefficient = config.entropy_bonus if start is None else start
    for entropy in entropies:
        bonus = next_entropy_bonus(config, coefficient, entropy)
        coefficient = bonus.coefficient
        yield bonus


def test_the_paper_s_rule_by_hand():
    # Below the target it goes up and acts, above it goes down and does not; never below 0.
    steps = walked(controlled(0.2, entropy_step=0.25), [0.1, 0.2, 0.3, 0.1, 0.9, 0.9, 0.9])
    assert list(steps) == [
        (0.25, 0.25),
        (0.5, 0.5),
        (0.25, 0.0),
        (0.5, 0.5),
        (0.25, 0.0),
        (0.0, 0.0),
        (0.0, 0.0),
    ]


def test_a_fixed_bonus_does_not_move():
    assert set(walked(GRPOConfig(entropy_bonus=0.01), [0.0, 5.0])) == {EntropyBonus(0.01, 0.01)}


@given(st.lists(NATS, max_size=40), st.floats(0, 1), st.floats(0.01, 3))
def test_the_coefficient_stays_within_its_bounds_and_acts_only_below_the_target(
    entropies, start, target
):
    config = controlled(target, entropy_bonus_min=0.1, entropy_bonus_max=0.5, entropy_step=0.125)
    for entropy, bonus in zip(entropies, walked(config, entropies, start), strict=True):
        assert 0.1 <= bonus.coefficient <= 0.5
        assert bonus.weight == (bonus.coefficient if entropy <= target else 0)


@given(NATS, NATS, st.floats(0, 1))
def test_a_lower_entropy_never_gets_a_smaller_bonus(one, other, start):
    low, high = sorted([one, other])
    config = controlled(1.0)
    assert (
        next_entropy_bonus(config, start, low).weight
        >= next_entropy_bonus(config, start, high).weight
    )


def test_the_bonus_is_of_every_trained_token_also_of_those_a_filter_leaves_out():
    """0.5 x (1 + 2 + 3) over the three tokens of the mask, whatever is kept and weighs what."""
    config = GRPOConfig(advantage="group_mean")
    new, mask = torch.full((1, 4), -1.0).double(), torch.tensor([[True, True, True, False]])
    entropy = torch.tensor([[1.0, 2.0, 3.0, 9.0]]).double().requires_grad_()
    one = torch.ones_like(new)
    weights, kept = torch.tensor([[0.0, 2.0, 1.0, 1.0]]).double(), mask.roll(1)
    terms = grpo_terms(new, one, one, None, config, weights, kept)
    plain = token_losses(config, terms)
    bonus = plain - token_losses(config, terms, entropy, 0.5)
    counts = window_counts(mask, torch.tensor([0]))
    share = aggregate(config, bonus, mask, counts)
    assert_close(share.item(), 0.5 * 6 / 3)
    (gradient,) = torch.autograd.grad(share, entropy)
    assert_close(gradient, torch.tensor([[1.0, 1.0, 1.0, 0.0]]).double() * 0.5 / 3)


def test_the_weight_of_a_control_takes_the_place_of_the_config_s():
    config = GRPOConfig(entropy_bonus=0.3)
    one = torch.ones(1, 1)
    terms = grpo_terms(-one, one, one, None, config)
    assert_close(token_losses(config, terms, one, 0.0), -one)
    assert_close(token_losses(config, terms, one, 0.1), -1.1 * one)
    with pytest.raises(UserError, match=r"entropy_bonus of 0\.1 needs entropies"):
        token_losses(config, terms, None, 0.1)


def test_a_config_knows_whether_there_is_a_bonus():
    assert not GRPOConfig().has_entropy_bonus
    assert GRPOConfig(entropy_bonus=0.1).has_entropy_bonus
    assert controlled().has_entropy_bonus
    assert GRPOConfig(**controlled().as_dict()) == controlled()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"entropy_control": "pid"}, "unknown entropy_control 'pid'; known: fixed, target"),
        ({"entropy_control": "target"}, "needs entropy_target, .* no default"),
        ({"entropy_control": "target", "entropy_target": 0.0}, "entropy_target must be .* above 0"),
        (
            {"entropy_control": "target", "entropy_target": 1.0, "entropy_step": -0.1},
            "entropy_step must be .* above 0",
        ),
        (
            {
                "entropy_control": "target",
                "entropy_target": 1.0,
                "entropy_bonus_min": 0.2,
                "entropy_bonus_max": 0.1,
            },
            "entropy_bonus_max must not be below entropy_bonus_min = 0.2, and it is 0.1",
        ),
        (
            {"entropy_control": "target", "entropy_target": 1.0, "entropy_bonus": 2.0},
            "starts from entropy_bonus, and 2 is above entropy_bonus_max 1",
        ),
        ({"entropy_target": 0.5}, "nothing that was chosen reads entropy_target.*'fixed'"),
    ],
)
def test_a_control_that_cannot_be_honoured_is_refused(options, said):
    with pytest.raises(UserError, match=said):
        GRPOConfig(**options)


@pytest.mark.parametrize("name", ENTROPY_CONTROLS)
def test_every_control_is_reached_through_the_config(name):
    values = {"entropy_target": 1.0} if name == "target" else {}
    bonus = next_entropy_bonus(GRPOConfig(entropy_control=name, **values), 0.5, 0.5)
    assert bonus.weight == bonus.coefficient > 0
