"""Columns of the data: what each does to a loss, and who refuses which."""

import math

import pytest
import torch
from losses.pair_formulas import FORMULAS
from losses.small_pairs import numbers
from losses.test_every_preference_loss import arguments
from torch.testing import assert_close

from lit_align.errors import UserError
from lit_align.losses import (
    PAIR_COLUMNS,
    PREFERENCE_LOSSES,
    CombinedConfig,
    DPOConfig,
    check_columns,
    compute_loss,
    remark,
)
from lit_align.losses.columns import exchanged, objection

COMPARE_PAIRS = {"aot", "aot_unpaired", "beta_dpo"}
HONOURED = {
    column: [n for n, v in PREFERENCE_LOSSES.items() if objection(v, column) is None]
    for column in PAIR_COLUMNS
}
REFUSED = [(n, c) for c in PAIR_COLUMNS for n in PREFERENCE_LOSSES if n not in HONOURED[c]]
# Whose loss of soft labels is the mixture of the two plain ones.
MIXED = [name for name in HONOURED["label_prob"] if name != "sppo_soft"]
ROWS = 5


def pairs(name, dtype=torch.float64, scale=4.0):
    """A batch of `ROWS` pairs with all that the loss reads of policy and reference."""
    tensors = arguments(name, ROWS, dtype, scale)
    return {
        key: values
        for key, values in tensors.items()
        if key not in PAIR_COLUMNS or key in PREFERENCE_LOSSES[name].tensors
    }


def loss_of(name, batch, **columns):
    policy = [batch[f"policy_{side}_logps"] for side in ("chosen", "rejected")]
    return compute_loss(DPOConfig(name), batch | columns, *policy)


def gradients_of(name, batch, **columns):
    """By the policy's log-probs of both responses, (2, B)."""
    leaves = {n: batch[n].clone().requires_grad_() for n in batch if n.startswith("policy_")}
    losses = loss_of(name, batch | leaves, **columns).losses
    found = torch.autograd.grad(losses.sum(), list(leaves.values()), materialize_grads=True)
    return torch.stack(found)


# Who honours what


def test_every_loss_of_one_pair_honours_weights():
    assert set(PREFERENCE_LOSSES) - set(HONOURED["weight"]) == COMPARE_PAIRS


def test_every_loss_of_one_pair_but_odpo_honours_soft_labels():
    assert set(PREFERENCE_LOSSES) - set(HONOURED["label_prob"]) == COMPARE_PAIRS | {"odpo"}


def test_the_losses_with_a_lead_to_set_honour_margins():
    assert set(HONOURED["margin"]) >= {
        *("dpo", "dpo_norm", "robust", "hinge", "odpo"),
        *("simpo", "simpo_hinge", "ld_dpo"),
    }
    assert not {"apo_zero", "ipo", "sft", "sppo_hard"} & set(HONOURED["margin"])


@pytest.mark.parametrize(("name", "column"), REFUSED)
def test_a_column_that_the_loss_cannot_honour_is_refused_by_name(name, column):
    said = rf"loss '{name}' .*'{column}' that the batch has.*data\.ignore_columns=\[{column}\]"
    with pytest.raises(UserError, match=said):
        loss_of(name, pairs(name), **{column: torch.ones(ROWS)})
    with pytest.raises(UserError, match=said.replace("batch", "training data")):
        check_columns(
            DPOConfig(name), {column, *PREFERENCE_LOSSES[name].columns}, "the training data"
        )


@pytest.mark.parametrize("column", PAIR_COLUMNS)
def test_a_column_that_the_loss_honours_is_read(column):
    for name in HONOURED[column]:
        batch = pairs(name)
        plain = loss_of(name, batch).losses
        other = {"weight": 3.0, "margin": 7.0, "label_prob": 0.25}[column]
        check_columns(DPOConfig(name), {column, *PREFERENCE_LOSSES[name].columns}, "the data")
        read = loss_of(name, batch, **{column: torch.full((ROWS,), other)}).losses
        assert (read != plain).any(), name


