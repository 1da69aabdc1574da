"""What a GRPO module refuses, and what becomes of groups that teach nothing."""

import json

import lightning as L
import pytest
import torch
from distributed.fit_grpo import digits, fit, save_random

from lit_align.data import Arithmetic, PreferenceDataModule, RolloutDataModule
from lit_align.errors import UserError
from lit_align.losses import CombinedConfig, DPOConfig, GRPOConfig
from lit_align.modules import DPOModule, GRPOModule
from lit_align.resources import resource
from lit_align.rewards import RewardSuite, in_process
from lit_align.rollout import HuggingFaceEngine, ReplayEngine


class Said(L.Callback):
    """Keeps what was logged last, and the batches."""

    def __init__(self):
        self.batches = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batches.append(batch)

    def on_train_end(self, trainer, pl_module):
        self.metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_random(tmp_path_factory.mktemp("llama"))


def suite(function):
    return RewardSuite({"mine": in_process(function)})


def run(
    policy,
    *,
    reward=digits,
    loss=None,
    data=None,
    max_steps=1,
    precision="32-true",
    watchers=(),
    **options,
):
    """One small fit; what was logged, and the module."""
    L.seed_everything(1, verbose=False)
    said = Said()
    module = GRPOModule(
        policy,
        GRPOConfig(**(loss or {})),
        reward=suite(reward),
        **{"sampling": {"max_new_tokens": 6}, **options},
    )
    sizes = {"prompts_per_step": 3, "num_generations": 4, "batch_size": 6, "max_rows": 30}
    datamodule = RolloutDataModule(Arithmetic(), **{**sizes, **(data or {})})
    trainer = L.Trainer(
        max_steps=max_steps,
        precision=precision,
        accelerator="cpu",
        logger=False,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[said, *watchers],
    )
    trainer.fit(module, datamodule)
    return said, module


def agreeing(completion_ids, **_):
    return [1.0] * len(completion_ids)


def first_group_agrees(prompts, completion_ids, **_):
    """Rewards of the first prompt of a call are equal, those of all others differ."""
    return [
        0.5 if prompt == prompts[0] else number / 10
        for number, (prompt, _) in enumerate(zip(prompts, completion_ids, strict=True))
    ]


@pytest.mark.filterwarnings("ignore:all 9 groups drawn")
def test_groups_that_agree_give_no_gradient_and_are_counted(llama):
    said, module = run(llama, reward=agreeing)
    assert said.metrics["train/grad_norm"] == 0
    assert said.metrics["train/groups/all_right"] == 1
    assert said.metrics["train/tokens/no_advantage"] == 1
    assert {sample.advantage for sample in module.rollout.samples} == {0.0}


def test_a_run_without_signal_says_so(llama):
    with pytest.warns(UserWarning, match=r"all 9 groups drawn .* have equal rewards"):
        run(llama, reward=agreeing)


def test_a_group_that_agrees_is_replaced_by_another(llama):
    said, module = run(llama, reward=first_group_agrees, max_refills=1)
    # Three groups are drawn, the first agrees; the one drawn in its place is first in its call.
    assert said.metrics["train/groups_trained"] == 2
    assert len(module.rollout.samples) == 8
    assert {sample.group for sample in module.rollout.left_out} == {0, 3}
    said, module = run(llama, reward=first_group_agrees, max_refills=0)
    assert {sample.group for sample in module.rollout.samples} == {1, 2}


def test_a_group_that_agrees_stays_if_asked_and_counts_in_the_mean(llama):
    said, module = run(llama, reward=first_group_agrees, filter_groups=False)
    assert {sample.group for sample in module.rollout.samples} == {0, 1, 2}
    tokens = sum(len(sample.completion_ids) for sample in module.rollout.samples)
    assert {float(batch["window_tokens"]) for batch in said.batches} == {tokens}


def test_unscored_completions_have_no_part_in_the_baseline(llama):
    def every_other(completion_ids, **_):
        return [None if n % 2 else float(n % 4) for n in range(len(completion_ids))]

    _, module = run(llama, reward=every_other, loss={"advantage": "group_mean"})
    advantages = [sample.advantage for sample in module.rollout.samples[:4]]
    assert advantages == [-1.0, 0.0, 1.0, 0.0]


def test_masked_completions_count_in_the_baseline_only(llama):
    said, module = run(llama, mask_truncated=True, loss={"advantage": "group_mean"})
    samples = module.rollout.samples
    cut = [sample for sample in samples if sample.finish_reason == "length"]
    assert 0 < len(cut) < len(samples)
    assert any(sample.advantage for sample in cut)
    tokens = sum(len(s.completion_ids) for s in samples if s.finish_reason == "stop")
    assert {float(batch["window_tokens"]) for batch in said.batches} == {tokens}
    masked = sum(len(sample.completion_ids) for sample in cut)
    assert said.metrics["train/tokens/masked"] == pytest.approx(masked / (masked + tokens))


def test_one_completion_has_no_group_to_be_compared_with(llama):
    with pytest.raises(UserError, match=r"'group_mean_std' compares.*num_generations is 1"):
        run(llama, data={"num_generations": 1})


