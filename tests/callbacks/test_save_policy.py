"""The folders that a run leaves behind."""

import copy
import json

import pytest
import torch
from lightning import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_align.callbacks import SavePolicy
from lit_align.errors import UserError


class AtEachValidation(Callback):
    """Keeps score and weights of each validation after a step."""

    def __init__(self, metric="val/loss"):
        self.metric = metric
        self.seen = []

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            score = float(trainer.callback_metrics[self.metric])
            self.seen.append((score, copy.deepcopy(pl_module.policy.state_dict())))


class Scores(Callback):
    """Logs the given scores, one a validation."""

    def __init__(self, *scores):
        self.scores = list(scores)

    def on_validation_epoch_end(self, trainer, pl_module):
        pl_module.log("val/score", self.scores.pop(0))


@pytest.fixture
def fit(run, tools, tmp_path):
    """Four steps, each followed by a validation."""
    val = tools.write_pairs(tmp_path / "val.jsonl", [tools.pair(n) for n in (8, 9)])

    def run_four(*callbacks, **options):
        return run(
            loss="simpo",
            steps=4,
            val_check_interval=1,
            data_options={"val_path": val},
            callbacks=callbacks,
            **options,
        )

    return run_four


def assert_holds(folder, state):
    """Whether the folder gives the weights, bit for bit."""
    saved = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert saved.keys() == state.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in state.items())


def test_the_final_policy_and_its_tokenizer_can_be_loaded(fit, tmp_path):
    result = fit(SavePolicy(tmp_path))
    assert_holds(tmp_path / "model", result.module.policy.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer("ab c")["input_ids"] == result.module.tokenizer("ab c")["input_ids"]
    assert f"the final policy is in {tmp_path / 'model'}" in result.said
    assert not (tmp_path / "model-best").exists()


def test_an_adapter_is_merged_into_the_final_policy(fit, llama, tmp_path):
    policy = {"pretrained": str(llama), "lora": {"r": 2, "target_modules": ["q_proj"]}}
    result = fit(SavePolicy(tmp_path), policy=policy, lr=1.0)
    merged = result.module.policy.merge_and_unload().state_dict()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert_close(saved, merged, rtol=0, atol=1e-6)
    base = AutoModelForCausalLM.from_pretrained(llama).state_dict()
    assert not torch.equal(
        base["model.layers.0.self_attn.q_proj.weight"],
        saved["model.layers.0.self_attn.q_proj.weight"],
    )


@pytest.mark.parametrize(("mode", "pick"), [("min", min), ("max", max)])
def test_the_best_policy_is_that_of_the_best_validation(fit, tmp_path, mode, pick):
    seen = AtEachValidation()
    fit(SavePolicy(tmp_path, best="val/loss", mode=mode), seen, lr=3.0)
    best = pick(range(len(seen.seen)), key=lambda n: seen.seen[n][0])
    assert_holds(tmp_path / "model-best", seen.seen[best][1])


@pytest.mark.parametrize(
    ("scores", "mode", "best"),
    [
        ((1, 3, 2, 3), "max", 1),
        ((3, 1, 2, 1), "min", 1),
        ((float("nan"), 2, float("nan"), 1), "max", 1),
        ((4, 3, 2, float("inf")), "min", 2),
    ],
)
def test_a_tie_keeps_the_earlier_and_a_nan_never_wins(fit, tmp_path, scores, mode, best):
    seen = AtEachValidation("val/score")
    saver = SavePolicy(tmp_path, best="val/score", mode=mode)
    result = fit(Scores(*scores), saver, seen)
    assert_holds(tmp_path / "model-best", seen.seen[best][1])
    assert saver.best_score == scores[best]
    said = f"the best one (val/score = {scores[best]:.4f}) is in {tmp_path / 'model-best'}"
    assert said in result.said


def test_the_sanity_check_is_no_candidate(fit, tmp_path):
    saver = SavePolicy(tmp_path, best="val/score")
    fit(Scores(9, 1, 3, 2, 1), saver, num_sanity_val_steps=1)
    assert saver.best_score == 3


def test_a_resumed_run_remembers_the_best(fit, tmp_path):
    def callbacks(*scores):
        saver = ModelCheckpoint(filename="{step}", every_n_train_steps=1, save_top_k=-1)
        return Scores(*scores), SavePolicy(tmp_path / "run", "val/score"), saver

    fit(*callbacks(1, 5, 2, 3), enable_checkpointing=True)
    best = json.loads((tmp_path / "run/model-best/config.json").read_text())
    before = (tmp_path / "run/model-best/model.safetensors").read_bytes()
    (tmp_path / "checkpoints").rename(tmp_path / "kept")
    fit(*callbacks(4, 4.5), enable_checkpointing=True, ckpt_path=tmp_path / "kept/step=3.ckpt")
    assert (tmp_path / "run/model-best/model.safetensors").read_bytes() == before
    assert best == json.loads((tmp_path / "run/model-best/config.json").read_text())


def test_an_unknown_metric_is_refused_before_the_first_step_with_those_there_are(fit, tmp_path):
    with pytest.raises(UserError, match=r"'val/acuracy': validation logs .*val/rewards/accuracies"):
        fit(SavePolicy(tmp_path, best="val/acuracy"), num_sanity_val_steps=1)
    assert not (tmp_path / "model").exists()


def test_an_unknown_mode_is_refused(tmp_path):
    with pytest.raises(UserError, match="'best'"):
        SavePolicy(tmp_path, best="val/loss", mode="best")


def test_validation_alone_saves_nothing(fit, tools, tmp_path):
    result = fit()
    trainer = tools.quiet_trainer(callbacks=[SavePolicy(tmp_path / "run", best="val/loss")])
    trainer.validate(result.module, result.datamodule, verbose=False)
    assert not (tmp_path / "run").exists()
