"""Every file of conf/ composes, and sets exactly what the code takes."""

import re
from dataclasses import fields
from importlib.util import find_spec
from inspect import signature
from pathlib import Path

import lightning as L
import pytest
import torch
from composing import CONF, PRESETS, REFRESHED, built, composed, hydra_conf, names
from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import ConfigCompositionException, MissingConfigException
from hydra.utils import get_class
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import OmegaConf

from lit_align import (
    DPOConfig,
    PolicyRecipe,
    PreferenceDataModule,
    ReferenceRefresh,
    UnpairedDataModule,
)
from lit_align.data import Arithmetic, HeldOutArithmetic, HeldOutReasoningGym, ReasoningGym
from lit_align.losses import (
    COMBINATIONS,
    PREFERENCE_LOSSES,
    UNPAIRED_LOSSES,
    CombinedConfig,
    GRPOConfig,
    UnpairedConfig,
)
from lit_align.modules.sharding import FullyShardedStrategy
from lit_align.rollout import Sampling

__all__ = ["hydra_conf"]  # a fixture that all tests here use

FILES = sorted(CONF.rglob("*.yaml"))
# Options that only go with a loss of policies, and what they leave to say.
ALSO = {
    "callbacks=rollout": ["loss=dapo"],
    "data=prompts": ["loss=dapo", "reward=gsm8k"],
    "data=reasoning_gym": ["loss=dapo"],
    "module=grpo": ["loss=dapo"],
    "module=unpaired": ["loss=kto"],
    "rollout=huggingface": ["loss=dapo"],
    "rollout=replay": ["loss=dapo", "rollout.path=rollouts"],
    "rows=prompts": ["loss=dapo"],
}
EXPERIMENT = """\
# @package _global_
defaults:
  - override /loss: other
  - override /data: arithmetic
"""


def keys(node):
    return [key for key in node if not key.startswith("_")]


def group_options():
    """Every file that can be chosen, as an override; `hydra` and recipes choose themselves."""
    for path in sorted(CONF.glob("*/*.yaml")):
        if path.parent.name not in {"hydra", "local"}:
            yield f"{path.parent.name}={path.stem}"


@pytest.mark.parametrize("option", list(group_options()))
def test_every_option_composes_and_resolves(option):
    if option == "hparams_search=optuna" and "optuna" not in sweepers():
        pytest.skip("needs lit-align[sweep]")
    of_policies = option.startswith(("reward=", "correction="))
    also = ["loss=dapo"] if of_policies else ALSO.get(option, [])
    cfg = composed(option, *also)
    OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    built(cfg.data)
    if option != "rollout=replay":  # that one wants to see what was recorded
        built(cfg.module)


def sweepers():
    config = GlobalHydra.instance().config_loader()
    Plugins.instance()
    return config.get_group_options("hydra/sweeper")


# --- losses


def test_every_loss_has_a_file_and_every_file_a_loss():
    assert names("loss") == sorted(
        [*PREFERENCE_LOSSES, *COMBINATIONS, *REFRESHED, *UNPAIRED_LOSSES, *PRESETS]
    )


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_a_loss_file_sets_exactly_the_hyperparameters(name):
    node = OmegaConf.load(CONF / "loss" / f"{name}.yaml")
    assert node.loss_type == name
    assert keys(node) == ["loss_type", *PREFERENCE_LOSSES[name].hyperparameters]
    assert isinstance(built(node), DPOConfig)


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_a_loss_file_says_where_a_value_comes_from(name):
    text = (CONF / "loss" / f"{name}.yaml").read_text()
    node = OmegaConf.load(CONF / "loss" / f"{name}.yaml")
    for key, hyperparameter in PREFERENCE_LOSSES[name].hyperparameters.items():
        explained = re.search(rf"^{key}:[^#]+# \S", text, re.MULTILINE)
        assert explained or node[key] == hyperparameter.default, key
    # A reader of the file and a caller of DPOConfig get the same, but where the file says why not.
    differs = built(node).as_dict().items() - DPOConfig(name).as_dict().items()
    assert differs <= {("alignment", "sampled")}


