"""A reference that follows: where it is, what it says, and that a stopped run goes on with it."""

import math

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from lit_align.callbacks import ReferenceCache, ReferenceRefresh, SavePolicy
from lit_align.data import UnpairedDataModule
from lit_align.errors import UserError
from lit_align.modules import DPOModule, UnpairedModule
from lit_align.modules.moving import MovingReference

LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"]}
HOW = [(0.6, 1), (0.3, 2), (1.0, 2), (1.0, 3)]


class Watch(L.Callback):
    """The trained weights of policy and reference, before the first step and after each one."""

    def __init__(self, refresh):
        self.refresh = refresh
        self.policy, self.reference = [], []

    def look(self, module):
        self.policy.append(trained(module))
        kept = dict(self.refresh.reference.model.named_parameters())
        self.reference.append({name: kept[name].clone() for name in self.policy[0]})

    def on_train_start(self, trainer, pl_module):
        self.look(pl_module)

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.look(pl_module)


def trained(module):
    found = module.policy.named_parameters()
    return {name: p.detach().clone() for name, p in found if p.requires_grad}


def watched(alpha, every):
    refresh = ReferenceRefresh(alpha, every)
    return refresh, Watch(refresh)


def by_hand(policy, alpha, every):
    """Where the reference is after each step, in float64."""
    expected = [{name: weight.double() for name, weight in policy[0].items()}]
    for step, weights in enumerate(policy[1:], start=1):
        before = expected[-1]
        share = alpha if step % every == 0 else 0.0
        expected.append(
            {name: share * w.double() + (1 - share) * before[name] for name, w in weights.items()}
        )
    return expected


def logged(folder):
    """What the run has logged of each training step, by name."""
    names, *lines = (folder / "metrics.csv").read_text().splitlines()
    rows = [dict(zip(names.split(","), line.split(","), strict=True)) for line in lines]
    return [{k: float(v) for k, v in row.items() if v} for row in rows if row["train/loss"]]


def assert_equal(weights, others):
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, others[name]), name


# Where it is


@pytest.mark.parametrize(("alpha", "every"), HOW)
@pytest.mark.parametrize("lora", [None, LORA], ids=["all weights", "lora"])
def test_it_is_where_the_formula_puts_it(run, llama, alpha, every, lora):
    refresh, watch = watched(alpha, every)
    run({"pretrained": str(llama), "lora": lora}, callbacks=[refresh, watch], steps=6)
    assert len(watch.reference) == 7
    for found, expected in zip(watch.reference, by_hand(watch.policy, alpha, every), strict=True):
        for name, weight in expected.items():
            assert_close(found[name].double(), weight, rtol=1e-6, atol=1e-7)
    # The test would be empty if nothing had moved.
    name = next(reversed(watch.reference[0]))
    assert not torch.equal(watch.reference[-1][name], watch.reference[0][name])
    assert not torch.equal(watch.reference[-1][name], watch.policy[1][name])


def test_steps_are_those_of_the_optimizer(run):
    refresh, watch = watched(1.0, 2)
    run(callbacks=[refresh, watch], steps=4, batch_size=1, accumulate_grad_batches=3)
    moves = [
        n
        for n in range(1, len(watch.reference))
        if any(
            not torch.equal(watch.reference[n][name], weight)
            for name, weight in watch.reference[n - 1].items()
        )
    ]
    # Seven rows: an epoch's steps are of 3, 3 and 1 micro-batches.
    assert moves == [6, 10]


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_a_small_share_of_a_policy_in_half_precision_counts_in_full(run, precision):
    # 256 + 0.001 is 256 in bfloat16: what is added must not be rounded away each time.
    refresh, watch = watched(0.001, 1)
    run(callbacks=[refresh, watch], precision=precision, steps=6, lr=0.05)
    expected = by_hand(watch.policy, 0.001, 1)[-1]
    kept = refresh.reference.weights()
    for name, weight in expected.items():
        assert_close(kept[name].double(), weight, rtol=1e-6, atol=1e-7)
        half = watch.policy[0][name].dtype
        assert half in {torch.bfloat16, torch.float16}
        # What compares is in the precision of the policy.
        assert torch.equal(watch.reference[-1][name], kept[name].to(half))
    start = {name: weight.double() for name, weight in watch.policy[0].items()}
    assert any(not torch.equal(kept[name].double(), weight) for name, weight in start.items())


