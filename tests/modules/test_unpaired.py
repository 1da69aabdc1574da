"""What a run on labelled completions promises: the same step however it was cut, stopped or split.

That the losses themselves are right is shown in tests/losses/test_unpaired.py.
"""

import json
import logging
import math
import re
from functools import partial

import lightning as L
import pytest
import torch
from distributed.conftest import write_pairs
from distributed.fit import fit
from torch.testing import assert_close
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from lit_align import (
    DPOModule,
    ExactMatch,
    GRPOConfig,
    GRPOModule,
    PreferenceDataModule,
    ReferenceCache,
    ReferenceRefresh,
    UnpairedConfig,
    UnpairedDataModule,
    UnpairedModule,
)
from lit_align.data import PairLoader
from lit_align.errors import UserError
from lit_align.losses import UNPAIRED_LOSSES, DPOConfig, UnpairedLoss, reference_point
from lit_align.modules.completion_logps import side_logps
from lit_align.modules.labelled_metrics import labelled_means, labelled_sums, ranked_right
from lit_align.policies import PolicyRecipe

CUTS = [(4, 2), (3, 3), (1, 8)]


@pytest.fixture(scope="module")
def pairs7(tmp_path_factory):
    """Seven pairs, which are 14 rows: a window of 8, then one of 6."""
    return write_pairs(tmp_path_factory.mktemp("pairs") / "pairs7.jsonl", 7)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """Random, with nothing in it that falls back to float32."""
    folder = tmp_path_factory.mktemp("gpt2")
    tokenizer = PolicyRecipe().tokenizer()
    torch.manual_seed(0)
    size = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128}
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **size)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    LlamaForCausalLM(PolicyRecipe().model().config).save_pretrained(folder)
    PolicyRecipe().tokenizer().save_pretrained(folder)
    return str(folder)


# --- the cut of a step


def worst_difference(data, tmp_path, batch_size=8, **options):
    """Largest relative difference between the gradients of one cut and those of others."""
    options |= {"cache": tmp_path / "cache", "optimizer": "sgd"}
    whole = fit(data, batch_size=batch_size, **options)["gradients"]
    cuts = [(n, a) for n, a in CUTS if n * a == batch_size]
    assert len(whole) > 1
    return max(
        float((one - other).norm() / one.norm())
        for size, accumulate in cuts
        for one, other in zip(
            whole,
            fit(data, batch_size=size, accumulate=accumulate, **options)["gradients"],
            strict=True,
        )
    )


@pytest.mark.parametrize("loss", UNPAIRED_LOSSES)
def test_gradient_does_not_depend_on_the_cut_in_float64(tmp_path, pairs7, gpt2, loss):
    """Two epochs: from the second step on there is a reference point, and something to remember."""
    options = {"policy": gpt2, "loss": loss, "precision": "64-true", "max_epochs": 2}
    assert worst_difference(pairs7, tmp_path, **options) < 1e-10
    if loss == "kto":
        assert worst_difference(pairs7, tmp_path, 9, **options) < 1e-10


@pytest.mark.parametrize("loss", UNPAIRED_LOSSES)
def test_gradient_does_not_depend_on_the_cut(tmp_path, pairs7, llama, loss):
    assert worst_difference(pairs7, tmp_path, policy=llama, loss=loss) < 1e-6


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.parametrize("loss", ["kto", "bco"])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_resumed_run_ends_bit_identical(tmp_path, pairs7, loss, step):
    """14 rows, 4 at a time, accumulation 2: two steps an epoch."""
    options = {
        "cache": tmp_path / "cache",
        "loss": loss,
        "batch_size": 4,
        "accumulate": 2,
        "max_epochs": 2,
        "dropout": 0.1,
        "checkpoint_every": 1,
    }
    saved = tmp_path / "checkpoints"
    whole = fit(pairs7, checkpoint_dir=saved, **options)
    resumed = fit(pairs7, checkpoint_dir=saved, ckpt_path=saved / f"step={step}.ckpt", **options)
    assert resumed["rows"] == whole["rows"][2 * step :]
    for name, weight in whole["weights"].items():
        assert torch.equal(weight, resumed["weights"][name]), name


# --- runs in which something is looked at