@pytest.mark.parametrize("name", COMBINATIONS)
def test_a_sum_of_losses_is_written_out_as_python_knows_it(name):
    node = OmegaConf.load(CONF / "loss" / f"{name}.yaml")
    assert keys(node) == ["terms"]
    assert built(node) == CombinedConfig.named(name)
    for term, options in node.terms.items():
        assert list(options) == ["weight", *PREFERENCE_LOSSES[term].hyperparameters]


@pytest.mark.parametrize("name", COMBINATIONS)
def test_a_sum_of_losses_says_where_a_value_comes_from(name):
    text = (CONF / "loss" / f"{name}.yaml").read_text()
    assert re.search(r"arXiv:\d{4}\.\d{5}", text.splitlines()[0])
    for term, options in OmegaConf.load(CONF / "loss" / f"{name}.yaml").terms.items():
        written = text.split(f"  {term}:\n")[1]
        for key, hyperparameter in PREFERENCE_LOSSES[term].hyperparameters.items():
            explained = re.search(rf"^    {key}:[^#\n]+# \S", written, re.MULTILINE)
            assert explained or options[key] == hyperparameter.default, (term, key)
    assert re.search(r"weight: [\d.]+  # \S", text)


def test_the_command_line_changes_leaves_out_and_adds_terms():
    mpo = built(composed("loss=mpo", "loss.terms.dpo.beta=0.3", "loss.terms.sft.weight=2").loss)
    assert mpo.terms["dpo"].config == DPOConfig("dpo", beta=0.3)
    assert mpo.terms["sft"].weight == 2
    orpo = composed("loss=orpo", "~loss.terms.sft_whole", "+loss.terms.sft.weight=1").loss
    assert list(built(orpo).terms) == ["orpo_odds_ratio", "sft"]


def test_any_loss_of_pairs_takes_the_weights_of_wpo():
    ipo = built(composed("loss=ipo", "+loss.wpo=sampled", "data=preference").loss)
    assert ipo == DPOConfig("ipo", wpo="sampled")
    rpo = built(composed("loss=rpo", "+loss.terms.dpo.wpo=greedy").loss)
    assert rpo.alignment_kind == "greedy"


@pytest.mark.parametrize("name", REFRESHED)
def test_a_loss_whose_reference_moves_brings_the_callback(name):
    cfg = composed(f"loss={name}")
    assert isinstance(built(cfg.callbacks.reference_refresh), ReferenceRefresh)
    assert cfg.callbacks.keys() == {*composed().callbacks, "reference_refresh"}
    # Rewards are of the reference of the moment; what the policy itself prefers is not.
    assert cfg.callbacks.save_policy.best == "val/ranking_accuracies"
    assert list(composed(f"loss={name}", "callbacks=none").callbacks) == ["reference_refresh"]
    config = built(cfg.loss)
    assert isinstance(config, DPOConfig)
    assert set(keys(cfg.loss)) == config.as_dict().keys()


def test_the_callback_file_has_the_defaults_of_the_callback():
    node = OmegaConf.load(CONF / "callbacks/reference_refresh.yaml").reference_refresh
    defaults = {name: p.default for name, p in signature(ReferenceRefresh).parameters.items()}
    assert {key: node[key] for key in keys(node)} == defaults


