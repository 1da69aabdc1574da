"""From a config to a policy loss; and configs that cannot be honoured."""

import copy
import math
import pickle
import warnings
from collections import Counter
from enum import StrEnum
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close

from lit_align.errors import UserError
from lit_align.losses import (
    ADVANTAGES,
    AGGREGATIONS,
    CORRECTIONS,
    ENTROPY_CONTROLS,
    FILTERS,
    KL_ESTIMATORS,
    RATIOS,
    SURROGATES,
    ExperimentConfig,
    GRPOConfig,
    aggregate,
    compute_grpo_loss,
    correction_weights,
    group_mean,
    grpo_terms,
    kept_tokens,
    policy_ratio,
    tis,
    token_losses,
    window_counts,
)
from lit_align.losses.grpo import advantages

# Word for word the usage example of the function this package keeps callable; only the package it
# is imported from is another.
USAGE = """
import torch
from lit_align.losses import compute_grpo_loss, ExperimentConfig

config = ExperimentConfig(
    loss_fn="dapo",
    clip_lower=0.2,
    clip_higher=0.28,
    beta=0.05,
    kl_estimator=2,
)

# Simulated tensors for a batch of 2 sequences, 10 tokens each
new_logprobs = torch.randn(2, 10)
old_logprobs = torch.randn(2, 10)
ratio = torch.exp(new_logprobs - old_logprobs)
advantages = torch.randn(2, 10)
ref_logprobs = torch.randn(2, 10)

pg_losses, pg_losses2, pg_loss_max, kl = compute_grpo_loss(
    new_logprobs=new_logprobs,
    ratio=ratio,
    advantages=advantages,
    ref_logprobs=ref_logprobs,
    config=config,
)

# Final loss per token = pg_loss_max + beta * kl
total_loss = pg_loss_max + config.beta * kl
mean_loss = total_loss.mean()
mean_loss.backward()
"""


