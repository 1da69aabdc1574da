"""Every file of conf/ composes, and sets exactly what the code takes."""

import re
from dataclasses import fields
from importlib.util import find_spec
from inspect import signature
from pathlib import Path

import lightning as L
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import ConfigCompositionException, MissingConfigException
from hydra.utils import get_class, instantiate
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import OmegaConf

from lit_align import DPOConfig, DPOModule, PolicyRecipe, PreferenceDataModule
from lit_align.losses import PREFERENCE_LOSSES
from lit_align.modules.sharding import FullyShardedStrategy

CONF = Path(__file__).parents[1] / "conf"
FILES = sorted(CONF.rglob("*.yaml"))
# What an option leaves for the user to say.
GIVEN = ["model.pretrained=tiny", "data.path=pairs.jsonl", "output_dir=run"]
EXPERIMENT = """\
# @package _global_
defaults:
  - override /loss: other
  - override /data: arithmetic
"""


def names(group):
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


@pytest.fixture(autouse=True, scope="module")
def hydra_conf():
    with initialize_config_dir(str(CONF), version_base="1.3", job_name="train"):
        yield


def composed(*overrides):
    return compose("train", overrides=[*GIVEN, *overrides])


def built(node, **options):
    return instantiate(node, _convert_="all", **options)


def keys(node):
    return [key for key in node if not key.startswith("_")]


def group_options():
    """Every file that can be chosen, as an override; `hydra` and recipes choose themselves."""
    for path in FILES:
        *folders, option = path.relative_to(CONF).with_suffix("").parts
        if folders and folders[0] not in {"hydra", "recipe", "local"}:
            yield f"{'/'.join(folders)}={option}"


@pytest.mark.parametrize("option", list(group_options()))
def test_every_option_composes_and_resolves(option):
    if option == "hparams_search=optuna" and "optuna" not in sweepers():
        pytest.skip("needs lit-align[sweep]")
    cfg = composed(option)
    OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    built(cfg.data)
    built(cfg.module)


def sweepers():
    config = GlobalHydra.instance().config_loader()
    Plugins.instance()
    return config.get_group_options("hydra/sweeper")


# --- losses


def test_every_loss_has_a_file_and_every_file_a_loss():
    assert names("loss") == sorted(PREFERENCE_LOSSES)


@pytest.mark.parametrize("name", names("loss"))
def test_a_loss_file_sets_exactly_the_hyperparameters(name):
    node = OmegaConf.load(CONF / "loss" / f"{name}.yaml")
    assert node.loss_type == name
    assert keys(node) == ["loss_type", *PREFERENCE_LOSSES[name].hyperparameters]
    assert isinstance(built(node), DPOConfig)


@pytest.mark.parametrize("name", names("loss"))
def test_a_loss_file_says_where_a_value_comes_from(name):
    text = (CONF / "loss" / f"{name}.yaml").read_text()
    node = OmegaConf.load(CONF / "loss" / f"{name}.yaml")
    for key, hyperparameter in PREFERENCE_LOSSES[name].hyperparameters.items():
        explained = re.search(rf"^{key}:[^#]+# \S", text, re.MULTILINE)
        assert explained or node[key] == hyperparameter.default, key
    # A reader of the file and a caller of DPOConfig get the same, but where the file says why not.
    assert built(node).beta == DPOConfig(name).beta


# --- recipes


@pytest.mark.parametrize("name", names("recipe/arithmetic"))
def test_a_recipe_is_that_of_the_chosen_loss(name):
    recipe = OmegaConf.load(CONF / "recipe" / "arithmetic" / f"{name}.yaml")
    cfg = compose("train", overrides=[f"loss={name}"])
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
    node = composed(f"data={name}").data
    assert keys(node) == [n for n in signature(PreferenceDataModule).parameters if n != "tokenizer"]


def test_the_bundled_data_is_a_path_by_itself():
    data = built(compose("train").data)
    assert Path(data.path).is_file()
    assert Path(data.val_path).is_file()


def test_the_module_file_sets_every_argument_but_the_tokenizer():
    node = composed().module
    assert keys(node) == [name for name in signature(DPOModule).parameters if name != "tokenizer"]


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