@pytest.mark.parametrize("name", UNPAIRED_LOSSES)
def test_a_loss_of_labelled_completions_is_written_out_with_the_origin_of_each_value(name):
    text = (CONF / "loss" / f"{name}.yaml").read_text()
    assert re.search(r"arXiv:\d{4}\.\d{5}", text.splitlines()[1])
    node = OmegaConf.load(CONF / "loss" / f"{name}.yaml").loss
    assert keys(node) == ["loss_type", *UNPAIRED_LOSSES[name].hyperparameters]
    for key in UNPAIRED_LOSSES[name].hyperparameters:
        assert re.search(rf"^  {key}:[^#\n]+# \S", text, re.MULTILINE), key
    assert built(node) == UnpairedConfig(name)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_every_axis_and_exactly_the_hyperparameters_of_its_choices(name):
    config = built(composed(f"loss={name}").loss)
    assert isinstance(config, GRPOConfig)
    written = composed(f"loss={name}").loss
    known = {"_target_", "max_completion_length", *config.as_dict()}
    assert {key for key in written if written[key] is not None} <= known
    assert config.as_dict().keys() <= written.keys()


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_says_where_its_equation_is(name):
    _, title, *_ = (CONF / "loss" / f"{name}.yaml").read_text().splitlines()
    assert re.search(r"arXiv:\d{4}\.\d{5}", title)


# --- recipes


@pytest.mark.parametrize("name", names("recipe/arithmetic"))
def test_a_recipe_is_that_of_the_chosen_loss(name):
    recipe = OmegaConf.load(CONF / "recipe" / "arithmetic" / f"{name}.yaml")
    cfg = compose("train", overrides=[f"loss={name}", "output_dir=run"])
    assert OmegaConf.merge(cfg, recipe) == cfg
    assert cfg.trainer.max_steps > 0


def test_every_loss_has_a_recipe_for_the_bundled_sums():
    assert names("recipe/arithmetic") == names("loss")


def test_the_command_line_overrides_a_recipe():
    cfg = compose("train", overrides=["loss=dpo", "optimizer.lr=7", "scheduler=constant"])
    assert cfg.optimizer.lr == 7
    assert cfg.scheduler._target_.endswith("constant")


def test_real_data_does_not_get_the_recipe_of_the_sums():
    cfg = composed("data=preference")
    assert cfg.trainer.max_steps == -1
    assert cfg.optimizer.lr == 1e-6
    assert cfg.loss.beta == PREFERENCE_LOSSES["dpo"].hyperparameters["beta"].default


@pytest.mark.parametrize("data", ["prompts", "reasoning_gym"])
def test_other_prompts_do_not_get_the_recipe_of_the_sums(data):
    cfg = composed("loss=dapo", f"data={data}", "reward=gsm8k")
    assert (cfg.trainer.max_steps, cfg.optimizer.lr) == (-1, 1e-6)
    assert cfg.module.sampling.max_new_tokens == 256


# --- each file against what it configures


def test_the_trainer_file_lists_every_argument_of_the_trainer():
    # Otherwise some could only be set with a plus sign.
    assert keys(composed().trainer) == [
        name for name in signature(L.Trainer).parameters if name not in {"logger", "callbacks"}
    ]


@pytest.mark.parametrize("name", names("model"))
def test_a_model_file_sets_every_field_of_a_recipe(name):
    node = composed(f"model={name}").model
    assert keys(node) == [field.name for field in fields(PolicyRecipe)]
    assert isinstance(built(node), PolicyRecipe)


@pytest.mark.parametrize("name", names("data"))
def test_a_data_file_sets_every_argument_but_the_tokenizer(name):
    node = composed(f"data={name}", *ALSO.get(f"data={name}", [])).data
    assert sets_all_but_the_tokenizer(node)


def sets_all_but_the_tokenizer(node):
    taken = signature(get_class(node._target_)).parameters
    return keys(node) == [name for name in taken if name != "tokenizer"]


def test_the_bundled_sums_are_pairs_or_prompts_as_the_module_wants_them():
    pairs, prompts = (compose("train", overrides=[f"loss={n}"]).data for n in ("dpo", "dapo"))
    assert get_class(pairs._target_) is PreferenceDataModule
    assert pairs._target_ != prompts._target_
    assert sets_all_but_the_tokenizer(prompts)


