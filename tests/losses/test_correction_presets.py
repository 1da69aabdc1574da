"""verl's presets of its rollout correction: each does to weights and tokens what its name says."""

import math
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch.testing import assert_close

from lit_align.losses import GRPOConfig, correction_weights, kept_tokens

CONF = Path(__file__).parents[2] / "conf"
NAMES = sorted(path.stem for path in (CONF / "correction").glob("*.yaml"))
PRESETS = sorted(
    path.stem for path in (CONF / "loss").glob("*.yaml") if "GRPOConfig" in path.read_text()
)
# verl's class methods, each with rollout_is, its threshold, rollout_rs, its threshold, loss_type.
VERL = {
    "decoupled_token_is": ("token", 2.0, None, None, None),
    "decoupled_seq_is": ("sequence", 2.0, None, None, None),
    "decoupled_token_icepop": ("token", (0.5, 5.0), None, None, None),
    "decoupled_seq_is_rs": ("sequence", 2.0, "seq_sum_k1", (0.5, 2.0), None),
    "decoupled_geo_rs": (None, None, "seq_mean_k1", (0.999, 1.001), None),
    "decoupled_geo_rs_seq_tis": ("sequence", 2.0, "seq_mean_k1", (0.999, 1.001), None),
    "decoupled_geo_rs_token_tis": ("token", 2.0, "seq_mean_k1", (0.999, 1.001), None),
    "decoupled_k3_rs": (None, None, "seq_mean_k3", 0.01, None),
    "decoupled_k3_rs_seq_tis": ("sequence", 2.0, "seq_mean_k3", 0.01, None),
    "decoupled_k3_rs_token_tis": ("token", 2.0, "seq_mean_k3", 0.01, None),
    "bypass_ppo_clip": (None, None, None, None, "ppo_clip"),
    "bypass_ppo_clip_geo_rs": (None, None, "seq_mean_k1", (0.999, 1.001), "ppo_clip"),
    "bypass_ppo_clip_k3_rs": (None, None, "seq_mean_k3", 0.01, "ppo_clip"),
    "bypass_pg_is": ("sequence", 2.0, None, None, "reinforce"),
    "bypass_pg_token_icepop": ("token", (0.5, 5.0), None, None, "reinforce"),
    "bypass_pg_geo_rs": (None, None, "seq_mean_k1", (0.999, 1.001), "reinforce"),
    "bypass_pg_geo_rs_seq_tis": ("sequence", 2.0, "seq_mean_k1", (0.999, 1.001), "reinforce"),
    "bypass_pg_geo_rs_token_tis": ("token", 2.0, "seq_mean_k1", (0.999, 1.001), "reinforce"),
    "disabled": (None, None, None, None, None),
}
# Log-ratios of trainer over sampler, completion by completion: within every bound; all to one side
# by 0.2 %; off by 0.15 either way, so that only k3 sees it; one token far up; far down.
ROWS = [
    [0.0004, -0.0005, 0.0003, 0.0004],
    [0.002, 0.0019, 0.0021, 0.002],
    [0.15, -0.15, 0.15, -0.15],
    [1.8, 0.0, 0.1, 0.0],
    [-0.9, 0.0, -0.1, 0.0],
]
MASK = torch.tensor([[True, True, True, True]] * 4 + [[True, True, True, False]])


@pytest.fixture(autouse=True, scope="module")
def hydra_conf():
    with initialize_config_dir(str(CONF), version_base="1.3", job_name="train"):
        yield


@cache
def preset_of(name):
    return compose("train", overrides=[f"loss={name}"])


def loss_of(name, preset="dapo"):
    """The loss with the correction, which is merged as Hydra does it."""
    cfg = preset_of(preset).copy()
    OmegaConf.set_struct(cfg, False)  # a composed configuration takes no new keys
    cfg.loss = OmegaConf.merge(cfg.loss, OmegaConf.load(CONF / "correction" / f"{name}.yaml"))
    return instantiate(cfg.loss)


def log_ratios():
    """The rows as log-probs of trainer and sampler."""
    differences = torch.tensor(ROWS, dtype=torch.float64)
    sampler = torch.full_like(differences, -2.5)
    return sampler + differences, sampler


def verl_weight(level, threshold, row, number):
    """Of one token, from the log-ratios of its completion."""
    ratio = math.exp(sum(row) if level == "sequence" else row[number])
    if isinstance(threshold, tuple):
        return ratio if threshold[0] <= ratio <= threshold[1] else 0.0
    return min(ratio, threshold)


def verl_keeps(option, threshold, row):
    """Whether a completion stays: bounds are those of trainer over sampler, as documented."""
    if option == "seq_mean_k3":
        return sum(math.exp(x) - 1 - x for x in row) / len(row) <= threshold
    total = sum(row) / (len(row) if "mean" in option else 1)
    return threshold[0] <= math.exp(total) <= threshold[1]