class Watch(L.Callback):
    """Keeps the metrics of each step and each validation."""

    def __init__(self):
        self.train, self.val = [], []

    def on_train_batch_end(self, trainer, *args):
        self.train.append({k: float(v) for k, v in trainer.logged_metrics.items() if "train" in k})

    def on_validation_end(self, trainer, pl_module):
        self.val.append({k: float(v) for k, v in trainer.callback_metrics.items() if "val" in k})


@pytest.fixture
def run(tmp_path):
    """A short run of the bundled model; says what was logged."""

    def fitted(rows, loss="kto", *, lr=1e-3, callbacks=(), module=None, trainer=None, **data):
        path = rows
        if not isinstance(rows, str):
            path = tmp_path / f"rows{len(list(tmp_path.iterdir()))}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        L.seed_everything(1, verbose=False)
        module = module or UnpairedModule("tiny", loss, optimizer=partial(torch.optim.SGD, lr=lr))
        kind = data.pop("kind", UnpairedDataModule)
        watch = Watch()
        options = {"max_steps": 4, "logger": False, "log_every_n_steps": 1, **(trainer or {})}
        if not {"val_path", "val_split"} & data.keys():
            options["limit_val_batches"] = 0
        given = kind(path, **{"cache_dir": tmp_path / "cache", "batch_size": 4, **data})
        L.Trainer(
            accelerator="cpu",
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            default_root_dir=tmp_path,
            callbacks=[ReferenceCache(tmp_path / "reference"), watch, *callbacks],
            **options,
        ).fit(module, given)
        watch.module, watch.data = module, given
        return watch

    return fitted


def sums(*labels):
    """A right sum where the label is true, else a wrong one."""
    return [
        {
            "prompt": [{"role": "user", "content": f"{20 + n} + {n} ="}],
            "completion": [{"role": "assistant", "content": str(20 + 2 * n + (not label))}],
            "label": label,
        }
        for n, label in enumerate(labels, 1)
    ]


def test_the_first_step_has_no_rewards_and_the_loss_of_a_policy_that_is_its_reference(run):
    for loss, expected in (("kto", 0.5), ("apo_zero_unpaired", 0.5), ("bco", 0.693147)):
        logged = run(sums(*[True, False] * 3), loss).train[0]
        assert logged["train/loss"] == pytest.approx(expected, abs=1e-5)
        assert logged["train/rewards/margins"] == pytest.approx(0, abs=1e-5)
        assert ("train/kl" in logged) == (loss == "kto")


@pytest.mark.filterwarnings("ignore:all rows to train on are")
@pytest.mark.filterwarnings("ignore:the rows to validate on are of one class")
@pytest.mark.parametrize("loss", UNPAIRED_LOSSES)
@pytest.mark.parametrize("label", [True, False])
def test_a_class_without_rows_is_left_out_of_the_metrics(run, loss, label):
    rows = sums(*[label] * 6)
    logged = run(rows, loss, val_split=0.4)
    mine, other = ("chosen", "rejected") if label else ("rejected", "chosen")
    for step in (*logged.train, *logged.val):
        assert not any(map(math.isnan, step.values()))
        assert any(f"rewards/{mine}" in name for name in step)
        assert not any(other in name or "margins" in name or "accur" in name for name in step)


def test_one_row_at_a_time_learns_with_the_reference_point_of_its_step(run):
    logged = run(sums(*[True, False] * 3), lr=0.1, batch_size=1)
    assert len(logged.train) == 4
    assert not any(math.isnan(value) for step in logged.train for value in step.values())
    assert max(step["train/kl"] for step in logged.train) >= 0
    assert logged.train[-1]["train/loss"] != 0.5


@pytest.mark.filterwarnings("ignore:all rows to train on are")
def test_the_reference_point_is_that_of_the_whole_step(run):
    """By hand: log-ratios of the mismatched completions of all micro-batches."""

    class Spy(L.Callback):
        def __init__(self):
            self.points, self.expected = [], []

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if "window" in batch:
                with torch.no_grad():
                    ratios = [
                        side_logps(pl_module.policy, part, "mismatched")[0]
                        - pl_module.reference_rows(part)["reference_mismatched_logps"]
                        for part in batch["window"]
                    ]
                self.expected.append(reference_point(torch.cat(ratios)))

    spy = Spy()
    logged = run(
        sums(*[True] * 12),  # all short sums become likelier, those of other prompts as well
        lr=0.3,
        callbacks=[spy],
        batch_size=2,
        trainer={"accumulate_grad_batches": 3, "max_steps": 3},
    )
    found = [step["train/kl"] for step in logged.train[2::3]]
    assert found[0] == pytest.approx(0, abs=1e-5)
    assert found[-1] > 0.01
    assert_close(torch.tensor(found), torch.stack(spy.expected), rtol=1e-4, atol=1e-6)