def test_files_of_pairs_are_taken_apart_for_a_loss_of_labelled_completions():
    given = ["loss=kto", "data.path=pairs.jsonl"]
    split, labelled = (
        compose("train", overrides=[*given, f"data={n}"]).data for n in ("preference", "unpaired")
    )
    assert split == labelled
    assert get_class(split._target_) is UnpairedDataModule
    bundled = compose("train", overrides=["loss=kto"]).data
    assert get_class(bundled._target_) is UnpairedDataModule
    assert sets_all_but_the_tokenizer(bundled)


def test_the_bundled_data_is_there_by_itself():
    pairs, prompts = (
        built(compose("train", overrides=[f"loss={n}"]).data) for n in ("dpo", "dapo")
    )
    assert Path(pairs.path).is_file()
    assert Path(pairs.val_path).is_file()
    assert (prompts.path, prompts.val_path) == (Arithmetic(), HeldOutArithmetic())


def test_the_options_of_a_task_reach_its_held_out_questions():
    given = ["loss=dapo", "data=reasoning_gym", "data.path.task=gcd", "+data.path.config.max_num=9"]
    data = built(compose("train", overrides=given).data)
    assert data.path == ReasoningGym("gcd", size=5000, config={"max_num": 9})
    assert data.val_path == HeldOutReasoningGym(data.path, size=200)


@pytest.mark.parametrize("loss", ["dpo", "dapo", "kto"])
def test_the_module_file_sets_every_argument_but_the_tokenizer(loss):
    assert sets_all_but_the_tokenizer(composed(f"loss={loss}").module)


@pytest.mark.parametrize("group", ["sampling", "val_sampling"])
def test_a_sampling_is_written_out_but_for_stop_tokens(group):
    node = composed("loss=dapo").module[group]
    assert [*keys(node), "stop_token_ids"] == [field.name for field in fields(Sampling)]


def test_validation_is_greedy_and_as_long_as_training():
    module = composed("loss=dapo", "module.sampling.max_new_tokens=7").module
    assert (module.val_sampling.temperature, module.val_sampling.max_new_tokens) == (0.0, 7)


@pytest.mark.parametrize("name", names("optimizer"))
def test_an_optimizer_is_complete_but_for_the_parameters(name):
    optimizer = built(composed(f"optimizer={name}").optimizer)
    assert optimizer([torch.nn.Parameter(torch.zeros(1))]).param_groups


@pytest.mark.parametrize("name", names("scheduler"))
def test_a_scheduler_is_complete_but_for_optimizer_and_length(name):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = built(composed(f"scheduler={name}").scheduler)(optimizer, total_steps=10)
    assert scheduler.get_last_lr() == [0.0]


@pytest.mark.parametrize("name", names("callbacks"))
def test_callbacks_are_built(name):
    nodes = composed(f"callbacks={name}").callbacks
    assert all(isinstance(built(node), L.Callback) for node in nodes.values())


def test_the_sums_bring_their_own_callback_and_can_be_told_not_to():
    assert "exact_match" in composed().callbacks
    assert "exact_match" not in composed("data=preference").callbacks
    assert not composed("callbacks=none").callbacks


@pytest.mark.parametrize("name", names("logger"))
def test_loggers_are_built(name, tmp_path):
    nodes = composed(f"logger={name}", f"output_dir={tmp_path}").logger
    for key, node in nodes.items():
        if key in {"wandb", "mlflow"}:
            pytest.importorskip(key)
        assert isinstance(built(node), L.pytorch.loggers.Logger)


@pytest.mark.parametrize("group", ["callbacks", "logger"])
def test_a_file_sets_only_what_its_class_takes(group):
    for name in names(group):
        for node in composed(f"{group}={name}")[group].values():
            # A null in callbacks switches one off. The classes are there without their packages.
            taken = signature(get_class(node._target_)).parameters if node else {}
            assert set(keys(node or {})) <= {*taken, "tags"}, name


# --- strategies