class OfAModel(TorchFunctionMode):
    """Random tensors have a gradient, like the log-probs of a model for which they stand."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result.requires_grad_() if func is torch.randn else result


def row(*values):
    return torch.tensor([values], dtype=torch.float64)


def test_the_documented_usage_runs_word_for_word():
    names = {}
    # Of plain random tensors the last line could not ask a gradient.
    with OfAModel():
        exec(USAGE, names)
    ratio, gains = names["ratio"], names["advantages"]
    assert_close(names["pg_losses"], -gains * ratio)
    assert_close(names["pg_losses2"], -gains * ratio.clamp(0.8, 1.28))
    assert_close(names["pg_loss_max"], torch.maximum(names["pg_losses"], names["pg_losses2"]))
    difference = names["new_logprobs"] - names["ref_logprobs"]
    assert_close(names["kl"], torch.exp(-difference) - 1 + difference)
    # The policy's part where the clip lets it through, and the KL's: 1 - exp(-d), of the mean.
    passed = (names["pg_losses"] >= names["pg_losses2"]).double()
    slope = -gains * ratio * passed + 0.05 * -torch.expm1(-difference)
    assert_close(names["new_logprobs"].grad, (slope / 20).float())
    assert names["ref_logprobs"].grad is None


def test_dapo_by_hand():
    new = row(-1.0, -1.0)
    result = compute_grpo_loss(
        new,
        row(2.0, 0.5),
        row(1.5, -1.0),
        row(-1.5, -0.5),
        ExperimentConfig("dapo", clip_lower=0.2, clip_higher=0.28, beta=0.05, kl_estimator=1),
        tis_weights=row(0.5, 2.0),
    )
    pg_losses, pg_losses2, pg_loss_max, kl = result
    # -1.5 * 2 and 1 * 0.5; clipped -1.5 * 1.28 and 1 * 0.8; then times the weights.
    assert_close(pg_losses, row(-1.5, 1.0))
    assert_close(pg_losses2, row(-0.96, 1.6))
    assert_close(pg_loss_max, row(-0.96, 1.6))
    # Half the square of 0.5: not weighted, not times beta.
    assert_close(kl, row(0.125, 0.125))


def test_cispo_by_hand():
    config = ExperimentConfig("cispo", clip_lower=0.2, clip_higher=0.28, beta=0.05, kl_estimator=3)
    result = compute_grpo_loss(
        row(-0.5, -0.7), row(3.0, 0.5), row(2.0, -1.0), row(-1.0, -1.0), config, row(0.5, 2.0)
    )
    # 1.28 * 2 * 0.5 and -0.5 * 0.7, times the weights; no lower bound.
    for part in result[:3]:
        assert_close(part, row(0.64, -0.7))
    # ratio * d.
    assert_close(result[3], row(1.5, 0.15))


def test_without_a_reference_the_kl_is_zeros():
    kl = compute_grpo_loss(row(-1.0), row(1.0), row(1.0), None, GRPOConfig())[3]
    assert_close(kl, row(0.0))


def test_the_documented_function_is_a_view_of_the_terms():
    args = (row(-1.0, -2.0), row(2.0, 0.1), row(1.0, -1.0), row(-1.0, -3.0), GRPOConfig())
    policy, kl = grpo_terms(*args)
    for found, right in zip(compute_grpo_loss(*args), (*policy[:3], kl), strict=True):
        assert_close(found, right)
    assert policy.clipped_high.tolist() == [[True, False]]
    assert policy.clipped_low.tolist() == [[False, True]]


def test_any_object_with_some_of_the_attributes_will_do():
    tensors = (row(-1.0), row(3.0), row(2.0), row(-1.5))
    args = SimpleNamespace(loss_fn="cispo", clip_higher=1.0, beta=0.05, learning_rate=1e-6)
    config = GRPOConfig("cispo", clip_higher=1.0)
    for found, right in zip(
        compute_grpo_loss(*tensors, args), compute_grpo_loss(*tensors, config), strict=True
    ):
        assert_close(found, right)
    defaults = compute_grpo_loss(*tensors, object())
    assert_close(defaults[2], compute_grpo_loss(*tensors, GRPOConfig())[2])


def test_names_may_be_members_of_an_enumeration():
    class LossFn(StrEnum):
        dapo = "dapo"

    config = GRPOConfig(LossFn.dapo)
    assert config == GRPOConfig("dapo")
    assert config.loss_fn == "dapo"
    args = SimpleNamespace(loss_fn=LossFn.dapo)
    assert_close(compute_grpo_loss(row(-1.0), row(9.0), row(1.0), None, args)[2], row(-1.28))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype):
    tensors = [row(*values).to(dtype) for values in ((-8.1, -2.2), (1.1, 0.9), (1.3, 0.3))]
    reference, config = row(-8.0, -2.5).to(dtype), GRPOConfig()
    found = compute_grpo_loss(*tensors, reference, config)
    right = compute_grpo_loss(*(t.double() for t in tensors), reference.double(), config)
    for half, double in zip(found, right, strict=True):
        assert half.dtype == torch.float32
        assert_close(half, double.float())


# --- refusals of the function


def test_shapes_that_differ_are_refused_with_the_names():
    tensors = {"new_logprobs": torch.zeros(2, 3), "ratio": torch.ones(2, 3)}
    for name, shape in [("advantages", (2, 1)), ("ref_logprobs", (3,)), ("tis_weights", (2,))]:
        others = {"advantages": torch.zeros(2, 3), "ref_logprobs": None, "tis_weights": None}
        others[name] = torch.zeros(*shape)
        with pytest.raises(ValueError, match=rf"{name} \({shape[0]},.*new_|new_.*{name}"):
            compute_grpo_loss(**tensors, **others, config=GRPOConfig())


@pytest.mark.parametrize("name", ["new_logprobs", "ref_logprobs"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_log_prob_that_is_not_finite_is_named(name, value):
    tensors = {"new_logprobs": row(-1.0, -1.0), "ref_logprobs": row(-1.0, -1.0)}
    tensors[name][0, 1] = value
    with pytest.raises(ValueError, match=rf"{name} is {value} at \[0, 1\]"):
        compute_grpo_loss(
            **tensors, ratio=row(1.0, 1.0), advantages=row(1.0, 1.0), config=GRPOConfig()
        )


def test_unknown_names_are_refused_with_the_known_ones():
    tensors = (row(-1.0), row(1.0), row(1.0), None)
    known = r"cispo, clip, clip_cov, dppo_kl, dppo_tv, dro, dual_clip, gmpo, .*, dapo \(= clip\)"
    for name in ("ppo", "", "DAPO", None):
        with pytest.raises(ValueError, match=rf"unknown loss_fn '{name}'; known: {known}"):
            compute_grpo_loss(*tensors, SimpleNamespace(loss_fn=name))
        with pytest.raises(UserError, match=known):
            GRPOConfig(name)
    # Even where there is no reference.
    with pytest.raises(ValueError, match="unknown kl_estimator '7'; known: absolute, k1"):
        compute_grpo_loss(*tensors, SimpleNamespace(kl_estimator=7))


# --- configs


def test_the_defaults_are_dapo_s():
    assert GRPOConfig().as_dict() == {
        "loss_fn": "clip",
        "ratio_level": "token",
        "aggregation": "token_mean",
        "advantage": "group_mean_std",
        "correction": "none",
        "token_filter": "none",
        "kl_estimator": "k3",
        "kl_in": "loss",
        "beta": 0.0,
        "entropy_bonus": 0.0,
        "entropy_control": "fixed",
        "old_policy": "trainer",
        "clip_lower": 0.2,
        "clip_higher": 0.28,
        "ddof": 1.0,
        "std_eps": 1e-4,
    }
    assert (GRPOConfig().loss_fn, GRPOConfig().kl_estimator) == ("dapo", 2)
    assert ExperimentConfig is GRPOConfig


def test_a_config_has_the_hyperparameters_of_all_its_choices():
    config = GRPOConfig(
        "two_sided",
        aggregation="constant_length",
        max_completion_length=256,
        advantage="group_mean",
        correction="tis",
        delta=5,
    )
    assert config.delta == 5
    assert config.max_completion_length == 256
    assert config.tis_cap == 2
    assert not hasattr(config, "std_eps")
    with pytest.raises(
        AttributeError, match=r"nothing that this GRPOConfig chooses has .*'std_eps'"
    ):
        _ = config.std_eps


def test_aliases_make_no_difference():
    config = GRPOConfig("clip", kl_estimator="k3")
    assert config == GRPOConfig("dapo", kl_estimator=2) == GRPOConfig(kl_estimator="2")
    assert len({config, GRPOConfig(), GRPOConfig(beta=0.1), GRPOConfig(clip_lower=0.1)}) == 3
    assert config != GRPOConfig(kl_estimator=1)
    assert config != config.as_dict()


@pytest.mark.parametrize("kl_estimator", [2, "ratio_k1"])
@pytest.mark.parametrize("loss_fn", ["dapo", "cispo", "two_sided"])
def test_a_config_survives_copying_pickling_and_its_own_words(loss_fn, kl_estimator):
    config = GRPOConfig(loss_fn, kl_estimator=kl_estimator, beta=0.3, correction="icepop")
    twins = [copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))]
    for twin in (*twins, GRPOConfig(**config.as_dict()), eval(repr(config))):
        assert twin == config
        assert hash(twin) == hash(config)
    assert repr(twins[0]) == repr(config)


def test_a_config_does_not_change():
    config = GRPOConfig()
    with pytest.raises(AttributeError, match="a GRPOConfig does not change"):
        config.beta = 0.2
    with pytest.raises(AttributeError, match="a GRPOConfig does not change"):
        del config.beta
    config.as_dict()["beta"] = 0.2
    assert config.beta == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dual_clip": 3.0}, "nothing that was chosen reads dual_clip: .* ~loss.dual_clip"),
        ({"loss_fn": "reinforce", "clip_lower": 0.2}, "nothing that was chosen reads clip_lower"),
        ({"advantage": "group_mean", "std_eps": 1e-4}, "nothing that was chosen reads std_eps"),
        ({"entropy_target": 0.2}, "nothing that was chosen reads entropy_target"),
        ({"clip_low": 0.2, "tau": 1.0}, "reads clip_low, tau: loss_fn 'clip', .* clip_lower"),
    ],
)
def test_an_option_that_nothing_reads_is_refused_not_ignored(options, said):
    with pytest.raises(UserError, match=said):
        GRPOConfig(**options)


def test_what_is_known_of_the_sampler_may_be_said_to_any_loss():
    assert GRPOConfig(max_completion_length=9) == GRPOConfig()
    assert not hasattr(GRPOConfig(max_completion_length=9), "max_completion_length")


def test_only_cispo_may_be_given_a_lower_bound_that_it_does_not_use():
    """open-instruct's config has both bounds for both of its losses."""
    config = GRPOConfig("cispo", clip_lower=0.2)
    assert config.clip_lower == 0.2
    assert GRPOConfig(**config.as_dict()) == config
    tensors = (row(-1.0), row(0.1), row(1.0), None)
    assert_close(
        compute_grpo_loss(*tensors, config)[2], compute_grpo_loss(*tensors, GRPOConfig("cispo"))[2]
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"clip_lower": 1.1}, "clip_lower must be .* not above 1"),
        ({"clip_higher": -0.1}, "clip_higher must be .* not below 0"),
        ({"loss_fn": "dual_clip", "dual_clip": 1.0}, "dual_clip must be .* above 1"),
        ({"loss_fn": "cispo", "weight_floor": 2.0}, "weight_floor must be .* not above 1"),
        ({"beta": -0.1}, "beta must be .* not below 0"),
        ({"beta": "0.1"}, "beta must be a finite number"),
        ({"beta": math.nan}, "beta must be a finite number"),
        ({"kl_in": "rewards"}, "kl_in must be one of loss, reward, not 'rewards'"),
        ({"kl_in": None}, "kl_in must be one of loss, reward"),
        ({"kl_estimator": True}, "unknown kl_estimator 'True'"),
        ({"ratio_level": "row"}, "unknown ratio_level 'row'; known: sequence, sequence_product, s"),
        ({"aggregation": "mean"}, "unknown aggregation 'mean'; known: constant_length, prompt_m"),
        ({"advantage": "gae"}, "unknown advantage 'gae'; known: batch_std, best_of_group, best_"),
        ({"correction": "mis"}, "unknown correction 'mis'; known: geometric_mask, icepop, none"),
        ({"aggregation": "constant_length"}, "needs max_completion_length, .* no default"),
        ({"entropy_bonus": -0.1}, "entropy_bonus must be .* not below 0"),
        ({"token_filter": "entropy"}, "unknown token_filter 'entropy'; known: k2_bound, k3_bound"),
        ({"token_filter": "total_variation"}, "needs tv_upper, .* no default"),
        ({"token_filter": "k3_bound", "bound_over": "row"}, "bound_over must be one of token, seq"),
    ],
)
def test_a_value_that_cannot_be_honoured_is_refused_when_the_config_is_made(options, said):
    with pytest.raises(UserError, match=said):
        GRPOConfig(**options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"loss_fn": "two_sided", "delta": 1.2}, r"delta must be above 1 \+ clip_higher = 1.28"),
        ({"loss_fn": "reinforce", "ratio_level": "sequence"}, "'reinforce' reads no ratio"),
        ({"loss_fn": "gmpo", "ratio_level": "sequence"}, "'gmpo' reads no ratio"),
        ({"advantage": "gdpo", "kl_in": "reward", "kl_estimator": 0}, "each reward by its name"),
        ({"loss_fn": "vespo", "correction": "tis_sequence"}, "choose tis or icepop"),
        ({"ratio_level": "sequence", "kl_estimator": 3}, "each token by its own ratio.*choose k2"),
        ({"ratio_level": "sequence_token", "kl_estimator": 4}, "each token by its own ratio"),
        ({"kl_in": "reward", "kl_estimator": 3, "beta": 0.1}, "which is 1 when rewards are given"),
        ({"kl_in": "reward", "kl_estimator": "ratio_k3"}, "which is 1 when rewards are given"),
    ],
)
def test_choices_that_do_not_go_together_are_refused_with_the_reason(options, reason):
    with pytest.raises(UserError, match=reason):
        GRPOConfig(**options)


