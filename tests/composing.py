"""Composing the configuration, for the tests of conf/."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

CONF = Path(__file__).parents[1] / "conf"
# What an option leaves for the user to say.
GIVEN = ["model.pretrained=tiny", "data.path=pairs.jsonl", "output_dir=run"]
# Losses of pairs that bring a callback.
REFRESHED = ["tr_dpo"]
PRESETS = [
    "cispo",
    "clip_cov",
    "dapo",
    "dppo",
    "dppo_kl",
    "dr_grpo",
    "gdpo",
    "gmpo",
    "gpg",
    "grpo",
    "gspo",
    "gspo_token",
    "kl_cov",
    "lite_ppo",
    "luspo",
    "maxrl",
    "open_instruct_dapo",
    "opo",
    "pass_at_k",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "rloo",
    "sapo",
    "top_entropy",
    "trl_default",
    "trl_rloo",
    "verl_vanilla",
    "vespo",
]


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
