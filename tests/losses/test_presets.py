"""The named policy losses of conf/: complete, cited, and switching what belongs with them."""

import re
from functools import cache
from pathlib import Path

import pytest
from golden_adapters_policy import POLICY_LEFT_OUT, result
from golden_cases import differences, load
from hydra import compose, initialize_config_dir
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import OmegaConf

from lit_align.errors import UserError
from lit_align.losses import (
    ADVANTAGES,
    AGGREGATIONS,
    CORRECTIONS,
    ENTROPY_CONTROLS,
    FILTERS,
    KL_ESTIMATORS,
    RATIOS,
    GRPOConfig,
)

CONF = Path(__file__).parents[2] / "conf"
# Surrogate, ratio level, aggregation, advantage, where the KL goes and how much of it.
PRESETS = {
    "cispo": ("cispo", "token", "token_mean", "group_mean_std", "loss", 0.0),
    "clip_cov": ("clip_cov", "token", "token_mean", "group_mean_std", "loss", 0.0),
    "dapo": ("clip", "token", "token_mean", "group_mean_std", "loss", 0.0),
    "dppo": ("dppo_tv", "token", "token_mean", "group_mean", "loss", 0.0),
    "dppo_kl": ("dppo_kl", "token", "token_mean", "group_mean", "loss", 0.0),
    "dr_grpo": ("clip", "token", "constant_length", "group_mean", "loss", 0.0),
    "gdpo": ("clip", "token", "sequence_mean", "gdpo", "loss", 0.0),
    "gmpo": ("gmpo", "token", "sequence_mean", "group_mean_std", "loss", 0.0),
    "gpg": ("reinforce", "token", "token_mean", "gpg", "loss", 0.0),
    "grpo": ("clip", "token", "sequence_mean", "group_mean_std", "loss", 0.04),
    "gspo": ("clip", "sequence", "sequence_mean", "group_mean_std", "loss", 0.0),
    "gspo_token": ("clip", "sequence_token", "sequence_mean", "group_mean_std", "loss", 0.0),
    "kl_cov": ("kl_cov", "token", "token_mean", "group_mean_std", "loss", 0.0),
    "lite_ppo": ("clip", "token", "token_mean", "batch_std", "loss", 0.0),
    "luspo": ("clip", "sequence", "sequence_sum", "group_mean_std", "loss", 0.0),
    "maxrl": ("reinforce", "token", "token_mean", "mean_relative", "loss", 0.0),
    "open_instruct_dapo": ("clip", "token", "token_mean", "group_mean", "loss", 0.05),
    "opo": ("reinforce", "token", "token_mean", "length_weighted", "loss", 0.0),
    "pass_at_k": ("clip", "token", "token_mean", "best_of_group", "loss", 0.0),
    "reinforce_pp": ("clip", "token", "token_mean", "reinforce_pp", "reward", 0.01),
    "reinforce_pp_baseline": ("clip", "token", "token_mean", "reinforce_pp_baseline", "loss", 0.01),
    "remax": ("reinforce", "token", "sequence_sum", "remax", "reward", 0.0),
    "rloo": ("reinforce", "token", "sequence_sum", "leave_one_out", "reward", 0.05),
    "sapo": ("sapo", "token", "sequence_mean", "group_mean_std", "loss", 0.0),
    "top_entropy": ("clip", "token", "token_mean", "group_mean_std", "loss", 0.0),
    "trl_default": ("clip", "token", "token_mean", "group_mean_std", "loss", 0.0),
    "trl_rloo": ("clip", "sequence_product", "sequence_mean", "leave_one_out", "reward", 0.05),
    "verl_vanilla": ("dual_clip", "token", "token_mean", "group_mean_std_verl", "loss", 0.0),
    "vespo": ("vespo", "token", "token_mean", "group_mean_std", "loss", 0.0),
}
SHARED = OmegaConf.to_container(OmegaConf.load(CONF / "loss" / "shared" / "policy.yaml"))
every_preset = pytest.mark.parametrize("name", PRESETS)


@pytest.fixture(autouse=True, scope="module")
def hydra_conf():
    with initialize_config_dir(str(CONF), version_base="1.3", job_name="train"):
        yield


def text(name):
    return (CONF / "loss" / f"{name}.yaml").read_text()


@cache
def composed(*overrides):
    return compose("train", overrides=list(overrides))


def test_every_file_of_a_policy_loss_is_a_preset():
    files = [path.stem for path in (CONF / "loss").glob("*.yaml")]
    assert {name for name in files if "GRPOConfig" in text(name)} == set(PRESETS)


@every_preset
def test_a_preset_sets_the_axes_of_its_paper(name):
    loss = instantiate(composed(f"loss={name}").loss)
    found = (loss.loss_fn, loss.ratio_level, loss.aggregation, loss.advantage)
    assert (*found, loss.kl_in, loss.beta) == PRESETS[name]


@every_preset
def test_a_preset_writes_every_value_and_says_where_it_comes_from(name):
    node = composed(f"loss={name}").loss
    values = {key: value for key, value in node.items() if key != "_target_"}
    read = GRPOConfig(**values).as_dict()
    assert values.keys() >= read.keys()
    known_of_the_sampler = {"max_completion_length"}
    assert {n for n in values if values[n] is not None} <= read.keys() | known_of_the_sampler
    _, paper, *lines = text(name).splitlines()
    assert re.match(r"# \w.+ 20\d\d.*, arXiv:\d{4}\.\d{5}", paper)
    own = explained(lines)
    assert [n for n in values if n not in SHARED] == own
    assert own == [n for n in read if n in own]