def test_k1_in_the_loss_is_one_warning():
    with pytest.warns(UserWarning, match="k1 in the loss has an expected gradient of 0") as caught:
        config = GRPOConfig(kl_estimator=0, beta=0.05)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    # Using it, copying it, or taking k1 where it is right, is none.
    compute_grpo_loss(row(-1.0), row(1.0), row(1.0), row(-2.0), copy.deepcopy(config))
    GRPOConfig(kl_estimator=0, beta=0.05, kl_in="reward")
    GRPOConfig(kl_estimator=0)


def test_what_a_config_needs_follows_from_its_choices():
    assert not GRPOConfig().reads_reference
    assert GRPOConfig(beta=0.1).reads_reference
    assert GRPOConfig(beta=0.1, kl_in="reward").reads_reference
    alone = [name for name in ADVANTAGES if not GRPOConfig(advantage=name).needs_group]
    assert sorted(alone) == ["reinforce_pp", "remax"]
    assert GRPOConfig("gmpo").reads_ratio
    assert not GRPOConfig("reinforce").reads_ratio
    assert GRPOConfig(token_filter="ratio_bounds").reads_sampler
    assert not GRPOConfig(token_filter="off_policy_sequence").reads_sampler
    assert not GRPOConfig().reads_window
    several = GRPOConfig("kl_cov", correction="tis_normalised", token_filter="top_entropy")
    assert several.reads_window.count("'") == 6
    assert [n for n in CORRECTIONS if not GRPOConfig(correction=n).reads_sampler] == ["none"]