@pytest.mark.parametrize("name", NAMES)
def test_it_is_chosen_on_the_command_line(name):
    cfg = compose("train", overrides=["loss=dapo", f"correction={name}"])
    assert instantiate(cfg.loss) == loss_of(name)


def test_every_preset_of_verl_has_a_file_and_every_file_a_preset():
    assert sorted(VERL) == NAMES


@pytest.mark.parametrize("name", VERL)
def test_a_preset_weighs_and_leaves_out_what_verl_s_does(name):
    level, cap, option, threshold, loss_type = VERL[name]
    config = loss_of(name)
    old, sampler = log_ratios()
    rows = [
        [x for x, m in zip(row, mask, strict=True) if m]
        for row, mask in zip(ROWS, MASK.tolist(), strict=True)
    ]
    weights = correction_weights(config, old, sampler, MASK)
    if level is None:
        assert weights is None
    else:
        right = [[verl_weight(level, cap, row, n) for n in range(len(row))] for row in rows]
        for found, mask, wanted in zip(weights, MASK, right, strict=True):
            assert_close(found[mask], torch.tensor(wanted, dtype=torch.float64))
    given = {"old_logprobs": old, "sampler_logprobs": sampler, "mask": MASK}
    kept = kept_tokens(config, **given)
    if option is None:
        assert kept is None
    else:
        right = [verl_keeps(option, threshold, row) for row in rows]
        assert kept[MASK].tolist() == [k for k, row in zip(right, rows, strict=True) for _ in row]
        assert 0 < sum(right) < 5
    assert config.old_policy == ("trainer" if loss_type is None else "sampler")
    assert (config.loss_fn == "reinforce") == (loss_type == "reinforce")


def test_the_bounds_are_the_right_way_round():
    """A geometric mean of 1.0010005 is outside of 0.999 to 1.001; its inverse would be inside."""
    config = loss_of("decoupled_geo_rs")
    for ratio, kept in ((1.0010005, False), (1 / 1.0010005, True), (1.0009, True)):
        old = torch.full((1, 2), math.log(ratio), dtype=torch.float64)
        given = {"old_logprobs": old - 1, "sampler_logprobs": torch.full_like(old, -1.0)}
        found = kept_tokens(config, **given, mask=torch.ones(1, 2).bool())
        assert found.tolist() == [[kept, kept]]


@pytest.mark.parametrize("name", NAMES)
def test_a_file_says_where_each_value_comes_from(name):
    package, title, *lines = (CONF / "correction" / f"{name}.yaml").read_text().splitlines()
    assert package == "# @package loss"
    assert title.startswith(f"# {name} of verl's rollout correction") or name == "disabled"
    values = [line for line in lines if not line.startswith("#")]
    assert all(re.search(r"\S  # \S", line) for line in values)


@pytest.mark.parametrize("name", NAMES)
def test_it_goes_with_every_policy_loss_or_says_why_not(name):
    for preset in PRESETS:
        try:
            assert isinstance(loss_of(name, preset), GRPOConfig)
        except InstantiationException as refused:
            why = str(refused.__cause__)
        else:
            why = ""
        assert not why or re.search("|".join(REASONS), why), preset
        assert not why or preset == "vespo" or not name.startswith("decoupled"), preset


REASONS = (
    "nothing that was chosen reads .* loss_fn 'reinforce'",  # another loss takes the place of one
    "reads no ratio, so that ratio_level",
    "reads no old log-probs, nor does anything else that was chosen",
    "multiplies the weights of a completion's tokens, and correction",
)


def test_a_loss_of_pairs_has_no_sampler_to_correct():
    with pytest.raises(InstantiationException, match="correction"):
        loss_of("decoupled_token_is", "dpo")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"correction": "tis"}, "loss_fn 'dapo' divides by the sampler's probabilities"),
        ({"loss_fn": "gmpo", "correction": "tis"}, "loss_fn 'gmpo' divides by the sampler's"),
        ({"loss_fn": "reinforce"}, "'reinforce' reads no old log-probs, nor does anything else"),
    ],
)
def test_what_would_count_the_mismatch_twice_or_not_at_all_is_refused(options, reason):
    with pytest.raises(Exception, match=reason):
        GRPOConfig(old_policy="sampler", **options)
    with pytest.raises(Exception, match="old_policy must be one of trainer, sampler"):
        GRPOConfig(old_policy="vllm")


def test_what_reads_the_sampler_says_so():
    assert GRPOConfig(old_policy="sampler").reads_sampler
    assert GRPOConfig(old_policy="sampler").sampler_readers == "old_policy 'sampler'"
    weighted = {"loss_fn": "reinforce", "correction": "tis"}
    assert GRPOConfig(old_policy="sampler", **weighted).reads_ratio
    assert not GRPOConfig(**weighted).reads_ratio
    by_kl = GRPOConfig("reinforce", old_policy="sampler", kl_estimator="ratio_k3", beta=0.1)
    assert by_kl.reads_sampler