def test_under_an_adapter_the_base_is_the_policys_own(run, llama):
    refresh = ReferenceRefresh(0.5, 1)
    result = run({"pretrained": str(llama), "lora": LORA}, callbacks=[refresh])
    kept = dict(refresh.reference.model.named_parameters())
    for name, parameter in result.module.policy.named_parameters():
        assert (kept[name] is parameter) != parameter.requires_grad, name
    assert set(refresh.reference.trained) == set(trained(result.module))


# What it says


@pytest.mark.parametrize("lora", [None, LORA], ids=["all weights", "lora"])
def test_its_log_probs_are_those_of_the_kept_weights(run, llama, lora):
    """One response at a time, unpadded, from the logits; dropout is the policy's alone."""
    policy = {"pretrained": str(llama), "lora": lora}
    asked = []

    class Asked(DPOModule):
        def reference_rows(self, batch):
            found = super().reference_rows(batch)
            model = dict(self.live_reference.model.named_parameters())
            asked.append(({k: v.clone() for k, v in model.items()}, batch["index"], found))
            return found

    refresh = ReferenceRefresh(0.6, 2)
    module = Asked(policy, optimizer=lambda weights: torch.optim.SGD(weights, lr=0.05))
    module.configure_model()
    for layer in module.policy.modules():
        if hasattr(layer, "attention_dropout"):
            layer.attention_dropout = 0.3
    result = run(module=module, callbacks=[refresh], steps=5)
    assert len(asked) == 5
    rows = {row["index"]: row for row in result.datamodule.train_rows}
    model = refresh.reference.model.eval()
    for weights, index, found in asked:
        model.load_state_dict(weights, strict=False)
        for side in ("chosen", "rejected"):
            expected = [response_logps(model, rows[n], side) for n in index.tolist()]
            assert_close(
                found[f"reference_{side}_logps"], torch.tensor(expected), rtol=0, atol=2e-5
            )
            assert not found[f"reference_{side}_logps"].requires_grad


@torch.no_grad()
def response_logps(model, row, side):
    ids = torch.tensor([row["prompt_ids"] + row[f"{side}_ids"]])
    logprobs = model(ids).logits[0, :-1].log_softmax(-1)
    tokens = logprobs.gather(-1, ids[0, 1:, None])[:, 0]
    return float(tokens[len(row["prompt_ids"]) - 1 :].sum())


