"""What a GRPO module gives to losses, advantages and filters that read more than a ratio."""

import lightning as L
import pytest
import torch
from distributed.fit_grpo import digits, save_random
from torch.testing import assert_close

from lit_align.data import Arithmetic, RolloutDataModule
from lit_align.errors import UserError
from lit_align.losses import GRPOConfig, gdpo, length_weighted, reinforce_pp
from lit_align.modules import GRPOModule
from lit_align.rewards import RewardSuite, in_process


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_random(tmp_path_factory.mktemp("llama"))


def short(completion_ids, **_):
    return [None if ids[0] % 5 == 0 else -float(len(ids)) for ids in completion_ids]


def run(policy, loss, *, max_steps=1, data=None):
    """One small fit, by default in one micro-batch; the module and what it logged."""
    L.seed_everything(1, verbose=False)
    functions = {"digits": in_process(digits), "short": in_process(short)}
    module = GRPOModule(
        policy,
        GRPOConfig(**loss),
        reward=RewardSuite(functions, {"short": 0.1}),
        sampling={"max_new_tokens": 6},
    )
    sizes = {"prompts_per_step": 3, "num_generations": 4, "batch_size": 12, "max_rows": 30}
    trainer = L.Trainer(
        max_steps=max_steps,
        accelerator="cpu",
        logger=False,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, RolloutDataModule(Arithmetic(), **{**sizes, **(data or {})}))
    return module, {name: float(value) for name, value in trainer.callback_metrics.items()}


def of(module, *names):
    """Columns of the samples of the last rollout."""
    samples = module.rollout.samples
    return [
        torch.tensor([getattr(s, name) for s in samples], dtype=torch.float64) for name in names
    ]


def test_gdpo_is_given_each_reward_and_its_weight(llama):
    module, _ = run(llama, {"advantage": "gdpo"})
    samples = module.rollout.samples
    rows = [[float("nan") if r is None else r for r in s.rewards.values()] for s in samples]
    assert [*samples[0].rewards] == ["digits", "short"]
    groups = torch.tensor([s.group for s in samples])
    right = gdpo(torch.tensor(rows).double(), torch.tensor([1.0, 0.1]).double(), groups)
    assert_close(of(module, "advantage")[0], right)
    assert right.any()


def test_advantages_by_length_are_given_the_lengths(llama):
    module, _ = run(llama, {"advantage": "opo"})
    rewards, given = of(module, "reward", "advantage")
    lengths = torch.tensor([len(s.completion_ids) for s in module.rollout.samples])
    groups = torch.tensor([s.group for s in module.rollout.samples])
    assert_close(given, length_weighted(rewards, groups, lengths))


def test_reinforce_pp_keeps_groups_that_agree_and_needs_no_group(llama):
    module, _ = run(llama, {"advantage": "reinforce_pp"}, data={"num_generations": 1})
    rewards, given = of(module, "reward", "advantage")
    assert len(rewards) == 3
    lengths = torch.tensor([len(s.completion_ids) for s in module.rollout.samples])
    assert_close(given, reinforce_pp(rewards, lengths))


@pytest.mark.parametrize("loss_fn", ["sapo", "gmpo", "vespo", "dppo_tv", "dppo_kl", "dro"])
def test_surrogates_that_read_old_log_probs_learn_on_for_several_iterations(llama, loss_fn):
    twice = {"batch_size": 5, "num_iterations": 2}
    _, metrics = run(llama, {"loss_fn": loss_fn}, data=twice, max_steps=2)
    assert metrics["train/grad_norm"] > 0


@pytest.mark.parametrize(
    "loss",
    [
        {"loss_fn": "clip_cov", "cov_share": 0.5, "cov_lower": -9.0, "cov_upper": 9.0},
        {"loss_fn": "kl_cov"},
        {"token_filter": "top_entropy"},
        {"correction": "tis_normalised"},
    ],
)
def test_what_looks_at_the_whole_step_shows_the_same_however_it_is_cut(llama, loss):
    """Metrics are those of a micro-batch's own tokens, added up."""
    (_, whole), (_, parts) = run(llama, loss), run(llama, loss, data={"batch_size": 5})
    for name, value in whole.items():
        assert parts[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_a_lot_depends_on_the_step(llama):
    loss = {"loss_fn": "clip_cov", "cov_share": 0.2, "cov_lower": -9.0, "cov_upper": 9.0}
    _, metrics = run(llama, loss)
    clipped = metrics["train/tokens/clipped"]
    # A fifth of the tokens, rounded down, if they have an advantage.
    assert 0 < clipped <= 0.2


def test_tokens_that_a_filter_leaves_out_are_counted_as_dropped(llama):
    _, metrics = run(llama, {"token_filter": "top_entropy", "entropy_share": 0.25})
    assert metrics["train/tokens/dropped"] == pytest.approx(0.75, abs=0.1)
    _, metrics = run(llama, {"token_filter": "off_policy_sequence"})
    assert metrics["train/tokens/dropped"] == 0


@pytest.mark.parametrize("token_filter", ["ratio_bounds", "k2_bound", "k3_bound"])
def test_a_filter_of_a_sampler_that_is_the_trainer_changes_nothing(llama, token_filter):
    _, filtered = run(llama, {"token_filter": token_filter})
    _, plain = run(llama, {})
    assert filtered["train/loss"] == pytest.approx(plain["train/loss"], abs=1e-6)
    assert filtered["train/tokens/dropped"] == 0


def test_a_filter_of_the_sampler_needs_the_whole_distribution():
    with pytest.raises(UserError, match=r"token_filter 'k3_bound' compares.*top_p=1"):
        GRPOModule("tiny", {"token_filter": "k3_bound"}, reward=digits, sampling={"top_k": 5})
