"""From a config and a batch to a loss; and configs that a loss cannot honour."""

import copy
import math
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from lit_align.errors import UserError
from lit_align.losses import (
    PREFERENCE_LOSSES,
    DPOConfig,
    DPOLossType,
    TensorCache,
    compute_loss,
    dpo_loss,
    wpo_loss,
)

# Word for word the usage examples of the functions this package keeps callable; only the package
# they are imported from is another.
USAGE = """
from lit_align.losses import compute_loss, DPOConfig, DPOLossType
from lit_align.losses import TensorCache

# Example: computing DPO loss inside the training loop
args = DPOConfig(loss_type=DPOLossType.dpo, beta=0.1, label_smoothing=0.0)

# Forward pass (done by the training loop)
policy_chosen_logps, policy_rejected_logps, _ = forward_fn(model, batch)

# Compute loss (dispatches to dpo_loss internally)
losses, chosen_rewards, rejected_rewards = compute_loss(
    args=args,
    batch=batch,
    policy_chosen_logps=policy_chosen_logps,
    policy_rejected_logps=policy_rejected_logps,
    reference_cache=reference_cache,
)

loss = losses.mean()
loss.backward()
"""

USAGE_WITHOUT_A_REFERENCE = """
# Example: SimPO (no reference cache needed)
args = DPOConfig(loss_type=DPOLossType.simpo, beta=2.0, gamma_beta_ratio=0.3)

losses, chosen_rewards, rejected_rewards = compute_loss(
    args=args,
    batch=batch,
    policy_chosen_logps=policy_chosen_logps,
    policy_rejected_logps=policy_rejected_logps,
    reference_cache=None,
)
"""


def softplus(x):
    return math.log1p(math.exp(x))


def test_the_documented_usage_runs_word_for_word():
    model = torch.nn.Parameter(torch.tensor([-10.0, -12.0]))
    names = {
        "model": model,
        "forward_fn": lambda model, batch: (model, model - 1, None),
        "batch": {"index": torch.tensor([2, 0])},
        "reference_cache": TensorCache(
            {
                "chosen_logps": torch.tensor([-11.0, -99.0, -12.0]),
                "rejected_logps": torch.tensor([-14.0, -99.0, -11.0]),
            }
        ),
    }
    exec(USAGE, names)
    # Row 2 then row 0: margins 0.1 * ((-10 + 12) - (-11 + 11)) and 0.1 * ((-12 + 11) - (-13 + 14)).
    assert_close(names["losses"], torch.tensor([softplus(-0.2), softplus(0.2)]))
    assert_close(names["chosen_rewards"], torch.tensor([0.2, -0.1]))
    assert_close(names["rejected_rewards"], torch.tensor([0.0, 0.1]))
    assert model.grad.shape == (2,)
    exec(USAGE_WITHOUT_A_REFERENCE, names)
    # Margins 2 * (1 - 0.3).
    assert_close(names["losses"], torch.full((2,), softplus(-1.4)))


def batch_of(rows, width=5):
    labels = torch.tensor([[-100, *range(1, width)]] * rows)
    logps = torch.full((rows,), -8.0)
    return {
        "index": torch.arange(rows),
        "chosen_labels": labels,
        "rejected_labels": labels[:, :-1],
        "chosen_alignment_logps": logps + 2,
        "rejected_alignment_logps": logps + 1,
        "policy_prompt_logps": logps,
        "prompt_lengths": torch.full((rows,), 3),
        "draws": torch.linspace(0.1, 0.9, rows),
        **{
            f"{model}_{side}_head_logps": logps + 2
            for model in ("policy", "reference")
            for side in ("chosen", "rejected")
        },
    }


def columns_of(name, rows):
    """The columns of the data that a loss cannot do without."""
    return {column: torch.full((rows,), 1.5) for column in PREFERENCE_LOSSES[name].columns}


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_every_loss_runs_from_a_batch(name, rows):
    """One value a pair, for any batch size: 5 is also the width of the labels."""
    logps = torch.full((rows,), -8.0)
    cache = TensorCache({"chosen_logps": logps, "rejected_logps": logps})
    chosen, rejected = logps.clone().requires_grad_(), (logps - 0.75).requires_grad_()
    batch = batch_of(rows) | columns_of(name, rows)
    config = DPOConfig(name, **({"filtered_share": 0.0} if name == "beta_dpo" else {}))
    result = compute_loss(config, batch, chosen, rejected, cache)
    assert all(part.shape == (rows,) for part in result)
    assert not result.chosen_rewards.requires_grad
    assert not result.rejected_rewards.requires_grad
    # The likelihood of the preferred response is all there is to sft.
    leaves = [chosen] if name.startswith("sft") else [chosen, rejected]
    gradients = torch.autograd.grad(result.losses.sum(), leaves)
    assert all(g.isfinite().all() and (g != 0).all() for g in gradients)
    # Rows are alike, so each says what a row alone would.
    alone = {key: values[:1] for key, values in batch.items()}
    alone = compute_loss(config, alone, chosen[:1], rejected[:1], cache)
    assert_close(result.losses, alone.losses.expand(rows))