def test_a_hyperparameter_s_name_belongs_to_one_axis():
    """Otherwise one value would be read by two functions that mean different things by it."""
    tables = (SURROGATES, RATIOS, AGGREGATIONS, ADVANTAGES, CORRECTIONS, FILTERS, KL_ESTIMATORS)
    tables += (ENTROPY_CONTROLS,)
    names = Counter(
        name
        for table in tables
        for name in {name for variant in table.values() for name in variant.hyperparameters}
    )
    assert set(names.values()) == {1}
    assert not names.keys() & {*GRPOConfig.__annotations__, "self"}


# --- the doors of the other axes


def test_each_axis_is_reached_through_the_config():
    new, old, mask = row(-1.0, -2.0), row(-1.5, -2.0), torch.tensor([[True, True]])
    config = GRPOConfig(
        ratio_level="sequence",
        aggregation="sequence_sum",
        advantage="group_mean",
        correction="tis",
        tis_cap=1.5,
    )
    assert_close(policy_ratio(config, new, old, mask), row(*[math.exp(0.25)] * 2))
    counts = window_counts(mask, torch.tensor([0]))
    assert_close(aggregate(config, row(1.0, 2.0), mask, counts).item(), 3.0)
    rewards, groups = torch.tensor([1.0, 0.0]), torch.tensor([4, 4])
    assert_close(advantages(config, rewards, groups), group_mean(rewards, groups))
    sampler = row(-9.0, -2.0)
    weights = correction_weights(config, old, sampler, mask)
    assert_close(weights, tis(old, sampler, mask, tis_cap=1.5))
    assert weights[0, 0] == 1.5