def test_validation_does_not_depend_on_its_batches(run, tmp_path):
    held_out = tmp_path / "val.jsonl"
    held_out.write_text("".join(json.dumps(row) + "\n" for row in sums(*[True, False, True] * 3)))
    rows = sums(*[True, False] * 4)
    for loss in UNPAIRED_LOSSES:
        found = [
            run(rows, loss, lr=0.3, val_path=held_out, val_batch_size=size).val[-1]
            for size in (9, 4, 1)
        ]
        assert {"val/loss", "val/rewards/accuracies", "val/rewards/margins"} <= found[0].keys()
        for other in found[1:]:
            assert other == pytest.approx(found[0], rel=1e-4, abs=1e-5)


@pytest.mark.filterwarnings("ignore:all rows to train on are")
def test_validation_is_what_the_loss_says_of_all_rows_at_once(run, tmp_path):
    held_out = tmp_path / "val.jsonl"
    held_out.write_text("".join(json.dumps(row) + "\n" for row in sums(*[True, False, True] * 3)))
    watch = run(sums(*[True] * 8), lr=0.3, val_path=held_out, val_batch_size=2)
    module, data = watch.module, watch.data
    (batch,) = PairLoader(data.val_rows, data.collate, batch_size=9, shuffle=False)
    with torch.no_grad():
        logps = module.response_logps(batch)
        found = module.response_loss(batch, logps)
    ratios = logps.mismatched - module.reference_rows(batch)["reference_mismatched_logps"]
    assert watch.val[-1]["val/kl"] == pytest.approx(ratios.mean().item(), rel=1e-4)
    assert watch.val[-1]["val/kl"] > 0.01
    assert watch.val[-1]["val/loss"] == pytest.approx(found.losses.mean().item(), rel=1e-4)
    right = ranked_right(found.rewards, batch["labels"]).item()
    assert watch.val[-1]["val/rewards/accuracies"] == pytest.approx(right)


def test_dropout_leaves_out_the_same_with_a_reference_point_as_without(run):
    """The pass that finds it must not move the random state of the one that learns."""
    found = []
    for loss in ("kto", "apo_zero_unpaired", "bco"):
        module = UnpairedModule("tiny", loss, optimizer=partial(torch.optim.SGD, lr=0.0))
        module.configure_model()
        for layer in module.policy.modules():
            if hasattr(layer, "attention_dropout"):
                layer.attention_dropout = 0.5
        watch = run(sums(*[True, False] * 6), module=module)
        found.append([step["train/logps/chosen"] for step in watch.train])
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) == len(found[0])


def test_a_row_counts_by_its_weight(run):
    """Rows of weight 0 teach nothing: the others do as if those were desirable or not."""
    rows = sums(*[False, True] * 6)
    ends = []
    for label in (True, False):
        ignored = {**rows[0], "label": label, "weight": 0}
        watch = run([ignored, *rows[1:]], "apo_zero_unpaired", lr=0.1, batch_size=12)
        ends.append(torch.cat([p.detach().flatten() for p in watch.module.policy.parameters()]))
    assert_close(*ends, rtol=0, atol=1e-7)


def test_bco_remembers_the_mean_of_all_rewards(run):
    rewards = []

    class Spy(UnpairedModule):
        def response_loss(self, batch, logps):
            found = super().response_loss(batch, logps)
            if self.training and torch.is_grad_enabled():
                self.seen.append(self.running["bco"]["delta"].item())
                rewards.append(found.rewards)
            return found

    module = Spy("tiny", "bco", optimizer=partial(torch.optim.SGD, lr=1.0))
    module.seen = []
    run(sums(*[True, False] * 6), module=module, trainer={"max_steps": 3})
    assert module.seen[0] == 0
    for step in (1, 2):
        assert module.seen[step] == pytest.approx(torch.cat(rewards[:step]).mean().item(), abs=1e-9)
    assert module.seen[2] != 0