def test_data_without_a_column_that_the_loss_needs_is_refused():
    with pytest.raises(UserError, match=r"'odpo' reads margin .* the training data does not have"):
        check_columns(DPOConfig("odpo"), {"weight"}, "the training data")


def test_other_columns_do_not_matter():
    check_columns(DPOConfig("aot"), {"score", "prompt"}, "the training data")


# Sums of losses


def test_a_margin_of_a_sum_is_for_the_terms_that_have_a_use_for_it():
    config = CombinedConfig({"sft": {"weight": 1.0}, "dpo": {"weight": 1.0}})
    check_columns(config, {"margin", "weight", "label_prob"}, "the data")
    none = CombinedConfig({"sft": {"weight": 1.0}, "nca_pair": {"weight": 1.0}})
    with pytest.raises(UserError, match="loss 'sft' asks for no lead"):
        check_columns(none, {"margin"}, "the data")


@pytest.mark.parametrize("column", ["weight", "label_prob"])
def test_a_weight_or_label_of_a_sum_must_suit_every_term(column):
    config = CombinedConfig({"dpo": {"weight": 1.0}, "aot": {"weight": 1.0}})
    with pytest.raises(UserError, match=f"loss 'aot' compares all pairs.*'{column}'"):
        check_columns(config, {column}, "the data")


def test_a_sum_needs_what_one_of_its_terms_needs():
    config = CombinedConfig({"sft": {"weight": 1.0}, "odpo": {"weight": 1.0}})
    with pytest.raises(UserError, match=r"'sft \+ odpo' reads margin"):
        check_columns(config, set(), "the data")


# Weights


@pytest.mark.parametrize("name", HONOURED["weight"])
def test_a_weight_multiplies_the_pair_s_loss_and_gradient(name):
    batch, weight = pairs(name), numbers(0.0, 1.0, 2.0, 0.5, 7.0)
    plain, heavy = loss_of(name, batch), loss_of(name, batch, weight=weight)
    assert_close(heavy.losses, weight * plain.losses)
    assert_close(heavy.chosen_rewards, plain.chosen_rewards)
    gradients = gradients_of(name, batch, weight=weight)
    assert_close(gradients, weight * gradients_of(name, batch))
    assert (gradients[:, 0] == 0).all()


# Soft labels


@pytest.mark.parametrize("name", HONOURED["label_prob"])
def test_a_certain_label_is_the_plain_loss(name):
    batch = pairs(name)
    for part, plain in zip(
        loss_of(name, batch, label_prob=torch.ones(ROWS)), loss_of(name, batch), strict=True
    ):
        assert_close(part, plain)


@pytest.mark.parametrize("name", HONOURED["label_prob"])
def test_a_label_that_is_certainly_wrong_is_the_loss_of_the_sides_exchanged(name):
    """Everything of the two sides changes places, and the rewards stay where they are."""
    batch = pairs(name)
    wrong = loss_of(name, batch, label_prob=torch.zeros(ROWS))
    assert_close(wrong.losses, loss_of(name, exchanged(batch)).losses)
    assert_close(wrong.chosen_rewards, loss_of(name, batch).chosen_rewards)


@pytest.mark.parametrize("name", HONOURED["label_prob"])
def test_a_tie_does_not_know_its_sides(name):
    batch, tie = pairs(name), torch.full((ROWS,), 0.5)
    there, back = (loss_of(name, b, label_prob=tie).losses for b in (batch, exchanged(batch)))
    assert_close(there, back)


@pytest.mark.parametrize("name", MIXED)
def test_a_soft_pair_is_two_pairs_with_weights(name):
    """Also its margin: the lead is that of whichever response is the preferred one."""
    batch, right = pairs(name), numbers(0.9, 0.5, 0.1, 0.75, 1.0)
    if name in HONOURED["margin"]:
        batch["margin"] = numbers(1.0, -2.0, 0.0, 0.5, 3.0)
    soft = loss_of(name, batch, label_prob=right).losses
    as_it_stands = loss_of(name, batch, weight=right).losses
    other_way_round = loss_of(name, exchanged(batch), weight=1 - right).losses
    assert_close(soft, as_it_stands + other_way_round)