def test_reinforce_is_refused_once_the_policy_has_moved(llama):
    with pytest.raises(UserError, match=r"'reinforce' has no ratio.*serves 2 steps"):
        run(llama, loss={"loss_fn": "reinforce"}, data={"num_iterations": 2})


def test_greedy_sampling_is_refused(llama):
    with pytest.raises(UserError, match=r"temperature is 0.*only val_sampling"):
        run(llama, sampling={"temperature": 0.0})


def test_a_correction_needs_the_whole_distribution(llama):
    with pytest.raises(UserError, match=r"'tis' compares.*top_p=1"):
        run(llama, loss={"correction": "tis"}, sampling={"top_p": 0.9})


@pytest.mark.parametrize("correction", ["tis", "tis_sequence", "icepop", "geometric_mask"])
def test_a_correction_of_a_sampler_that_is_the_trainer_changes_nothing(llama, correction):
    bounds = {"mask_lower": 0.9, "mask_upper": 1.1} if correction == "geometric_mask" else {}
    none, _ = run(llama)
    corrected, _ = run(llama, loss={"correction": correction, **bounds})
    assert corrected.metrics["train/loss"] == pytest.approx(none.metrics["train/loss"], abs=1e-6)
    assert corrected.metrics["train/tokens/dropped"] == 0


def test_a_correction_without_the_samplers_log_probs_is_refused(llama):
    class Silent(HuggingFaceEngine):
        def generate(self, requests, sampling):
            answers = super().generate(requests, sampling)
            return [[c._replace(logprobs=None) for c in completions] for completions in answers]

    with pytest.raises(UserError, match=r"needs the sampler's log-probs.*correction=none"):
        run(llama, loss={"correction": "tis"}, engine=Silent())
    said, _ = run(llama, engine=Silent())
    assert "train/sampling/kl" not in said.metrics


def test_an_engine_that_samples_from_another_policy_is_found_out(llama):
    class Hot(HuggingFaceEngine):
        def generate(self, requests, sampling):
            return super().generate(
                requests, type(sampling)(**{**vars(sampling), "temperature": 2.0})
            )

    with pytest.raises(UserError, match=r"Hot runs the policy itself.*differ by"):
        run(llama, engine=Hot())


def test_the_temperature_of_sampling_is_that_of_training(llama):
    said, _ = run(llama, sampling={"temperature": 0.7, "max_new_tokens": 6})
    assert said.metrics["train/sampling/sampling_logp_difference/mean"] < 1e-5


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_the_reference_is_the_policy_before_the_first_step(llama, kl_in):
    """One step per rollout: the KL is 0 before the first step, and not after it."""
    options = {"beta": 0.1, "kl_in": kl_in, "kl_estimator": "k1" if kl_in == "reward" else "k3"}
    optimizer = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=1.0)}
    first, module = run(llama, loss=options, **optimizer)
    assert first.metrics["train/kl"] == pytest.approx(0, abs=1e-6)
    assert not any("frozen" in name for name in module.state_dict())
    later, _ = run(llama, loss=options, max_steps=3, **optimizer)
    assert abs(later.metrics["train/kl"]) > 1e-4