def test_rows_find_their_reference_by_index():
    cache = TensorCache(
        {"chosen_logps": torch.tensor([0.0, -1, -2]), "rejected_logps": torch.tensor([0.0, -5, -9])}
    )
    policy = torch.tensor([-3.0, -4.0])
    result = compute_loss(
        DPOConfig("dpo", beta=0.2), {"index": torch.tensor([2, 1])}, policy, policy, cache
    )
    expected = dpo_loss(
        policy, policy, torch.tensor([-2.0, -1.0]), torch.tensor([-9.0, -5.0]), beta=0.2
    )
    assert_close(result.losses, expected.losses)
    assert_close(result.rejected_rewards, torch.tensor([1.2, 0.2]))


def test_wpo_counts_the_labels_of_the_batch_and_reads_its_alignment_terms():
    batch = {**batch_of(1), "rejected_labels": torch.tensor([[7, -100, 3, 4]])}
    flat, policy = torch.tensor([-9.0]), torch.tensor([-8.0])
    cache = TensorCache({"chosen_logps": flat, "rejected_logps": flat})
    result = compute_loss(DPOConfig("wpo", beta=0.5), batch, policy, policy - 1, cache)
    # 4 and 2 tokens: a label in the first column is predicted by nothing.
    expected = wpo_loss(
        policy,
        policy - 1,
        flat,
        flat,
        torch.tensor([4]),
        torch.tensor([2]),
        torch.tensor([-6.0]),
        torch.tensor([-7.0]),
        beta=0.5,
    )
    assert_close(result.losses, expected.losses)
    # Means (-8 + 6) / 4 and (-9 + 7) / 2 weigh exp(-1.5); DPO's margin is 0.5 * (1 - 0).
    assert_close(result.losses, torch.tensor([math.exp(-1.5) * softplus(-0.5)]))


def test_an_average_is_taken_as_it_comes():
    """Dividing is done where the log-probs are made: here lengths change nothing."""
    policy = torch.tensor([-1.0, -2.0])
    short, long = (
        compute_loss(DPOConfig("simpo"), batch_of(2, width), policy, policy - 1)
        for width in (3, 50)
    )
    assert_close(short.losses, long.losses)


@pytest.mark.parametrize("name", [n for n, v in PREFERENCE_LOSSES.items() if v.reads_reference])
def test_without_a_reference_the_error_says_where_to_get_one(name):
    with pytest.raises(UserError, match=rf"'{name}'.*ReferenceCache"):
        compute_loss(
            DPOConfig(name), batch_of(1) | columns_of(name, 1), torch.zeros(1), torch.zeros(1)
        )


def test_without_an_index_the_error_says_what_is_missing():
    cache = TensorCache({"chosen_logps": torch.zeros(1), "rejected_logps": torch.zeros(1)})
    with pytest.raises(UserError, match=r"'dpo'.*batch\['index'\]"):
        compute_loss(DPOConfig(), {}, torch.zeros(1), torch.zeros(1), cache)


def test_without_labels_wpo_says_that_it_needs_lengths():
    cache = TensorCache({"chosen_logps": torch.zeros(1), "rejected_logps": torch.zeros(1)})
    with pytest.raises(ValueError, match="'wpo' needs chosen_lengths, rejected_lengths"):
        compute_loss(
            DPOConfig("wpo"), {"index": torch.tensor([0])}, torch.zeros(1), torch.zeros(1), cache
        )


def test_a_column_that_the_loss_reads_comes_from_the_batch():
    policy, flat = torch.tensor([-8.0, -7.0]), torch.tensor([-9.0, -9.0])
    cache = TensorCache({"chosen_logps": flat, "rejected_logps": flat})
    batch = {"index": torch.tensor([0, 1]), "margin": torch.tensor([1, 5])}
    result = compute_loss(DPOConfig("odpo", beta=0.5), batch, policy, policy - 1, cache)
    # Margins 0.5 * 1 less log 1 and log 5.
    assert_close(result.losses, torch.tensor([softplus(-0.5), softplus(math.log(5) - 0.5)]))


def test_without_the_column_the_error_says_what_to_add_to_the_data():
    cache = TensorCache({"chosen_logps": torch.zeros(1), "rejected_logps": torch.zeros(1)})
    with pytest.raises(UserError, match=r"'odpo' reads margin of each pair.*add such a column"):
        compute_loss(DPOConfig("odpo"), {"index": torch.tensor([0])}, *torch.zeros(2, 1), cache)