@pytest.mark.parametrize("name", ["dpo", "dpo_norm", "cpo_preference", "dpo_alpha", "dpo_js"])
@pytest.mark.parametrize("with_margin", [False, True])
def test_label_smoothing_is_one_probability_for_all_pairs(name, with_margin):
    batch, eps = pairs(name), 0.15
    if with_margin and name in HONOURED["margin"]:
        batch["margin"] = numbers(1.0, -2.0, 0.0, 0.5, 3.0)
    policy = [batch[f"policy_{side}_logps"] for side in ("chosen", "rejected")]
    smoothed = compute_loss(DPOConfig(name, label_smoothing=eps), batch, *policy)
    soft = loss_of(name, batch, label_prob=torch.full((ROWS,), 1 - eps, dtype=torch.float64))
    assert_close(smoothed.losses, soft.losses)


def test_soft_labels_by_hand():
    # Margins 0.1 * ((-1 - -5) - (-3 - -5)) and back: 0.75 * S(0.2) + 0.25 * S(-0.2).
    batch = {f"reference_{side}_logps": numbers(-5.0) for side in ("chosen", "rejected")}
    batch |= {"policy_chosen_logps": numbers(-1.0), "policy_rejected_logps": numbers(-3.0)}
    expected = 0.75 * math.log1p(math.exp(-0.2)) + 0.25 * math.log1p(math.exp(0.2))
    assert_close(loss_of("dpo", batch, label_prob=numbers(0.75)).losses, numbers(expected))
    # And 2 times as much, of a lead that is to be 0.5 either way.
    lead = 0.75 * math.log1p(math.exp(0.3)) + 0.25 * math.log1p(math.exp(0.7))
    columns = {"weight": numbers(2.0), "margin": numbers(0.5), "label_prob": numbers(0.75)}
    assert_close(loss_of("dpo", batch, **columns).losses, numbers(2 * lead))


def test_lengths_and_the_reference_change_sides_too():
    # R-DPO: 0.1 * ((-1 - -5) - (-3 - -9)) + 0.01 * (7 - 4) = -0.17, and 0.17 the other way round.
    batch = {"policy_chosen_logps": numbers(-1.0), "policy_rejected_logps": numbers(-3.0)}
    batch |= {"reference_chosen_logps": numbers(-5.0), "reference_rejected_logps": numbers(-9.0)}
    batch |= {"chosen_lengths": torch.tensor([7]), "rejected_lengths": torch.tensor([4])}
    expected = 0.75 * math.log1p(math.exp(0.17)) + 0.25 * math.log1p(math.exp(-0.17))
    assert_close(loss_of("r_dpo", batch, label_prob=numbers(0.75)).losses, numbers(expected))


def test_sppo_of_soft_labels_has_one_gradient_in_two_ways():
    """The mixture of the hard loss's two sides is the soft loss and a constant."""
    batch = pairs("sppo_hard")
    soft, hard = (
        gradients_of(name, batch, label_prob=numbers(0.9, 0.5, 0.1, 0.75, 1.0))
        for name in ("sppo_soft", "sppo_hard")
    )
    assert_close(soft, hard)


def test_sppo_soft_says_when_the_data_leaves_it_hard():
    said = remark(DPOConfig("sppo_soft"), {"weight"}, "the training data")
    assert said == (
        "loss 'sppo_soft' takes every label for certain: the training data has no column "
        "'label_prob'"
    )
    assert remark(DPOConfig("sppo_soft"), {"label_prob"}, "the training data") is None
    assert remark(DPOConfig("dpo"), (), "the training data") is None


# Margins