@pytest.mark.parametrize("loss", ["dpo", "dpo_norm", "ipo", "wpo"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_copy_after_each_step_leaves_no_rewards(run, tmp_path, loss, precision):
    # Under autocast a policy in training and its copy must not share weights that are cast.
    logger = CSVLogger(tmp_path / "log", "", "")
    run(
        loss={"loss_type": loss, "beta": 0.5},
        callbacks=[ReferenceRefresh(1.0, 1)],
        logger=logger,
        precision=precision,
        lr=0.05,
    )
    for step in logged(tmp_path / "log"):
        assert step["train/rewards/chosen"] == pytest.approx(0, abs=1e-5)
        assert step["train/rewards/rejected"] == pytest.approx(0, abs=1e-5)


def test_rewards_grow_from_zero_after_each_copy(run, tmp_path):
    logger = CSVLogger(tmp_path / "log", "", "")
    run(callbacks=[ReferenceRefresh(1.0, 3)], logger=logger, steps=7, lr=0.05, batch_size=7)
    rewards = [abs(step["train/rewards/margins"]) for step in logged(tmp_path / "log")]
    assert [reward < 1e-5 for reward in rewards] == [True, False, False] * 2 + [True]
    moves = [step["train/reference_refreshes"] for step in logged(tmp_path / "log")]
    assert moves == [0, 0, 1, 1, 1, 2, 2]


def test_it_changes_what_is_learnt_from_the_first_move_on(run):
    fixed = run(steps=4).module
    late = run(steps=4, callbacks=[ReferenceRefresh(1.0, 4)]).module
    early = run(steps=4, callbacks=[ReferenceRefresh(1.0, 2)]).module
    for name, weight in trained(fixed).items():
        assert_close(trained(late)[name], weight, rtol=0, atol=1e-6)
    name = "lm_head.weight"
    assert float((trained(early)[name] - trained(fixed)[name]).abs().max()) > 1e-5


def test_validation_compares_with_it_as_well(run, pairs):
    result = run(
        callbacks=[ReferenceRefresh(1.0, 2)],
        steps=4,
        data_options={"val_path": pairs},
        check_val_every_n_epoch=None,
        val_check_interval=2,
    )
    assert float(result.trainer.callback_metrics["val/loss"]) == pytest.approx(math.log(2))


@pytest.mark.parametrize(("every", "agree"), [(1, True), (9, False)])
def test_labelled_completions_are_compared_with_it_too(tools, llama, pairs, tmp_path, every, agree):
    logger = CSVLogger(tmp_path / "log", "", "")
    module = UnpairedModule(
        llama, "kto", optimizer=lambda weights: torch.optim.SGD(weights, lr=0.05)
    )
    trainer = tools.quiet_trainer(
        max_steps=4,
        limit_val_batches=0,
        logger=logger,
        callbacks=[ReferenceCache(tmp_path), ReferenceRefresh(1.0, every)],
    )
    trainer.fit(module, UnpairedDataModule(pairs, batch_size=4, cache_dir=tmp_path / "pairs"))
    last = logged(tmp_path / "log")[-1]
    for side in ("chosen", "rejected"):
        assert (abs(last[f"train/rewards/{side}"]) < 1e-6) == agree


@pytest.mark.parametrize(("every", "never"), [(2, False), (512, True)])
def test_it_says_how_it_moves_and_if_it_never_will(run, every, never):
    said = " ".join(run(callbacks=[ReferenceRefresh(0.5, every)]).said)
    assert f"moves 0.5 of the way to the policy every {every} steps" in said
    assert ("never reaches" in said) == never


def test_no_pass_over_the_data_is_made(run):
    result = run(callbacks=[ReferenceRefresh()])
    assert result.scored == 0
    assert result.cache is None
    assert [line for line in result.said if "reference" in line] == [
        "reference: moves 0.6 of the way to the policy every 512 steps, which this run of 4 never "
        "reaches"
    ]


def test_how_the_work_is_cut_changes_nothing(run):
    whole, cut = (
        run(
            callbacks=[ReferenceRefresh(0.6, 2)],
            precision="64-true",
            batch_size=size,
            accumulate_grad_batches=parts,
            steps=5,
        ).module
        for size, parts in ((4, 1), (1, 4))
    )
    for name, weight in trained(whole).items():
        assert_close(trained(cut)[name], weight, rtol=0, atol=1e-10)


# Stopped and resumed


class SaveAt(L.Callback):
    """Saves after a step; before the reference is told of it if it stands before `refresh`."""

    def __init__(self, step, path):
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer, pl_module, *args):
        if trainer.global_step == self.step and not self.path.exists():
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("saved_first", [False, True], ids=["", "stopped before a due move"])
@pytest.mark.parametrize("stopped", [2, 3, 4])
@pytest.mark.parametrize("lora", [None, LORA], ids=["all weights", "lora"])
def test_a_resumed_run_ends_as_one_that_was_not_stopped(
    run, llama, tmp_path, stopped, lora, saved_first
):
    policy = {"pretrained": str(llama), "lora": lora}
    path = tmp_path / "stopped.ckpt"
    refresh, watch = watched(0.6, 3)
    callbacks = [refresh, SaveAt(stopped, path), watch]
    whole = run(
        policy, callbacks=sorted(callbacks, key=lambda c: saved_first and c is refresh), steps=7
    )
    again, watch_again = watched(0.6, 3)
    resumed = run(policy, callbacks=[again, watch_again], steps=7, ckpt_path=path)
    assert_equal(trained(resumed.module), trained(whole.module))
    kept = dict(refresh.reference.model.named_parameters())
    assert_equal(
        watch_again.reference[-1], {name: kept[name] for name in refresh.reference.trained}
    )
    assert len(watch_again.reference) == 8 - stopped


def test_so_it_does_in_half_precision(run, tmp_path):
    path = tmp_path / "stopped.ckpt"
    refresh, again = (ReferenceRefresh(0.01, 2) for _ in range(2))
    options = {"precision": "bf16-true", "lr": 0.05, "steps": 7}
    whole = run(callbacks=[refresh, SaveAt(4, path)], **options)
    resumed = run(callbacks=[again], ckpt_path=path, **options)
    assert_equal(trained(resumed.module), trained(whole.module))
    assert_equal(again.reference.weights(), refresh.reference.weights())


def test_a_checkpoint_holds_plain_tensors_of_what_is_trained(run, llama, tmp_path):
    refresh = ReferenceRefresh(0.6, 3)
    result = run({"pretrained": str(llama), "lora": LORA}, callbacks=[refresh])
    result.trainer.save_checkpoint(tmp_path / "one.ckpt")
    saved = torch.load(tmp_path / "one.ckpt", weights_only=True)["callbacks"]["ReferenceRefresh"]
    assert saved["moved_at"] == 3
    assert saved["weights"].keys() == trained(result.module).keys()
    kept = dict(refresh.reference.model.named_parameters())
    for name, weight in saved["weights"].items():
        assert type(weight) is torch.Tensor
        assert torch.equal(weight, kept[name])


# One run after another


def test_a_later_run_without_it_has_its_usual_reference(run):
    first = run(callbacks=[ReferenceRefresh(1.0, 1)])
    assert first.module.live_reference is None
    second = run(module=first.module)
    assert second.scored == 14


def test_that_is_the_policy_before_the_first_of_the_runs(run):
    first = run(callbacks=[ReferenceRefresh(1.0, 1)], lr=0.05)
    later = run(module=first.module)
    alone = run()
    assert_equal(later.cache.tensors, alone.cache.tensors)


def test_of_a_loaded_model_that_is_gone_and_refused(run, llama):
    module = DPOModule(AutoModelForCausalLM.from_pretrained(llama))
    run(module=module, callbacks=[ReferenceRefresh(1.0, 1)])
    with pytest.raises(UserError, match="this policy before its first step, cannot be had"):
        run(module=module)


@pytest.mark.parametrize("lora", [None, {"r": 2, "target_modules": "all-linear"}])
def test_of_completions_too(act, tools, lora):
    policy = {"pretrained": "tiny", "lora": lora}
    module = {"policy": policy, "loss": {"beta": 0.1}, "filter_groups": False}
    first = act(ReferenceRefresh(1.0, 1), module=module, max_steps=2)
    assert first.ended_by is None
    later = tools.quiet_trainer(max_steps=2, limit_val_batches=0, use_distributed_sampler=False)
    validation = tools.quiet_trainer(use_distributed_sampler=False)
    validation.validate(first.module, first.datamodule, verbose=False)
    if lora:  # switched off, it is what it was
        later.fit(first.module, first.datamodule)
        return
    for _ in range(2):
        with pytest.raises(UserError, match=r"earlier run with ReferenceRefresh .* a new module"):
            later.fit(first.module, first.datamodule)


def test_so_it_has_after_a_run_that_broke_off(run):
    class Broken(L.Callback):
        def on_train_batch_end(self, *args):
            raise RuntimeError("out of memory")

    module = DPOModule("tiny")
    with pytest.raises(RuntimeError, match="out of memory"):
        run(module=module, callbacks=[ReferenceRefresh(1.0, 1), Broken()])
    assert module.live_reference is None


def test_another_policy_gets_a_reference_of_its_own(run, tools, tmp_path, llama):
    refresh = ReferenceRefresh(1.0, 9)
    run(callbacks=[refresh])
    other = tools.save_llama(tmp_path / "other", seed=5)
    run(other, callbacks=[refresh])
    kept = refresh.reference.model.lm_head.weight
    assert torch.equal(kept, AutoModelForCausalLM.from_pretrained(other).lm_head.weight)


def test_after_a_fit_it_validates_with_what_the_fit_arrived_at(run, pairs):
    refresh = ReferenceRefresh(1.0, 4)
    result = run(callbacks=[refresh], data_options={"val_path": pairs})
    metrics = result.trainer.validate(result.module, result.datamodule, verbose=False)[0]
    assert metrics["val/loss"] == pytest.approx(math.log(2))


# Completions


@pytest.mark.parametrize("lora", [None, {"r": 2}], ids=["all weights", "lora"])
def test_the_reference_of_completions_moves_too(act, lora):
    refresh, watch = watched(0.6, 2)
    policy = {"pretrained": "tiny", "lora": lora and {**lora, "target_modules": "all-linear"}}
    module = {"policy": policy, "loss": {"beta": 0.1}, "filter_groups": False}
    result = act(refresh, watch, module=module, lr=0.05)
    assert result.ended_by is None
    # Three micro-batches a step.
    steps = watch.policy[::3]
    for found, expected in zip(watch.reference[::3], by_hand(steps, 0.6, 2), strict=True):
        for name, weight in expected.items():
            assert_close(found[name].double(), weight, rtol=1e-6, atol=1e-7)
    assert not isinstance(result.module.live_reference, MovingReference)


def test_after_a_copy_completions_are_as_likely_under_the_reference(act):
    module = {"loss": {"beta": 0.1}, "filter_groups": False}
    kl = {}
    for every in (1, 9):
        result = act(ReferenceRefresh(1.0, every), module=module, lr=0.05)
        kl[every] = float(result.trainer.callback_metrics["train/kl"])
    assert kl[1] == pytest.approx(0, abs=1e-6)
    assert kl[9] > 1e-5


def test_a_resumed_run_of_completions_ends_as_one_that_was_not_stopped(act, tmp_path):
    options = {
        "module": {"loss": {"beta": 0.1}, "filter_groups": False},
        "data": {"num_iterations": 2},
        "lr": 0.01,
        "max_steps": 6,
    }
    path = tmp_path / "stopped.ckpt"
    # In the middle of a rollout, and after a move that the next one is to see.
    refresh = ReferenceRefresh(0.6, 3)
    whole = act(SaveAt(3, path), refresh, **options)
    again = ReferenceRefresh(0.6, 3)
    resumed = act(again, ckpt_path=path, **options)
    assert whole.ended_by is resumed.ended_by is None
    assert_equal(trained(resumed.module), trained(whole.module))
    assert_equal(again.reference.weights(), refresh.reference.weights())


# What it refuses


def test_a_best_policy_by_rewards_is_warned_of(run, tmp_path):
    callbacks = [ReferenceRefresh(), SavePolicy(tmp_path / "run", best="val/rewards/accuracies")]
    with pytest.warns(UserWarning, match="best_metric=val/ranking_accuracies"):
        run(callbacks=callbacks)


@pytest.mark.parametrize("alpha", [0, -0.1, 1.01, math.nan, True, None, "1"])
def test_a_share_that_is_none_is_refused(alpha):
    with pytest.raises(UserError, match=r"alpha must be above 0 and at most 1, not"):
        ReferenceRefresh(alpha)


@pytest.mark.parametrize("every", [0, -1, 1.5, True, None])
def test_an_interval_that_is_none_is_refused(every):
    with pytest.raises(UserError, match=r"every_n_steps must be a whole number .* not"):
        ReferenceRefresh(0.6, every)


def test_a_loss_that_compares_with_nothing_is_refused(run, act):
    with pytest.raises(UserError, match="this loss compares with none"):
        run(loss="simpo", callbacks=[ReferenceRefresh()])
    result = act(ReferenceRefresh())
    assert "loss.beta above 0" in str(result.ended_by)
    # It has not taken the place of anything.
    assert not isinstance(result.module.live_reference, MovingReference)


def test_who_looks_for_the_loss_is_told_of_the_callback(llama):
    with pytest.raises(UserError, match="'tr_dpo' is dpo, and the callback ReferenceRefresh"):
        DPOModule(llama, "tr_dpo")


def test_another_model_as_reference_is_refused(run, llama):
    with pytest.raises(UserError, match=r"leave reference=\.\.\. out"):
        run(module_options={"reference": str(llama)}, callbacks=[ReferenceRefresh()])


def test_a_checkpoint_without_it_is_refused(run, tmp_path):
    run(steps=2).trainer.save_checkpoint(tmp_path / "without.ckpt")
    with pytest.raises(UserError, match="written without ReferenceRefresh"):
        run(callbacks=[ReferenceRefresh()], ckpt_path=tmp_path / "without.ckpt")


MOVED = r"add the callback ReferenceRefresh\(alpha=0\.6, every_n_steps=3\)"


def test_a_run_that_had_it_does_not_go_on_without(run, pairs, tools, tmp_path):
    path = tmp_path / "with.ckpt"
    result = run(callbacks=[ReferenceRefresh(0.6, 3)], data_options={"val_path": pairs})
    result.trainer.save_checkpoint(path)
    with pytest.raises(UserError, match=MOVED):
        run(ckpt_path=path)
    # To be looked at, it needs none: but for Lightning's own warning, that is as ever.
    trainer = tools.quiet_trainer(callbacks=[ReferenceCache(tmp_path / "reference")])
    with pytest.warns(UserWarning, match=r"add the following callbacks: \['ReferenceRefresh'\]"):
        trainer.validate(DPOModule(result.module.recipe), result.datamodule, path, verbose=False)
    loaded = DPOModule.load_from_checkpoint(path, weights_only=True)
    assert_equal(trained(loaded), trained(result.module))


def test_nor_does_one_of_completions(act, tmp_path):
    path = tmp_path / "with.ckpt"
    options = {"module": {"loss": {"beta": 0.1}, "filter_groups": False}}
    act(ReferenceRefresh(0.6, 3), SaveAt(2, path), **options)
    assert "add the callback" in str(act(ckpt_path=path, **options).ended_by)


@pytest.mark.parametrize(
    ("alpha", "every", "change"),
    [(0.5, 3, "alpha 0.6 is now 0.5"), (0.6, 2, "every_n_steps 3 is now 2")],
)
def test_nor_with_other_settings(run, tmp_path, alpha, every, change):
    path = tmp_path / "one.ckpt"
    run(callbacks=[ReferenceRefresh(0.6, 3), SaveAt(2, path)])
    with pytest.raises(UserError, match=rf"another ReferenceRefresh \({change}\): repeat"):
        run(callbacks=[ReferenceRefresh(alpha, every)], ckpt_path=path)


@pytest.mark.parametrize("size", [0, -1, 2.5, "4", True])
def test_a_batch_size_of_the_cache_that_is_none_is_refused(size):
    with pytest.raises(UserError, match=r"batch_size must be a whole number .* not"):
        ReferenceCache(batch_size=size)
    with pytest.raises(UserError, match=r"max_tokens_per_batch must be a whole number .* not"):
        ReferenceCache(max_tokens_per_batch=size)


def test_validation_alone_is_refused(run, pairs, tools, tmp_path):
    result = run(data_options={"val_path": pairs})
    trainer = tools.quiet_trainer(callbacks=[ReferenceRefresh()], default_root_dir=tmp_path)
    with pytest.raises(UserError, match="validate there, or leave it out"):
        trainer.validate(result.module, result.datamodule, verbose=False)


def test_deepspeed_is_refused(tools, monkeypatch, llama):
    trainer = tools.quiet_trainer()
    monkeypatch.setattr(trainer, "_accelerator_connector", trainer._accelerator_connector)
    strategy = DeepSpeedStrategy.__new__(DeepSpeedStrategy)
    monkeypatch.setattr(trainer._accelerator_connector, "strategy", strategy)
    with pytest.raises(UserError, match="as DeepSpeedStrategy holds them: choose strategy=ddp"):
        ReferenceRefresh().setup(trainer, DPOModule(llama), "fit")