def explained(lines):
    """The keys whose line says where the value comes from."""
    return [line.split(":")[0].strip() for line in lines if re.search(r":.+\S  # \S", line)]


def test_what_presets_share_is_every_axis_beside_theirs_and_every_value_of_an_axis():
    """But for those of surrogates: which they are is what a preset is about."""
    axes = (RATIOS, AGGREGATIONS, ADVANTAGES, CORRECTIONS, FILTERS, KL_ESTIMATORS, ENTROPY_CONTROLS)
    taken = {n for axis in axes for variant in axis.values() for n in variant.hyperparameters}
    assert set(SHARED) == taken | {"entropy_control", "old_policy"}
    unset = {name for name, value in SHARED.items() if value is None}
    assert unset == taken - {"max_completion_length"}
    assert explained(text("shared/policy").splitlines()) == list(SHARED)


@pytest.mark.parametrize(
    ("axis", "table"),
    [
        ("ratio_level", RATIOS),
        ("aggregation", AGGREGATIONS),
        ("advantage", ADVANTAGES),
        ("correction", CORRECTIONS),
        ("token_filter", FILTERS),
        ("kl_estimator", KL_ESTIMATORS),
        ("entropy_control", ENTROPY_CONTROLS),
    ],
    ids=lambda axis: axis if isinstance(axis, str) else "",
)
@every_preset
@pytest.mark.filterwarnings("ignore:k1 in the loss")
def test_one_choice_can_be_changed_on_the_command_line_or_does_not_go_with_the_others(
    name, axis, table
):
    """And never fails for a value that the choice before it had."""
    preset = composed(f"loss={name}").loss
    for choice in table:
        config, refusal = tried(preset, **{axis: choice})
        if refusal:
            assert re.search("|".join(REASONS), refusal), (axis, choice)
        else:
            assert config.variants[axis].name == choice


def tried(preset, **changes):
    """The config with the changes, and why there is none."""
    try:
        return instantiate(preset, **changes), ""
    except InstantiationException as refused:
        return None, str(refused.__cause__)


# What is said where two choices do not go together, or one wants a number that only a user knows.
REASONS = (
    r"reads no ratio, so that ratio_level",
    r"weighs each token by its own ratio, and ratio_level",
    r"needs the ratio of new to old probabilities, which is 1",
    r"reads each reward by its name, and kl_in",
    r"multiplies the weights of a completion's tokens, and correction",
    r"needs (tv_upper|entropy_target), .* no default",
)


@every_preset
def test_a_preset_chooses_its_module_by_itself(name):
    cfg = composed(f"loss={name}")
    assert cfg.module._target_ == "lit_align.GRPOModule"
    assert cfg.module.loss == cfg.loss


def test_dr_grpo_divides_by_what_the_sampler_may_write():
    cfg = composed("loss=dr_grpo", "module.sampling.max_new_tokens=77")
    assert instantiate(cfg.loss).max_completion_length == 77


def test_a_value_of_a_preset_can_be_overridden_and_an_unread_one_is_refused():
    cfg = composed("loss=dapo", "loss.clip_higher=0.5", "+loss.delta=9")
    remedy = r"nothing that was chosen reads delta.* ~loss\.delta"
    with pytest.raises(InstantiationException, match=remedy) as why:
        instantiate(cfg.loss)
    assert isinstance(why.value.__cause__, UserError)
    assert instantiate(cfg.loss, loss_fn="two_sided").clip_higher == 0.5


# Cases of the project's own function with the values that it has by default.
OF_PROJECTS = {
    "open_instruct_dapo": [
        "open_instruct_dapo/ordinary_b/clip0.2_0.272_beta0.05_kl2",
        "open_instruct_dapo/clip_both_sides/clip0.2_0.272_beta0.05_kl2_rho",
    ],
    "trl_default": ["trl_dapo/ordinary_b/eps0.2_0.2"],
    "trl_rloo": ["trl_rloo/ordinary_b", "trl_rloo/holes", "trl_rloo/clip_both_sides"],
    "verl_vanilla": [
        "ppo_dual_clip/ordinary_a/clip0.2_0.2_c3.0_token-mean",
        "ppo_dual_clip/clip_both_sides/rollout_is_weights",
    ],
}
# Under any of these names a case gives the weights of its correction.
WEIGHTS = ("rho_weights", "rollout_is_weights")


@pytest.mark.golden
@pytest.mark.parametrize("name", OF_PROJECTS)
def test_a_preset_of_a_project_gives_that_project_s_numbers(name):
    """As it is: nothing is set but what the case brings."""
    loss = instantiate(composed(f"loss={name}").loss)
    if loss.kl_in == "reward":  # a part of the rewards, which no case of a loss has
        loss = GRPOConfig(**loss.as_dict() | {"beta": 0.0})
    cases = {case.id: case for case in load() if case.id in OF_PROJECTS[name]}
    assert set(cases) == set(OF_PROJECTS[name])
    for case in cases.values():
        weights = next((key for key in WEIGHTS if key in case.raw["inputs"]), None)
        assert not differences(
            case, lambda given, w=weights: result(loss, given, w), POLICY_LEFT_OUT
        )
