"""What a GRPO run promises, however it was cut or stopped."""

import math

import pytest
import torch
from distributed.conftest import start
from distributed.fit_grpo import digits, fit, save_random
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import AutoModelForCausalLM

from lit_align.errors import UserError

AGGREGATIONS = ["token_mean", "sequence_mean", "sequence_sum", "constant_length", "prompt_mean"]
# Micro-batch size, accumulation (1: as needed): 4 prompts x 3 completions, and a last step of 3.
CUTS = [(12, 1), (5, 1), (2, 1), (1, 1), (5, 6)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_random(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return save_random(tmp_path_factory.mktemp("gpt2"), "gpt2")


def rows_of(batches):
    """Per row of a step: prompt ids, completion ids, old log-probs or None."""
    for batch in batches:
        for n, labels in enumerate(batch["labels"]):
            trained = (labels != -100).nonzero().flatten()
            if len(trained):
                first, last = int(trained[0]), int(trained[-1]) + 1
                ids = batch["input_ids"][n].tolist()
                old = (
                    batch["old_logprobs"][n, first - 1 : last - 1]
                    if "old_logprobs" in batch
                    else None
                )
                yield tuple(ids[:first]), ids[first:last], old


def with_advantages(rows):
    """The rows with (reward - mean) / (std + 1e-4) over those of the same prompt."""
    by_prompt = {}
    for row in rows:
        by_prompt.setdefault(row[0], []).append(row)
    for group in by_prompt.values():
        rewards = digits([completion for _, completion, _ in group])
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
        for row, reward in zip(group, rewards, strict=True):
            yield *row, (reward - mean) / (std + 1e-4)


def aggregated(name, losses):
    """The five reductions, over (prompt, losses of the tokens) per completion."""
    tokens = torch.cat([row for _, row in losses])
    prompts = {prompt: [row for p, row in losses if p == prompt] for prompt, _ in losses}
    return {
        "token_mean": tokens.mean,
        "sequence_mean": lambda: torch.stack([row.mean() for _, row in losses]).mean(),
        "sequence_sum": lambda: torch.stack([row.sum() for _, row in losses]).mean(),
        "constant_length": lambda: tokens.sum() / (len(losses) * 9),
        "prompt_mean": lambda: torch.stack([torch.cat(g).mean() for g in prompts.values()]).mean(),
    }[name]()


def plain_gradient(folder, before, batches, aggregation, bonus=0.0):
    """The gradient of one step by a loop over completions in float64: PPO's clip, 0.2 and 0.28.

    With a bonus on the entropy of each token, from all logits at once.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), before, strict=True):
            parameter.copy_(value)
    losses = []
    for prompt, completion, old, advantage in with_advantages(list(rows_of(batches))):
        logits = model(torch.tensor([[*prompt, *completion]])).logits[0]
        logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        new = logprobs.gather(-1, torch.tensor(completion)[:, None])[:, 0]
        ratio = (new - (new.detach() if old is None else old.double())).exp()
        clipped = ratio.clamp(0.8, 1.28)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        surrogate = -torch.minimum(ratio * advantage, clipped * advantage)
        losses.append((prompt, surrogate - bonus * entropy))
    aggregated(aggregation, losses).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def worst(folder, aggregation, cut, bonus=0.0, **options):
    """Largest relative difference between the gradients of a run and those of the plain loop."""
    loss = {"aggregation": aggregation, "entropy_bonus": bonus}
    if aggregation == "constant_length":
        loss["max_completion_length"] = 9
    batch_size, accumulate = cut
    steps = fit(folder, loss=loss, batch_size=batch_size, accumulate=accumulate, **options)["steps"]
    lengths = {len(completion) for window in steps.batches for _, completion, _ in rows_of(window)}
    assert len(lengths) > 3
    differences = []
    for gradient, before, batches in zip(
        steps.gradients, steps.before, steps.batches, strict=False
    ):
        plain = plain_gradient(folder, before, batches, aggregation, bonus)
        differences.append(float((gradient - plain).norm() / plain.norm()))
    return max(differences), len(differences)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gradient_is_that_of_a_plain_loop(llama, aggregation, cut):
    """13 prompts: three steps of four, a last one of one prompt."""
    difference, steps = worst(llama, aggregation, cut, optimizer="sgd")
    assert steps == 4
    assert difference < 1e-6


@pytest.mark.parametrize("cut", [(5, 1), (2, 8)])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gradient_is_that_of_a_plain_loop_after_the_policy_has_moved(gpt2, aggregation, cut):
    """In float64, with ratios that are not 1 and a clip that acts."""
    options = {"steps_per_rollout": 2, "num_iterations": 2, "prompts": 6, "prompts_per_step": 2}
    difference, steps = worst(
        gpt2, aggregation, cut, optimizer="sgd", precision="64-true", **options
    )
    assert steps == 8
    assert difference < 1e-6


BUFFER = {
    "prompts": 12,
    "prompts_per_step": 2,
    "steps_per_rollout": 2,
    "batch_size": 3,
    "max_epochs": 2,
}


def assert_same_weights(one, other):
    assert one.keys() == other.keys()
    for name, weight in one.items():
        assert torch.equal(weight, other[name]), name


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.parametrize("num_iterations", [1, 2])
def test_resumed_run_ends_bit_identical(tmp_path, llama, num_iterations):
    """Two steps of two micro-batches per rollout and iteration; resumed after every one of them."""
    options = {**BUFFER, "num_iterations": num_iterations, "filter_groups": True}
    options |= {"checkpoint_dir": str(tmp_path), "checkpoint_every": 1, "clip": 1.0}
    whole = fit(llama, **options)
    total = len(whole["steps"].gradients)
    assert total == 12 * num_iterations
    for step in [1, 2, 3, 5, total // 2, total - 1]:
        resumed = fit(llama, ckpt_path=tmp_path / f"step={step}.ckpt", **options)
        assert resumed["rows"] == whole["rows"][step * 2 :]
        assert_same_weights(whole["weights"], resumed["weights"])


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.parametrize("num_iterations", [1, 2])
def test_run_killed_in_a_rollout_buffer_ends_as_if_it_had_not_been(tmp_path, llama, num_iterations):
    """SIGKILL within the third step: in the middle of a window and, iterating, of a rollout."""
    options = {**BUFFER, "policy": llama, "devices": 1, "num_iterations": num_iterations}
    saving = {"checkpoint_dir": str(tmp_path / "saved"), "checkpoint_every": 1}
    killed = start("fit_grpo.py", tmp_path / "out", {**options, **saving, "kill_after": 5})
    assert killed.returncode == -9, killed.stderr[-3000:]
    assert not list(tmp_path.glob("out*"))
    at = tmp_path / "saved" / "step=2.ckpt"
    assert sorted(tmp_path.glob("saved/*.ckpt"))[-1] == at
    whole, resumed = fit(**options), fit(**options, **saving, ckpt_path=at)
    assert_same_weights(whole["weights"], resumed["weights"])


def test_validation_in_between_changes_no_weight(llama):
    options = {**BUFFER, "num_iterations": 2}
    assert_same_weights(
        fit(llama, **options)["weights"], fit(llama, **options, validate_every=3)["weights"]
    )


def test_another_seed_trains_other_weights(llama, monkeypatch):
    """Else the tests above would say nothing about random states."""
    one = fit(llama, **BUFFER)["weights"]
    monkeypatch.setattr("lightning.seed_everything", lambda *_, **__: torch.manual_seed(8))
    other = fit(llama, **BUFFER)["weights"]
    assert any(not torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("accumulate", [1, 6])
def test_ranks_and_micro_batches_see_the_same_completions(llama, accumulate):
    """What is sampled depends on the seed of each completion, not on how the work is cut."""
    options = {**BUFFER, "batch_size": 6, "max_epochs": 1}

    def windows(**cut):
        steps = fit(llama, **{**options, **cut})["steps"]
        return [sorted(map(str, rows_of(window))) for window in steps.batches[:2]]

    assert windows() == windows(accumulate=accumulate, batch_size=2)


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_a_resumed_run_saves_no_step_twice(tmp_path, llama):
    """The step it was resumed from would be saved again, in the middle of the next one."""
    options = {**BUFFER, "checkpoint_dir": str(tmp_path), "checkpoint_every": 2}
    whole = fit(llama, max_steps=6, **options)
    fit(llama, max_steps=4, ckpt_path=tmp_path / "step=2.ckpt", **options)
    assert {path.stem.split("-")[0] for path in tmp_path.glob("*.ckpt")} == {
        f"step={n}" for n in (2, 4, 6)
    }
    for path in sorted(tmp_path.glob("step=[24]*.ckpt")):
        resumed = fit(llama, max_steps=6, ckpt_path=path, **options)
        assert_same_weights(whole["weights"], resumed["weights"])


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.filterwarnings("ignore:this checkpoint is written in the middle")
def test_a_checkpoint_within_a_step_is_not_gone_on_with(tmp_path, llama):
    """Saved by a validation after three micro-batches, two to a step."""
    keeper = ModelCheckpoint(tmp_path, "{step}", monitor="val/reward", save_top_k=-1)
    keeper._save_on_train_epoch_end = False
    with pytest.warns(UserWarning, match="middle of an optimizer step"):
        fit(llama, **BUFFER, max_steps=2, validate_every=3, keepers=[keeper])
    with pytest.raises(UserError, match="written in the middle of an optimizer step"):
        fit(llama, **BUFFER, ckpt_path=tmp_path / "step=1.ckpt")
