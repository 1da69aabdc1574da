"""Sums of losses: what a config takes and keeps, and how its terms are put together."""

import copy
import pickle
import re

import pytest
import torch
from losses.small_pairs import numbers
from torch.testing import assert_close

from lit_align.errors import UserError
from lit_align.losses import (
    COMBINATIONS,
    PREFERENCE_LOSSES,
    CombinedConfig,
    DPOConfig,
    PairLoss,
    Term,
    pair_config,
    weighted_sum,
)

MPO = {
    "dpo": {"weight": 0.8, "beta": 0.3},
    "bco_pair": {"weight": 0.2},
    "sft": {"weight": 1.0},
}


def test_a_sum_keeps_its_terms_in_order_with_every_option():
    config = CombinedConfig(MPO)
    assert dict(config.terms) == {
        "dpo": Term(0.8, DPOConfig("dpo", beta=0.3)),
        "bco_pair": Term(0.2, DPOConfig("bco_pair")),
        "sft": Term(1.0, DPOConfig("sft")),
    }
    assert list(config.terms) == list(MPO)
    assert config.title == "loss 'dpo + bco_pair + sft'"
    assert config.as_dict()["terms"]["dpo"] == {"weight": 0.8, "beta": 0.3, "label_smoothing": 0.0}


def test_plain_values_make_an_equal_config():
    config = CombinedConfig(MPO)
    assert CombinedConfig(**config.as_dict()) == config
    assert pair_config(config.as_dict()) == config
    assert eval(repr(config)) == config
    assert len({config, CombinedConfig(MPO)}) == 1
    for twin in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert twin == config


def test_sums_differ_by_weight_option_and_which_rewards_are_reported():
    config = CombinedConfig(MPO)
    assert config != CombinedConfig({**MPO, "sft": {"weight": 2.0}})
    assert config != CombinedConfig({**MPO, "dpo": {"weight": 0.8}})
    assert config != CombinedConfig(dict(reversed(MPO.items())))
    assert config != config.as_dict()


def test_an_alias_is_the_loss_it_stands_for():
    aliased = CombinedConfig({"sigmoid": {"weight": 1, "beta": 0.2}})
    assert aliased == CombinedConfig({"dpo": {"weight": 1.0, "beta": 0.2}})


def test_a_sum_reads_what_any_of_its_terms_reads():
    mpo = CombinedConfig.named("mpo")
    assert mpo.reads_reference
    others = ("reads_prompt", "reads_heads", "reads_alignment", "whole_window")
    assert not any(getattr(mpo, name) for name in others)
    orpo = CombinedConfig.named("orpo")
    assert orpo.reads_prompt
    assert not orpo.reads_reference
    other = CombinedConfig({name: {"weight": 1} for name in ("ld_dpo", "wpo", "odpo", "aot")})
    assert other.reads_heads
    assert other.whole_window
    assert other.columns == ("margin",)
    assert other.alignment_kind == "sampled"


@pytest.mark.parametrize(
    ("terms", "said"),
    [
        ({}, "needs terms"),
        (None, "needs terms"),
        (["dpo"], "needs terms"),
        ({"dpoo": {"weight": 1}}, "unknown loss 'dpoo'; known: .*dpo"),
        ({"dpo": {"weight": 1}, "sigmoid": {"weight": 1}}, "'dpo' is there twice.*'sigmoid'"),
        ({"dpo": 0.8}, "loss 'dpo' in a sum of losses needs a weight"),
        ({"dpo": {"beta": 0.1}}, "loss 'dpo' in a sum of losses needs a weight"),
        ({"dpo": {"weight": 0}}, r"weight must be .* above 0, not 0; .*~loss\.terms\.dpo"),
        ({"dpo": {"weight": -1}}, "weight must be .* above 0, not -1"),
        ({"dpo": {"weight": float("nan")}}, "weight must be .*, not nan"),
        ({"dpo": {"weight": float("inf")}}, "weight must be .*, not inf"),
        ({"dpo": {"weight": True}}, "weight must be .*, not True"),
        ({"dpo": {"weight": "1"}}, "weight must be .*, not '1'"),
        ({"dpo": {"weight": 1e39}}, "weight must be .*, not 1e\\+39"),
        ({"dpo": {"weight": 10**400}}, "weight must be .*, not 10000"),
        ({"dpo": {"weight": 1, "loss_type": "ipo"}}, "named by its key"),
        ({"dpo": {"weight": 1, "beta": 0}}, "loss 'dpo': beta must be"),
        ({"sft": {"weight": 1, "beta": 1}}, "loss 'sft' takes no options, not beta"),
        ({"aot": {"weight": 1, "wpo": "sampled"}}, "loss 'aot' .*cannot honour wpo"),
        (
            {"wpo": {"weight": 1}, "ipo": {"weight": 1, "wpo": "greedy"}},
            "one kind in all terms, not sampled of wpo, greedy of ipo",
        ),
        ({"orpo": {"weight": 1}}, "'orpo' is a sum of losses"),
    ],
)
def test_what_cannot_be_honoured_is_refused(terms, said):
    with pytest.raises(UserError, match=said):
        CombinedConfig(terms)