def test_without_a_correction_nobody_needs_the_sampler():
    mask = torch.tensor([[True]])
    assert correction_weights(GRPOConfig(), row(-1.0), None, mask) is None
    with pytest.raises(ValueError, match="correction 'tis' needs sampler_logprobs"):
        correction_weights(GRPOConfig(correction="tis"), row(-1.0), None, mask)


def test_a_filter_is_a_mask_on_the_policy_s_part_alone():
    config = GRPOConfig("clip", beta=1.0, token_filter="top_entropy", entropy_share=0.5)
    mask, entropy = torch.tensor([[True, True, True]]), row(0.1, 0.9, 0.5)
    kept = kept_tokens(config, entropy=entropy, mask=mask, sampler_logprobs=None)
    assert kept.tolist() == [[False, True, True]]
    arguments = (row(-1.0, -1.0, -1.0), row(1.0, 1.0, 9.0), row(1.0, 1.0, 1.0), row(-2.0, -2.0, -2))
    policy, kl = grpo_terms(*arguments, config, None, kept)
    assert_close(policy.losses, row(0.0, -1.0, -1.28))
    assert policy.clipped_high.tolist() == [[False, False, True]]
    assert (kl > 0).all()
    assert kept_tokens(GRPOConfig()) is None
    with pytest.raises(ValueError, match="token_filter 'top_entropy' needs entropy"):
        kept_tokens(config, mask=mask, entropy=None)