def test_what_one_loss_has_asked_the_reference_is_there_for_the_others(run, pairs7, caplog):
    """Pairs and completions are the same responses; only the mismatched ones are others."""
    module = DPOModule("tiny", "dpo")
    with caplog.at_level(logging.INFO):
        run(pairs7, module=module, kind=PreferenceDataModule, trainer={"max_epochs": 1})
        for loss in ("bco", "kto", "kto"):
            run(pairs7, loss, trainer={"max_epochs": 1})
    counts = re.findall(
        r"reference: (\d+) responses, (\d+) from cache, (\d+) computed", caplog.text
    )
    (pairs, of_pairs, _), (_, known, asked), kto, again = [tuple(map(int, c)) for c in counts]
    assert (pairs, of_pairs) == (14, 0)
    assert (known, asked) == (14, 0)
    assert kto[1] == 14 < kto[0]
    assert again == (kto[0], kto[0], 0)


def test_a_reference_that_moves(run):
    """TR-DPO's, for KTO: after a copy, policy and reference agree again."""
    refresh = ReferenceRefresh(alpha=1, every_n_steps=2)
    logged = run(sums(*[True, False] * 4), lr=0.3, callbacks=[refresh]).train
    losses = [step["train/loss"] for step in logged]
    assert losses[0] == pytest.approx(0.5, abs=1e-5)
    assert losses[2] == pytest.approx(0.5, abs=1e-5)
    assert losses[1] != pytest.approx(0.5, abs=1e-4)


def test_a_fresh_adapter_is_compared_with_its_base(run):
    pytest.importorskip("peft")
    lora = {"pretrained": "tiny", "lora": {"r": 2, "target_modules": ["q_proj", "v_proj"]}}
    module = UnpairedModule(lora, "kto", optimizer=partial(torch.optim.SGD, lr=0.1))
    assert run(sums(*[True, False] * 4), module=module).train[0]["train/loss"] == pytest.approx(0.5)


def test_a_run_that_does_not_start_from_its_reference_is_stopped(run):
    class Meddle(L.Callback):
        @torch.no_grad()
        def on_train_start(self, trainer, pl_module):
            for p in pl_module.policy.parameters():
                p.add_(0.05 * torch.randn_like(p))

    for loss in UNPAIRED_LOSSES:
        with pytest.raises(UserError, match=r"must agree with its reference.*Likely causes"):
            run(sums(*[True, False] * 4), loss, callbacks=[Meddle()])


def test_mismatched_completions_are_checked_too(run):
    class Meddle(L.Callback):
        def on_train_start(self, trainer, pl_module):
            pl_module.reference_cache.tensors["mismatched_logps"] += 0.1

    with pytest.raises(UserError, match=r"must agree with its reference"):
        run(sums(*[True, False] * 4), callbacks=[Meddle()])
    run(sums(*[True, False] * 4), "bco")


def test_it_learns_to_add(tmp_path):
    """The bundled pairs, taken apart: desirable sums become likelier than undesirable ones."""
    from lit_align.resources import resource

    module = UnpairedModule(
        "tiny", UnpairedConfig("kto", beta=1.0), optimizer=partial(torch.optim.AdamW, lr=1e-4)
    )
    data = UnpairedDataModule(
        resource("arithmetic/train.jsonl"),
        val_path=resource("arithmetic/val.jsonl"),
        val_max_rows=200,
        batch_size=64,
        val_batch_size=200,
        ignore_columns=["margin"],
        cache_dir=tmp_path,
    )
    watch = Watch()
    L.Trainer(
        accelerator="cpu",
        max_steps=60,
        num_sanity_val_steps=-1,
        val_check_interval=60,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[ReferenceCache(tmp_path / "reference"), ExactMatch(), watch],
    ).fit(module, data)
    before, after = watch.val
    assert after["val/exact_match"] > before["val/exact_match"] + 0.1
    assert after["val/rewards/accuracies"] > 0.75
    assert after["val/rewards/margins"] > 0.3
    assert after["val/loss"] < before["val/loss"]


# --- refusals and warnings


def test_pairs_are_refused_and_told_how_to_be_taken_apart(run, pairs7):
    with pytest.raises(UserError, match=r"PreferenceDataModule holds pairs.*UnpairedDataModule"):
        run(pairs7, kind=PreferenceDataModule)