def test_a_shift_of_rewards_that_the_batch_has_is_read():
    policy, flat = torch.tensor([-8.0]), torch.tensor([-9.0])
    cache = TensorCache({"chosen_logps": flat, "rejected_logps": flat})
    batch = {"index": torch.tensor([0]), "delta": torch.tensor(0.25)}
    result = compute_loss(DPOConfig("bco_pair", beta=0.5), batch, policy, policy - 1, cache)
    # Rewards 0.5 and 0, less 0.25 each.
    assert_close(result.losses, torch.tensor([2 * softplus(-0.25)]))


def test_alignment_asked_for_by_name_must_be_in_the_batch():
    batch = {k: v for k, v in batch_of(1).items() if "alignment" not in k}
    cache = TensorCache({"chosen_logps": torch.zeros(1), "rejected_logps": torch.zeros(1)})
    with pytest.raises(ValueError, match="'greedy' needs chosen_alignment_logps"):
        compute_loss(
            DPOConfig("wpo", alignment="greedy"), batch, torch.zeros(1), torch.zeros(1), cache
        )


@pytest.mark.parametrize("name", ["IPO2", "", "DPO", None])
def test_an_unknown_loss_is_refused_with_the_known_ones(name):
    known = "dpo, .*dpo_norm, .*simpo, .*wpo"
    with pytest.raises(ValueError, match=known):
        compute_loss(SimpleNamespace(loss_type=name), {}, torch.zeros(1), torch.zeros(1))
    with pytest.raises(UserError, match=known):
        DPOConfig(name)


def test_any_object_with_the_hyperparameters_will_do():
    policy = torch.tensor([-1.0])
    args = SimpleNamespace(
        loss_type="simpo", beta=3.0, gamma_beta_ratio=0.2, label_smoothing=0.0, learning_rate=1e-6
    )
    config = DPOConfig("simpo", beta=3.0, gamma_beta_ratio=0.2)
    assert_close(
        compute_loss(args, {}, policy, policy - 1).losses,
        compute_loss(config, {}, policy, policy - 1).losses,
    )


@pytest.mark.parametrize(("alias", "name"), [("sigmoid", "dpo"), ("sigmoid_norm", "dpo_norm")])
def test_the_names_of_trl_are_aliases(alias, name):
    assert DPOConfig(alias) == DPOConfig(name)
    assert DPOConfig(alias).loss_type == name


def test_the_seed_s_names_are_the_losses():
    assert {str(member) for member in DPOLossType} == {"dpo", "dpo_norm", "simpo", "wpo"}
    for member in DPOLossType:
        assert DPOConfig(member) == DPOConfig(member.value)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("dpo", {"beta": 0.1, "label_smoothing": 0.0}),
        ("dpo_norm", {"beta": 5.0, "label_smoothing": 0.0}),
        ("simpo", {"beta": 2.0, "gamma_beta_ratio": 0.5, "label_smoothing": 0.0}),
        ("wpo", {"beta": 0.01, "label_smoothing": 0.0, "alignment": None}),
        ("robust", {"beta": 0.1, "label_smoothing": 0.1}),
        ("exo_pair", {"beta": 0.1, "label_smoothing": 1e-3}),
        ("ipo", {"beta": 0.1}),
        ("dpop", {"beta": 0.3, "dpop_lambda": 50.0}),
        ("slic_calibration", {"delta": 1.0}),
        ("ld_dpo", {"beta": 0.1, "ld_alpha": 0.5, "label_smoothing": 0.0}),
        ("simper", {}),
    ],
)
def test_each_loss_has_its_own_defaults(name, values):
    assert DPOConfig(name).as_dict() == {"loss_type": name, **values}


def test_some_losses_read_means():
    assert {name for name, variant in PREFERENCE_LOSSES.items() if variant.average_logps} == {
        *("dpo_norm", "ipo"),
        *("alphapo", "orpo_odds_ratio", "sft", "simper", "simpo", "simpo_hinge"),
    }


def test_what_a_loss_reads_follows_from_its_signature():
    assert {n for n in PREFERENCE_LOSSES if not PREFERENCE_LOSSES[n].reads_reference} == {
        *("alphapo", "cpo_preference", "orpo_odds_ratio", "sft", "sft_whole", "simper"),
        *("simpo", "simpo_hinge", "slic_calibration"),
    }
    assert {n for n in PREFERENCE_LOSSES if PREFERENCE_LOSSES[n].reads_alignment} == {"wpo"}
    lengths = {n for n in PREFERENCE_LOSSES if PREFERENCE_LOSSES[n].reads_lengths}
    assert lengths == {"wpo", "r_dpo", "sft_whole"}
    assert {n for n in PREFERENCE_LOSSES if PREFERENCE_LOSSES[n].reads_prompt} == {"sft_whole"}
    assert {n for n in PREFERENCE_LOSSES if PREFERENCE_LOSSES[n].reads_heads} == {"ld_dpo"}
    columns = {n: v.columns for n, v in PREFERENCE_LOSSES.items() if v.columns}
    assert columns == {"odpo": ("margin",)}