def test_a_kl_in_the_reward_is_in_the_advantage(llama):
    """With a reward that is constant, all advantage is that of the KL."""
    options = {"beta": 0.1, "kl_in": "reward", "kl_estimator": "k1", "advantage": "group_mean"}
    _, module = run(
        llama,
        loss=options,
        reward=agreeing,
        filter_groups=False,
        max_steps=2,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
    )
    assert {sample.advantage for sample in module.rollout.samples} == {0.0}  # never moved
    _, module = run(
        llama,
        loss=options,
        filter_groups=False,
        max_steps=2,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
    )
    samples = module.rollout.samples[:4]
    kl = [sum(s.old_logprobs) - sum(s.ref_logprobs) for s in samples]
    shaped = [s.reward - 0.1 * value for s, value in zip(samples, kl, strict=True)]
    mean = sum(shaped) / 4
    assert [s.advantage for s in samples] == pytest.approx([x - mean for x in shaped], abs=1e-9)
    assert max(map(abs, kl)) > 1e-3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: GRPOModule("tiny", DPOConfig("simpo"), reward=digits),
            r"'simpo' is a loss of pairs",
        ),
        (
            lambda: GRPOModule("tiny", CombinedConfig.named("mpo"), reward=digits),
            r"'dpo \+ bco_pair \+ sft' is a loss of pairs",
        ),
        (lambda: GRPOModule("tiny", ["dapo"], reward=digits), r"a loss is a name"),
        (lambda: DPOModule("tiny", GRPOConfig("dapo")), r"'dapo' is a loss of completions"),
        (lambda: GRPOModule("tiny", reward={}), r"reward"),
        (lambda: GRPOModule("tiny", reward=digits, val_generations=0), r"val_generations"),
        (lambda: GRPOModule("tiny", reward=digits, val_generations=4), r"temperature 0 writes"),
        (lambda: GRPOModule("tiny", reward=digits, max_refills=-1), r"max_refills"),
    ],
)
def test_what_cannot_work_is_refused_at_once(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_a_module_refuses_data_of_another_kind(llama, tmp_path):
    trainer = L.Trainer(max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False)
    pairs = PreferenceDataModule(resource("arithmetic/val.jsonl"), cache_dir=tmp_path)
    with pytest.raises(UserError, match=r"GRPOModule learns from prompts, and .* holds pairs"):
        trainer.fit(GRPOModule("tiny", reward=suite(digits)), pairs)
    with pytest.raises(UserError, match=r"DPOModule learns from pairs, and .* holds prompts"):
        trainer.fit(DPOModule("tiny"), RolloutDataModule(Arithmetic(), max_rows=4))


def test_several_rewards_come_in_a_list_or_by_name(llama):
    def none(completion_ids, **_):
        return [0.0] * len(completion_ids)

    module = GRPOModule("tiny", "cispo", reward=[digits, none])
    assert list(module.reward.functions) == ["digits", "none"]
    assert module.loss == GRPOConfig("cispo")
    with pytest.raises(UserError, match=r"two rewards have one name \(digits, digits\)"):
        GRPOModule("tiny", reward=[digits, digits])


def test_stop_tokens_of_ones_own_are_added(llama):
    everything = tuple(range(300))
    _, module = run(llama, sampling={"max_new_tokens": 6, "stop_token_ids": everything})
    assert {len(sample.completion_ids) for sample in module.rollout.samples} == {1}


def test_a_reference_that_nothing_compares_with_is_refused():
    with pytest.raises(UserError, match=r"a reference was given, and beta is 0"):
        GRPOModule("tiny", reward=suite(digits), reference="tiny")


def test_half_precision_rounds_no_counts(llama):
    """Above 256, bfloat16 has no odd numbers."""
    sizes = {"prompts_per_step": 20, "num_generations": 5, "batch_size": 100}
    said, module = run(llama, data=sizes, precision="bf16-true", filter_groups=False)
    tokens = sum(len(sample.completion_ids) for sample in module.rollout.samples)
    assert tokens > 256
    assert said.batches[0]["window_tokens"].item() == tokens
    assert said.batches[0]["advantages"].dtype == torch.float32


def test_validation_asks_the_policy_also_where_training_replays(llama, tmp_path):
    row = {"prompt_ids": [1], "completion_ids": [2], "sample": 0, "finish_reason": "stop"}
    (tmp_path / "rollout-000000.jsonl").write_text(json.dumps(row))
    module = GRPOModule(llama, reward=suite(digits), engine=ReplayEngine(tmp_path))
    assert isinstance(module.val_engine, HuggingFaceEngine)
    assert GRPOModule(llama, reward=suite(digits)).val_engine.is_live


def test_lora_is_its_own_reference_and_keeps_no_copy(llama):
    _, module = run(
        {"pretrained": llama, "lora": {"r": 2, "target_modules": "all-linear"}},
        loss={"beta": 0.1},
        max_steps=2,
    )
    assert module.live_reference.model is None


def test_dropout_is_named_as_what_moves_the_first_ratio(llama):
    lora = {"r": 2, "target_modules": "all-linear", "lora_dropout": 0.5}
    with pytest.raises(UserError, match=r"dropout is on"):
        run(
            {"pretrained": llama, "lora": {**lora, "init_lora_weights": True}},
            max_steps=4,
            data={"num_iterations": 2},
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=10.0),
        )


def test_prompts_that_fill_the_context_are_named(tmp_path):
    small = save_random(tmp_path, "gpt2")
    with pytest.raises(UserError, match=r"row \d+ of arithmetic: its prompt.*context of 128"):
        run(small, data={"system_prompt": "a" * 200, "max_prompt_length": None})


def test_metrics_have_the_names_people_know(llama):
    said, _ = run(llama)
    names = {
        "loss",
        "reward",
        "reward_std",
        "rewards/mine/mean",
        "completions/mean_length",
        "completions/clipped_ratio",
        "clip_ratio/low_mean",
        "clip_ratio/high_mean",
        "clip_ratio/region_mean",
        "entropy",
        "kl",
        "frac_reward_zero_std",
        "grad_norm",
        "sampling/sampling_logp_difference/mean",
    }
    assert {f"train/{name}" for name in names} <= said.metrics.keys()
    parts = [v for k, v in said.metrics.items() if k.startswith("train/tokens/")]
    assert sum(parts) == pytest.approx(1)


def test_the_loss_that_is_logged_is_that_of_the_step_however_it_was_cut(llama):
    losses = [
        run(llama, data={"batch_size": size, "num_iterations": 2}, max_steps=2)[0].metrics
        for size in (12, 5, 1)
    ]
    values = [metrics["train/loss"] for metrics in losses]
    assert values[1:] == pytest.approx([values[0]] * 2, rel=1e-4)
    assert abs(values[0]) > 1e-6


def test_fit_helper_of_ranks_learns_something(llama):
    """Else the two-rank tests would compare nothing with nothing."""
    steps = fit(llama, max_steps=2)["steps"]
    assert all(float(gradient.norm()) > 1e-4 for gradient in steps.gradients)