@pytest.fixture
def four_gpus(monkeypatch):
    """What Lightning's own tests do: the two places where it counts."""
    for place in ("fabric", "pytorch"):
        counter = f"lightning.{place}.accelerators.cuda.num_cuda_devices"
        monkeypatch.setattr(counter, lambda: 4)


STRATEGIES = {
    "auto": (SingleDeviceStrategy, 1),
    "ddp": (DDPStrategy, 4),
    "fsdp": (FullyShardedStrategy, 4),
    "deepspeed_2": (DeepSpeedStrategy, 4),
    "deepspeed_3": (DeepSpeedStrategy, 4),
}


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize("name", names("strategy"))
def test_a_strategy_is_accepted_on_a_machine_of_four_gpus(name):
    kind, devices = STRATEGIES[name]
    make = built(composed(f"strategy={name}", "trainer.accelerator=gpu").trainer, _partial_=True)
    if kind is DeepSpeedStrategy and not find_spec("deepspeed"):
        # Then it is the message that has to be right.
        with pytest.raises(MisconfigurationException, match="pip install -U deepspeed"):
            make(logger=False, callbacks=[])
        return
    trainer = make(logger=False, callbacks=[])
    assert type(trainer.strategy) is kind
    assert trainer.num_devices == devices


@pytest.mark.usefixtures("four_gpus")
def test_a_sharded_run_writes_checkpoints_that_one_process_can_load():
    trainer = built(composed("strategy=fsdp").trainer, _partial_=True)(logger=False, callbacks=[])
    assert trainer.strategy._save_distributed_checkpoint is False


# --- Hydra


def test_an_unknown_option_is_answered_with_those_there_are():
    with pytest.raises(MissingConfigException, match="simpoo") as caught:
        composed("loss=simpoo")
    assert all(name in str(caught.value) for name in names("loss"))


def test_an_unknown_key_is_refused():
    with pytest.raises(ConfigCompositionException, match=r"loss\.betta"):
        composed("loss.betta=1")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CONF)))
def test_only_the_hydra_group_needs_a_running_hydra(path):
    # Elsewhere a configuration composed in a notebook could not be resolved.
    assert path.parent.name == "hydra" or "${hydra:" not in path.read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CONF)))
def test_a_file_starts_by_saying_what_it_is(path):
    first, second, *_ = [*path.read_text().splitlines(), ""]
    assert (second if first.startswith("# @package") else first).startswith("# ")


LOSS_OF_ANOTHER_MODULE = """\
# @package _global_
defaults:
  - override /module: other
  - override /data: preference
loss:
  _target_: builtins.dict
  gamma: 1
"""


@pytest.fixture
def foreign(tmp_path):
    """A loss and a module of the user's own, outside of conf/."""
    for name, text in {
        "loss/other.yaml": LOSS_OF_ANOTHER_MODULE,
        "module/other.yaml": "_target_: builtins.dict\nloss: ${loss}\n",
        "experiment/mine.yaml": EXPERIMENT,
        "recipe/preference/other.yaml": "# @package _global_\noptimizer:\n  lr: 0.25\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    return f"hydra.searchpath=[file://{tmp_path}]"


def test_a_loss_may_choose_module_and_data(foreign):
    cfg = compose("train", overrides=[foreign, "loss=other", "data.path=x"])
    assert built(cfg.module) == {"loss": {"gamma": 1}}
    assert "exact_match" not in cfg.callbacks
    # The recipe is that of the data the loss chose.
    assert cfg.optimizer.lr == 0.25


def test_the_command_line_overrides_what_a_loss_chose(foreign):
    cfg = compose("train", overrides=[foreign, "loss=other", "data=arithmetic"])
    assert "exact_match" in cfg.callbacks
    assert cfg.optimizer.lr == 1e-6


def test_an_experiment_overrides_what_its_loss_chose(foreign):
    cfg = compose("train", overrides=[foreign, "experiment=mine"])
    assert built(cfg.module) == {"loss": {"gamma": 1}}
    assert "exact_match" in cfg.callbacks
