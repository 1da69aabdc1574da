"""One choice switches all that goes with it: from preference pairs to reinforcement learning."""

import pytest
from composing import CONF, PRESETS, built, composed, hydra_conf, names
from hydra import compose
from hydra.errors import ConfigCompositionException

from lit_align.data import HeldOutArithmetic
from lit_align.losses import PREFERENCE_LOSSES, UNPAIRED_LOSSES

__all__ = ["hydra_conf"]  # a fixture that all tests here use


def choices(*overrides):
    """What was chosen: of the classes that work together, their last names."""
    cfg = composed(*overrides)
    found = {"callbacks": set(cfg.callbacks)}
    for name in ("module", "data", "loss", "reward", "rollout"):
        found[name] = cfg[name]._target_.split(".")[-1] if name in cfg else None
    return found


PAIRS = {
    "callbacks": {
        *["reference_cache", "checkpoint", "save_policy", "before_after", "validate_at_end"],
        *["learning_rate", "plan", "exact_match", "stop_on_signal"],
    },
    "module": "DPOModule",
    "data": "PreferenceDataModule",
    "loss": "DPOConfig",
    "reward": None,
    "rollout": None,
}
PROMPTS = {
    "callbacks": {*PAIRS["callbacks"], "rollout_log"} - {"reference_cache", "exact_match"},
    "module": "GRPOModule",
    "data": "RolloutDataModule",
    "loss": "GRPOConfig",
    "reward": "RewardSuite",
    "rollout": "HuggingFaceEngine",
}


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_a_preference_loss_brings_no_reward_and_no_engine(name):
    assert choices(f"loss={name}") == PAIRS


@pytest.mark.parametrize("name", UNPAIRED_LOSSES)
def test_a_loss_of_labelled_completions_switches_module_and_data(name):
    switched = {"module": "UnpairedModule", "data": "UnpairedDataModule", "loss": "UnpairedConfig"}
    assert choices(f"loss={name}") == {**PAIRS, **switched}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_switches_module_data_callbacks_reward_and_engine(name):
    assert choices(f"loss={name}") == PROMPTS


@pytest.mark.parametrize(
    ("overrides", "changed"),
    [
        (["data=arithmetic"], {}),
        (["data=prompts", "reward=gsm8k"], {}),
        (["data=reasoning_gym"], {}),
        (["module=grpo"], {}),
        (["rollout=replay"], {"rollout": "ReplayEngine"}),
        (["callbacks=none"], {"callbacks": set()}),
        (["callbacks=arithmetic"], {"callbacks": PAIRS["callbacks"]}),
    ],
    ids=lambda part: " ".join(part) if isinstance(part, list) else "",
)
def test_the_command_line_overrides_what_a_preset_chose_and_nothing_else(overrides, changed):
    assert choices("loss=dapo", *overrides) == {**PROMPTS, **changed}


def test_the_module_alone_brings_data_and_all():
    assert choices("module=grpo") == {**PROMPTS, "loss": "DPOConfig"}


def test_the_module_of_another_loss_takes_back_what_the_loss_chose():
    # The module refuses such a loss; there is no second mistake in its way.
    assert choices("loss=dapo", "module=dpo") == {**PAIRS, "loss": "GRPOConfig"}


@pytest.mark.parametrize(
    ("data", "reward"), [("arithmetic", "exact_match"), ("reasoning_gym", "gym_score")]
)
def test_data_that_knows_its_answers_brings_its_reward(data, reward):
    assert list(composed("loss=dapo", f"data={data}").reward.functions) == [reward]
    mine = composed("loss=dapo", f"data={data}", "reward=gsm8k").reward.functions
    assert list(mine) == ["numeric_match", "format_match"]


def test_prompts_of_a_file_ask_for_a_reward_and_name_those_there_are():
    with pytest.raises(ConfigCompositionException, match="You must specify 'reward'") as caught:
        composed("loss=dapo", "data=prompts")
    assert all(name in str(caught.value) for name in names("reward"))


def test_a_file_may_take_the_place_of_the_sums_to_train_on():
    data = built(compose("train", overrides=["loss=dapo", "data.path=sums.jsonl"]).data)
    assert (data.path, data.val_path) == ("sums.jsonl", HeldOutArithmetic())


def test_a_run_of_the_policy_is_judged_by_what_it_writes():
    callbacks = composed("loss=dapo").callbacks
    assert callbacks.save_policy.best == "val/pass@1"
    assert callbacks.before_after.metrics[:2] == ["val/pass@1", "val/reward"]
    assert composed().callbacks.save_policy.best == "val/rewards/accuracies"


def test_the_experiment_is_what_the_loss_alone_does():
    options = ["output_dir=run"]
    assert compose("train", overrides=[*options, "experiment=arithmetic_grpo"]) == compose(
        "train", overrides=[*options, "loss=dapo"]
    )


@pytest.mark.parametrize("path", sorted((CONF / "experiment").glob("*.yaml")), ids=lambda p: p.stem)
def test_an_experiment_starts_with_the_command_that_runs_it(path):
    package, command, *_ = path.read_text().splitlines()
    assert package == "# @package _global_"
    assert command.startswith(f"# python train.py experiment={path.stem}")
    assert compose("train", overrides=command.split()[3:])


MODULE_OF_MINE = """\
defaults:
  - grpo
  - _self_
reward: mine
"""


def test_a_module_made_of_grpo_gets_its_prompts_too(tmp_path):
    (tmp_path / "module").mkdir()
    (tmp_path / "module" / "mine.yaml").write_text(MODULE_OF_MINE)
    searched = f"hydra.searchpath=[file://{tmp_path}]"
    cfg = compose("train", overrides=[searched, "loss=dapo", "module=mine"])
    assert cfg.module.reward == "mine"
    assert cfg.data._target_.endswith("RolloutDataModule")
    assert "rollout_log" in cfg.callbacks