@pytest.mark.parametrize("option", ["beta", "wpo", "loss_weights"])
def test_an_option_beside_the_terms_is_refused(option):
    with pytest.raises(UserError, match=rf"terms alone, not {option}: .*terms\.dpo\.{option}"):
        pair_config({"terms": MPO, option: 0.1})


def test_a_sum_does_not_change_and_has_no_options_of_its_own():
    config = CombinedConfig(MPO)
    with pytest.raises(AttributeError, match="does not change"):
        config.terms = {}
    with pytest.raises(TypeError):
        config.terms["sft"] = Term(2.0, DPOConfig("sft"))
    config.as_dict()["terms"]["dpo"]["beta"] = 7
    assert config.terms["dpo"].config.beta == 0.3
    with pytest.raises(AttributeError, match="its terms have"):
        _ = config.beta


# Names


@pytest.mark.parametrize("name", COMBINATIONS)
def test_a_sum_with_a_name_is_found_by_it(name):
    assert pair_config(name) == CombinedConfig.named(name) == CombinedConfig(COMBINATIONS[name])
    # A name is that of a loss or of a sum: both would be two meanings of one word.
    assert name not in PREFERENCE_LOSSES
    said = rf"'{name}' is a sum of losses: CombinedConfig\.named\('{name}'\)"
    with pytest.raises(UserError, match=said):
        DPOConfig(name)


def test_other_names_are_losses_or_refused():
    assert pair_config("sigmoid") == DPOConfig("dpo")
    assert pair_config({"loss_type": "ipo", "beta": 0.2}) == DPOConfig("ipo", beta=0.2)
    with pytest.raises(UserError, match="unknown loss 'mpoo'"):
        pair_config("mpoo")
    with pytest.raises(UserError, match="unknown sum of losses 'dpo'; known: cpo, "):
        CombinedConfig.named("dpo")


def test_lists_of_trl_are_refused_with_the_config_to_write():
    with pytest.raises(UserError) as caught:
        DPOConfig(["sigmoid", "bco_pair", "sft"], loss_weights=[0.8, 0.2, 1.0])
    written = re.search(r"CombinedConfig\(.*?\}\}\)", str(caught.value)).group()
    assert {name: term.weight for name, term in eval(written).terms.items()} == {
        "dpo": 0.8,
        "bco_pair": 0.2,
        "sft": 1.0,
    }
    for weights in ({}, {"loss_weights": [0.5]}, {"loss_weights": 0.5}):
        with pytest.raises(UserError, match=r"'sigmoid': \{'weight': 1\.0\}, 'sft': .*1\.0"):
            DPOConfig(["sigmoid", "sft"], **weights)


@pytest.mark.parametrize("loss", [["dpo"], 3, None])
def test_what_is_no_loss_is_refused(loss):
    with pytest.raises(UserError, match="a loss is a name, a config or the values of one, not"):
        pair_config(loss)


@pytest.mark.parametrize(
    ("option", "ours"),
    [
        ("simpo_gamma", r"beta \* gamma_beta_ratio"),
        ("rpo_alpha", r"loss=rpo loss\.terms\.sft\.weight"),
        ("cpo_alpha", "loss=cpo"),
        ("use_weighting", "wpo=sampled"),
        ("ld_alpha", "ld_dpo"),
        ("f_divergence_type", "dpo_js"),
        ("loss_weights", "loss=mpo"),
    ],
)
def test_an_option_of_trl_is_refused_with_ours(option, ours):
    with pytest.raises(
        UserError, match=rf"loss 'dpo' takes .*, not {option}; {option} is .*{ours}"
    ):
        DPOConfig("dpo", **{option: 1.0})


# The sum itself


def test_a_sum_of_losses_by_hand():
    config = CombinedConfig({"dpo": {"weight": 0.5}, "sft": {"weight": 2.0}})
    first = PairLoss(numbers(1.0, 2.0), numbers(3.0, 3.0), numbers(4.0, 4.0))
    second = PairLoss(numbers(10.0, -10.0), numbers(5.0, 5.0), numbers(6.0, 6.0))
    pair = weighted_sum(config, {"dpo": first, "sft": second})
    assert_close(pair.losses, numbers(20.5, -19.0))
    assert pair.chosen_rewards is first.chosen_rewards
    assert pair.rejected_rewards is first.rejected_rewards


def test_a_loss_is_the_sum_of_itself():
    found = PairLoss(*torch.randn(3, 4))
    pair = weighted_sum(DPOConfig("dpo"), {"dpo": found})
    for part, expected in zip(pair, found, strict=True):
        assert torch.equal(part, expected)
