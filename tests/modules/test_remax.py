"""The greedy completion that others are compared with: written, judged, and not trained on."""

import json
import math

import pytest
from distributed.conftest import results
from distributed.fit_grpo import digits, fit, save_random
from modules.test_grpo import run
from modules.test_grpo_fit import BUFFER, assert_same_weights
from torch.testing import assert_close

from lit_align.errors import UserError
from lit_align.losses import ADVANTAGES, GRPOConfig
from lit_align.modules import GRPOModule
from lit_align.rollout import GREEDY, HuggingFaceEngine, ReplayEngine, Request, Sampling

REMAX = {"loss_fn": "reinforce", "advantage": "remax", "aggregation": "sequence_sum"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_random(tmp_path_factory.mktemp("llama"))


def greedy_of(rollout):
    return {sample.group: sample for sample in rollout.greedy}


def test_an_advantage_is_the_reward_less_that_of_the_greedy_completion(llama):
    said, module = run(llama, loss=REMAX)
    rollout, greedy = module.rollout, greedy_of(module.rollout)
    assert [sample.number for sample in rollout.greedy] == [GREEDY] * 3
    assert sorted(greedy) == sorted({sample.group for sample in rollout.samples})
    for sample in rollout.samples:
        baseline = greedy[sample.group]
        assert baseline.prompt_ids == sample.prompt_ids
        assert baseline.reward == digits([baseline.completion_ids])[0]
        assert sample.advantage == pytest.approx(sample.reward - baseline.reward)
    assert len({sample.advantage for sample in rollout.samples}) > 2
    rewards = [sample.reward for sample in rollout.greedy]
    assert said.metrics["train/reward_greedy"] == pytest.approx(sum(rewards) / 3)
    lengths = [len(sample.completion_ids) for sample in rollout.greedy]
    assert said.metrics["train/completions/greedy_mean_length"] == pytest.approx(sum(lengths) / 3)


def test_it_is_what_the_policy_finds_likeliest(llama):
    _, module = run(llama, loss=REMAX, sampling={"max_new_tokens": 6, "temperature": 0.7})
    engine = HuggingFaceEngine()
    fresh = GRPOModule(llama, GRPOConfig(**REMAX), reward=digits)
    fresh.policy = fresh.recipe.model()
    engine.sync_weights(0, fresh.policy)
    stops = tuple(fresh.policy.generation_config.eos_token_id)
    asked = [Request(sample.prompt_ids, [0], [0]) for sample in module.rollout.greedy]
    sampling = Sampling(6, 0.0, stop_token_ids=(*stops, module.tokenizer.eos_token_id))
    answers = engine.generate(asked, sampling)
    assert [one[0].ids for one in answers] == [s.completion_ids for s in module.rollout.greedy]


def test_it_is_not_trained_on_and_changes_no_other_completion(llama):
    said, module = run(llama, loss=REMAX)
    plain, other = run(llama, loss={**REMAX, "advantage": "leave_one_out"}, filter_groups=False)
    samples = module.rollout.samples
    assert [s.completion_ids for s in samples] == [s.completion_ids for s in other.rollout.samples]
    assert not other.rollout.greedy
    assert "train/reward_greedy" not in plain.metrics
    tokens = sum(len(sample.completion_ids) for sample in samples)
    assert {float(batch["window_tokens"]) for batch in said.batches} == {tokens}
    assert sum(len(batch["labels"]) for batch in said.batches) == len(samples)


def test_one_completion_of_each_prompt_is_enough(llama):
    _, module = run(llama, loss=REMAX, data={"num_generations": 1})
    assert len(module.rollout.samples) == len(module.rollout.greedy) == 3
    assert any(sample.advantage for sample in module.rollout.samples)


def test_where_the_greedy_completion_is_unscored_there_is_no_advantage(llama):
    def unscored_alone(completion_ids, **_):
        """The greedy ones are judged by themselves, three at a time."""
        return digits(completion_ids) if len(completion_ids) == 12 else [None, 0.5, 0.5]

    _, module = run(llama, loss=REMAX, reward=unscored_alone)
    first, *others = module.rollout.groups()
    assert {sample.advantage for sample in first} == {0.0}
    assert all(math.isnan(sample.greedy_reward) for sample in first)
    assert all(s.advantage == pytest.approx(s.reward - 0.5) for group in others for s in group)


def both(rewards, groups, greedy_rewards):
    """An advantage that looks at the group, so that groups are filtered, and at its greedy one."""
    return (rewards - greedy_rewards).nan_to_num()


@pytest.fixture
def of_both():
    ADVANTAGES.register("both")(both)
    yield
    del ADVANTAGES["both"]


@pytest.mark.usefixtures("of_both")
def test_only_prompts_that_are_trained_on_are_answered_greedily(llama):
    """With refills: two groups stay of the first draw, one is drawn in the place of the third."""

    def first_agrees(prompts, completion_ids, **_):
        return [
            0.5 if prompt == prompts[0] and len(completion_ids) == 12 else number / 10
            for number, prompt in enumerate(prompts)
        ]

    _, module = run(llama, loss={"advantage": "both"}, reward=first_agrees, max_refills=1)
    trained = [group[0].group for group in module.rollout.groups()]
    assert trained == [1, 2, 3]
    assert [sample.group for sample in module.rollout.greedy] == trained
    assert not {sample.group for sample in module.rollout.left_out} & set(trained)
    greedy = greedy_of(module.rollout)
    for sample in module.rollout.samples:
        assert greedy[sample.group].prompt_ids == sample.prompt_ids
        assert sample.greedy_reward == greedy[sample.group].reward


def test_an_engine_that_replays_is_asked_for_it_and_says_if_it_has_none(llama, tmp_path):
    _, module = run(llama, loss=REMAX)
    rows = [
        {
            "prompt_ids": sample.prompt_ids,
            "completion_ids": sample.completion_ids,
            "sample": sample.number,
            "finish_reason": sample.finish_reason,
            "logprobs": sample.sampler_logprobs,
            "prompt": sample.prompt,
        }
        for sample in module.rollout.samples + module.rollout.greedy
    ]
    path = tmp_path / "rollouts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    _, again = run(llama, loss=REMAX, engine=ReplayEngine(path))
    for one, other in zip(module.rollout.samples, again.rollout.samples, strict=True):
        assert one.advantage == other.advantage
    path.write_text("\n".join(json.dumps(row) for row in rows if row["sample"] != GREEDY))
    with pytest.raises(UserError, match=r"none of them is sample -1 \(the greedy one"):
        run(llama, loss=REMAX, engine=ReplayEngine(path))


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_a_run_resumed_within_a_rollout_ends_bit_identical(tmp_path, llama):
    loss = {**REMAX, "loss_fn": "clip"}
    options = {**BUFFER, "loss": loss, "checkpoint_dir": str(tmp_path), "checkpoint_every": 1}
    whole = fit(llama, **options)
    for step in (1, 2, 5):
        resumed = fit(llama, ckpt_path=tmp_path / f"step={step}.ckpt", **options)
        assert resumed["rows"] == whole["rows"][step * 2 :]
        assert_same_weights(whole["weights"], resumed["weights"])


def test_the_plan_says_that_there_is_one_more_completion(llama):
    class Trainer:
        estimated_stepping_batches = 4

        def __init__(self, module):
            self.lightning_module = module

    _, module = run(llama, loss=REMAX)
    described = module.trainer.datamodule.describe_plan(Trainer(module))
    assert "of each prompt a greedy completion, which is only compared with" in described
    _, module = run(llama)
    assert "greedy" not in module.trainer.datamodule.describe_plan(Trainer(module))


@pytest.mark.distributed
@pytest.mark.slow
def test_two_ranks_train_the_weights_of_one(tmp_path, llama):
    """Three prompts: one rank has one greedy completion, the other two."""
    options = {"prompts": 9, "prompts_per_step": 3, "batch_size": 2, "loss": REMAX}
    alone = fit(llama, optimizer="sgd", **options)
    options |= {"policy": llama, "devices": 2, "optimizer": "sgd"}
    for rank in results("fit_grpo.py", tmp_path / "out", options):
        for name, weight in alone["weights"].items():
            assert_close(rank["weights"][name], weight, rtol=0, atol=1e-5)