def test_labelled_completions_are_no_pairs(run, pairs7):
    module = DPOModule("tiny", "simpo")
    with pytest.raises(UserError, match=r"learns from pairs.*holds labelled completions"):
        run(pairs7, module=module)


def test_a_loss_of_pairs_is_refused():
    with pytest.raises(UserError, match=r"'dpo' is a loss of pairs.*such as kto.*module=dpo"):
        UnpairedModule("tiny", DPOConfig("dpo"))
    with pytest.raises(UserError, match=r"'dapo' is a loss of policies.*such as kto.*module=grpo"):
        UnpairedModule("tiny", GRPOConfig())
    with pytest.raises(UserError, match="unknown loss 'dpo'; known: apo_zero_unpaired, bco, kto"):
        UnpairedModule("tiny", "dpo")
    with pytest.raises(UserError, match="a loss is a name, a config or the values of one"):
        UnpairedModule("tiny", ["kto", "bco"])
    assert UnpairedModule("tiny", {"loss_type": "kto", "beta": 0.3}).loss.beta == 0.3


def test_other_modules_refuse_a_loss_of_labelled_completions():
    for module in (DPOModule, partial(GRPOModule, reward=print)):
        with pytest.raises(UserError, match=r"'kto' is a loss of labelled compl.*module=unpaired"):
            module("tiny", UnpairedConfig("kto"))
    with pytest.raises(UserError, match=r"'kto' is a loss of labelled completions: UnpairedConf"):
        DPOModule("tiny", "kto")


def test_without_the_cache_callback_it_says_so(tmp_path, pairs7):
    module = UnpairedModule("tiny", "bco")
    data = UnpairedDataModule(pairs7, cache_dir=tmp_path, batch_size=4)
    with pytest.raises(UserError, match=r"loss 'bco' compares.*add the ReferenceCache callback"):
        L.Trainer(
            accelerator="cpu",
            max_steps=1,
            limit_val_batches=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(module, data)


@pytest.mark.parametrize(
    ("labels", "weights", "said"),
    [
        ([True] * 4 + [False] * 4, {}, None),
        ([True] * 5 + [False] * 4, {}, None),
        ([True] * 2 + [False] * 6, {}, "2 are desirable and 6 are not.*between 3 and 4,"),
        ([True] * 2 + [False] * 6, {"desirable_weight": 3.5}, None),
        ([True] * 6 + [False] * 2, {}, "3 times as much.*between 0.333 and 0.444,"),
        ([True] * 4, {}, "all rows to train on are desirable"),
    ],
)
def test_classes_that_do_not_balance_are_told_of(run, caplog, recwarn, labels, weights, said):
    module = UnpairedModule("tiny", UnpairedConfig("kto", **weights))
    with caplog.at_level(logging.WARNING):
        if said is None:
            run(sums(*labels), module=module, trainer={"max_steps": 1})
        else:
            with pytest.warns(UserWarning, match=said):
                run(sums(*labels), module=module, trainer={"max_steps": 1})


# --- metrics by hand


def test_metrics_by_hand():
    found = UnpairedLoss(torch.tensor([1.0, 2, 3, 9]), torch.tensor([1.0, 2, 5, 9]))
    labels, mask = torch.tensor([True, True, False, True]), torch.tensor([True] * 3 + [False])
    logps = torch.tensor([-1.0, -3, -7, -9])
    means = labelled_means(labelled_sums(found, logps, labels, mask, torch.tensor(0.5)))
    assert {name: value.item() for name, value in means.items()} == {
        "loss": 2.0,
        "kl": 0.5,
        "rewards/chosen": 1.5,
        "logps/chosen": -2.0,
        "rewards/rejected": 5.0,
        "logps/rejected": -7.0,
        "rewards/margins": -3.5,
    }


def test_how_often_a_desirable_completion_is_above_an_undesirable_one():
    # 3 is above 1 and 2; 2 is above 1 and level with 2: 3.5 of 4 couples.
    rewards = torch.tensor([3.0, 2, 2, 1])
    labels = torch.tensor([True, True, False, False])
    assert ranked_right(rewards, labels).item() == 3.5 / 4
    assert ranked_right(-rewards, labels).item() == 0.5 / 4
    assert ranked_right(rewards, torch.ones(4).bool()) is None