@pytest.mark.parametrize(
    ("loss", "option", "value", "said"),
    [
        ("dpo", "beta", 0, "above 0"),
        ("dpo", "beta", -0.1, "above 0"),
        ("dpo", "beta", "0.1", "a finite number"),
        ("dpo", "beta", True, "a finite number"),
        ("dpo", "beta", None, "a finite number"),
        ("dpo_norm", "beta", math.inf, "a finite number"),
        ("dpo_norm", "beta", 1e39, "a finite number"),
        ("ipo", "beta", 10**400, "a finite number"),
        ("simpo", "beta", math.nan, "a finite number"),
        ("simpo", "gamma_beta_ratio", -0.1, "not below 0"),
        ("simpo", "label_smoothing", 0.5, "below 0.5"),
        ("wpo", "label_smoothing", -0.01, "not below 0"),
        ("wpo", "alignment", "greedily", "None, none, sampled, greedy"),
        ("wpo", "alignment", 1, "None, none, sampled, greedy"),
        ("robust", "label_smoothing", 0.5, "below 0.5"),
        ("exo_pair", "label_smoothing", 0, "above 0"),
        ("discopop", "discopop_tau", 1.5, "not above 1"),
        ("dpo_alpha", "alpha", 1.1, "not above 1"),
        ("alphapo", "alpha", math.inf, "a finite number"),
        ("chi_po", "r_max", 0, "above 0"),
        ("dpop", "dpop_lambda", -1, "not below 0"),
        ("r_dpo", "alpha", -0.1, "not below 0"),
        ("slic_calibration", "delta", 0, "above 0"),
        ("ld_dpo", "ld_alpha", 1.1, "not above 1"),
    ],
)
def test_a_value_the_loss_cannot_honour_is_refused_when_the_config_is_made(
    loss, option, value, said
):
    with pytest.raises(UserError, match=rf"loss '{loss}': {option} must be .*{said}.*, not "):
        DPOConfig(loss, **{option: value})


@pytest.mark.parametrize(
    ("loss", "option"),
    [
        ("dpo", "gamma_beta_ratio"),
        ("simpo", "reference_free"),
        ("dpo", "alignment"),
        ("ipo", "label_smoothing"),
        ("hinge", "label_smoothing"),
        ("apo_zero", "label_smoothing"),
        ("slic_calibration", "beta"),
        ("orpo_odds_ratio", "beta"),
        ("simper", "beta"),
        ("sft", "label_smoothing"),
    ],
)
def test_an_option_the_loss_does_not_take_is_refused_not_ignored(loss, option):
    taken = ", ".join(PREFERENCE_LOSSES[loss].hyperparameters) or "no options"
    with pytest.raises(UserError, match=rf"loss '{loss}' takes {taken}, not {option}"):
        DPOConfig(loss, **{option: 0.1})


def test_a_config_shows_compares_and_keeps_its_values():
    config = DPOConfig("simpo", beta=3)
    assert repr(config) == (
        "DPOConfig(loss_type='simpo', beta=3.0, gamma_beta_ratio=0.5, label_smoothing=0.0)"
    )
    assert eval(repr(config)) == config
    assert config == DPOConfig(**config.as_dict())
    assert config != DPOConfig("simpo", beta=2)
    assert config != DPOConfig("dpo", beta=3)
    assert config != config.as_dict()
    assert len({config, DPOConfig("simpo", beta=3.0), DPOConfig("simpo")}) == 2


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_a_config_survives_copying_and_pickling(name):
    options = {"beta": 0.7} if "beta" in PREFERENCE_LOSSES[name].hyperparameters else {}
    config = DPOConfig(name, **options)
    for twin in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert twin == config
        assert twin.variant is PREFERENCE_LOSSES[name]


def test_a_config_does_not_change():
    config = DPOConfig()
    with pytest.raises(AttributeError, match="does not change"):
        config.beta = 0.2
    with pytest.raises(AttributeError, match="does not change"):
        del config.beta
    config.as_dict()["beta"] = 0.2
    assert config.beta == 0.1


def test_what_a_loss_does_not_have_is_not_an_attribute():
    with pytest.raises(AttributeError, match="loss 'dpo' has no hyperparameter 'alignment'"):
        _ = DPOConfig().alignment
