from types import SimpleNamespace

import pytest

from lit_align.callbacks import Plan, StepProgressBar
from lit_align.rewards import RewardSuite, exact_match, length_penalty


@pytest.fixture
def told(monkeypatch):
    """What Plan says."""
    lines = []
    monkeypatch.setattr("lit_align.callbacks.plan.rank_zero_info", lines.append)
    return lines


def test_the_plan_says_what_is_trained_and_how_a_step_is_put_together(run, told):
    ran = run(callbacks=[Plan()], batch_size=2, accumulate_grad_batches=2, steps=3)
    parameters = f"{sum(p.numel() for p in ran.module.policy.parameters()):,}"
    policy, plan = told
    assert f"LlamaForCausalLM, {parameters} of {parameters} parameters trained" in policy
    assert "loss_type='dpo', beta=0.1" in policy
    # 7 pairs: 3 steps of 4 are 12 pairs.
    assert plan.startswith("plan: 3 steps over 7 pairs (1.7 epochs), each of 4: 2 per micro-batch")


def test_the_plan_of_completions_says_what_is_drawn_cut_and_rewarded(act, told):
    functions = {"right": exact_match, "short": length_penalty}
    reward = RewardSuite(functions, weights={"short": 0.25})
    loss = {"loss_fn": "cispo", "aggregation": "sequence_mean"}
    # 12 completions in micro-batches of 5 are 3; 3 steps of 3 prompts are 9 of 12.
    act(
        Plan(),
        module={"reward": reward, "loss": loss},
        data={"batch_size": 5},
        limit_val_batches=1.0,
        max_steps=3,
    )
    policy, plan = told
    assert "LlamaForCausalLM" in policy
    assert "loss_fn='cispo'" in policy
    assert "aggregation='sequence_mean'" in policy
    drawn, ratio, rewards = plan.split("\n")
    assert drawn.startswith("plan: 3 steps over 12 prompts (0.75 passes), ")
    for part in (
        "3 prompts x 4 completions",
        "in 3 micro-batches x 1 ranks of at most 5",
        "a rollout of 3 prompts makes 1 of them",
        "5 prompts to validate on",
    ):
        assert part in drawn
    assert (
        ratio == "on-policy: a rollout makes a single step, where the ratio is 1 and no clip acts"
    )
    assert rewards == "rewards: 1 x right, 0.25 x short"


def test_a_rollout_of_several_steps_is_not_called_on_policy(act, told):
    act(Plan(), data={"steps_per_rollout": 2, "num_iterations": 2}, max_steps=4)
    drawn, ratio, _ = told[1].split("\n")
    # One rollout of 6 prompts serves all 4 steps.
    assert drawn.startswith("plan: 4 steps over 12 prompts (0.5 passes), ")
    assert ratio.startswith("off-policy from the second of a rollout's 4 steps on")


def test_data_that_says_nothing_of_itself_leaves_the_steps(act, told, monkeypatch):
    monkeypatch.delattr("lit_align.data.RolloutDataModule.describe_plan")
    act(Plan(), max_steps=2)
    assert told[1] == "plan: 2 steps"


def test_the_bar_names_no_last_epoch_where_there_is_none():
    bar = StepProgressBar()
    for last, expected in ((-1, "Epoch 3"), (5, "Epoch 3/4")):
        bar._trainer = SimpleNamespace(max_epochs=last)
        assert bar._get_train_description(3).strip() == expected


@pytest.mark.parametrize(
    ("max_steps", "steps_made", "batches"), [(-1, 0, 40), (6, 0, 18), (6, 4, 6), (99, 0, 40)]
)
def test_the_bar_is_as_long_as_the_micro_batches_to_come(max_steps, steps_made, batches):
    bar = StepProgressBar()
    bar._trainer = SimpleNamespace(
        max_steps=max_steps,
        global_step=steps_made,
        accumulate_grad_batches=3,
        num_training_batches=40,
    )
    assert bar.total_train_batches == batches