def test_an_entropy_bonus_is_a_term_of_each_token():
    entropy = row(0.5, 2.0).requires_grad_()
    terms = grpo_terms(row(-1.0, -1.0), row(1.0, 1.0), row(1.0, -1.0), None, GRPOConfig())
    losses = token_losses(GRPOConfig(entropy_bonus=0.1), terms, entropy)
    # -1 - 0.05 and 1 - 0.2.
    assert_close(losses, row(-1.05, 0.8))
    assert_close(torch.autograd.grad(losses.sum(), entropy)[0], row(-0.1, -0.1))
    assert_close(token_losses(GRPOConfig(), terms), row(-1.0, 1.0))
    with pytest.raises(UserError, match=r"entropy_bonus of 0\.1 needs entropies"):
        token_losses(GRPOConfig(entropy_bonus=0.1), terms)


def test_a_kl_in_the_reward_is_not_in_the_loss():
    arguments = (row(-1.0), row(1.0), row(1.0), row(-2.0))
    for kl_in, loss in (("loss", -1 + math.exp(-1)), ("reward", -1.0)):
        config = GRPOConfig(beta=1.0, kl_in=kl_in)
        assert_close(token_losses(config, grpo_terms(*arguments, config)), row(loss))


def test_what_a_surrogate_reads_besides_is_asked_for_by_name():
    arguments = (row(-1.0), row(1.0), row(1.0), None, GRPOConfig("gmpo"))
    with pytest.raises(ValueError, match="loss_fn 'gmpo' needs old_logprobs, mask"):
        compute_grpo_loss(*arguments)
    others = {"old_logprobs": row(-1.2), "mask": torch.tensor([[True]])}
    assert_close(compute_grpo_loss(*arguments, **others)[2], row(-math.exp(0.2)))


def test_vespo_takes_the_weights_into_its_own_and_is_not_multiplied_by_them():
    new, old, mask = row(-1.0, -2.0), row(-1.1, -2.0), torch.tensor([[True, True]])
    weights = row(0.5, 1.5)
    others = {"old_logprobs": old, "mask": mask}
    config = GRPOConfig("vespo", correction="tis")
    found, _ = grpo_terms(new, row(1.0, 1.0), row(1.0, 1.0), None, config, weights, **others)
    weight = math.exp(0.1) * 0.5 * 1.5
    phi = weight**2 * math.exp(3 * (1 - weight))
    assert_close(found.losses, -phi * new)


def test_making_a_config_warns_of_nothing_else():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name in SURROGATES:
            GRPOConfig(name)
    assert not caught