@pytest.mark.parametrize("name", [n for n in HONOURED["margin"] if n != "odpo"])
def test_a_margin_of_0_is_none_and_a_larger_one_costs_more(name):
    batch = pairs(name)
    plain, zero, one = (
        loss_of(name, batch, **columns).losses
        for columns in ({}, {"margin": torch.zeros(ROWS)}, {"margin": torch.ones(ROWS)})
    )
    assert_close(zero, plain)
    assert (one >= plain).all()
    assert (one > plain).any()


@pytest.mark.parametrize("name", [n for n in HONOURED["margin"] if n not in ("odpo", "robust")])
def test_a_margin_is_in_the_unit_of_the_rewards(name):
    """A response with so much more reward than before is where it was without the margin."""
    batch, lead = pairs(name), numbers(1.0, -2.0, 0.0, 0.5, 3.0)
    plain = loss_of(name, batch).losses
    reward_per_nat = (
        loss_of(name, _moved(batch, 1.0)).chosen_rewards - loss_of(name, batch).chosen_rewards
    )
    moved = _moved(batch, lead / reward_per_nat)
    assert_close(loss_of(name, moved, margin=lead).losses, plain)


def _moved(batch, nats):
    """The policy's preferred response likelier by so much, all of its tokens alike."""
    moved = {n: t + nats for n, t in batch.items() if n.startswith("policy_chosen")}
    return batch | moved


# Extremes


@pytest.mark.parametrize("margin", [1e4, -1e4])
@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_values_and_gradients_are_finite_with_all_columns_at_once(name, margin):
    batch = pairs(name, torch.float32, 1.0)
    batch["policy_chosen_logps"] = batch["policy_chosen_logps"] + margin
    values = {"weight": 3.0, "margin": 1e4, "label_prob": 0.3}
    columns = {c: torch.full((ROWS,), v) for c, v in values.items() if name in HONOURED[c]}
    assert loss_of(name, batch, **columns).losses.isfinite().all()
    assert gradients_of(name, batch, **columns).isfinite().all()


@pytest.mark.parametrize(
    ("column", "bad"),
    [
        ("weight", -1.0),
        ("weight", math.nan),
        ("weight", math.inf),
        ("label_prob", 1.5),
        ("label_prob", -0.1),
        ("label_prob", math.nan),
        ("margin", math.inf),
        ("margin", math.nan),
    ],
)
def test_values_of_a_loader_of_one_s_own_are_looked_at(column, bad):
    values = torch.tensor([1.0, 1.0, bad, 1.0, 1.0])
    with pytest.raises(UserError, match=rf"'{column}' must be .* is {bad:g} for pair 2"):
        loss_of("dpo", pairs("dpo"), **{column: values})


@pytest.mark.parametrize("column", PAIR_COLUMNS)
def test_no_column_broadcasts(column):
    with pytest.raises(ValueError, match=rf"one shape: .*{column} \(1,\)"):
        loss_of("dpo", pairs("dpo"), **{column: torch.ones(1)})


def test_columns_of_half_precision_do_not_round_the_loss():
    batch = pairs("dpo")
    half = loss_of("dpo", batch, label_prob=torch.full((ROWS,), 0.75, dtype=torch.bfloat16))
    assert half.losses.dtype == torch.float64
    assert_close(half.losses, loss_of("dpo", batch, label_prob=numbers(*[0.75] * ROWS)).losses)


def test_every_formula_of_the_papers_is_honoured_in_soft_labels_too():
    """The independent formulas once more, mixed by hand."""
    right = numbers(0.9, 0.5, 0.1, 0.75, 1.0)
    for name in MIXED:
        batch = pairs(name)
        if name in HONOURED["margin"]:
            batch["margin"] = numbers(1.0, -2.0, 0.0, 0.5, 3.0)
        formula = FORMULAS[name]
        expected = right * formula(**batch) + (1 - right) * formula(**exchanged(batch))
        ours = loss_of(name, batch, label_prob=right).losses
        assert_close(ours, expected, rtol=1e-9, atol=1e-12)
