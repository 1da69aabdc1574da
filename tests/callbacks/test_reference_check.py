"""The check before the first step: silent on sound runs, and loud on each way to be wrong."""

import math
import shutil

import lightning as L
import pytest
import torch

from lit_align.callbacks.reference_check import Start, _start
from lit_align.callbacks.reference_store import ReferenceStore, Scored
from lit_align.errors import UserError
from lit_align.losses import TensorCache
from lit_align.modules import DPOModule
from lit_align.modules.pair_logps import PairLogps

LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"]}


class Meddle(L.Callback):
    """Does something to the module after the reference was computed and before the check."""

    def __init__(self, change):
        self.change = change

    @torch.no_grad()
    def on_train_start(self, trainer, pl_module):
        self.change(pl_module)


def move_weights(module):
    for p in module.policy.parameters():
        p.add_(0.05 * torch.randn_like(p))


def move_adapter(module):
    for name, p in module.policy.named_parameters():
        if "lora_B" in name:
            p.fill_(0.3)


def shift_one_row(module):
    tensors = {name: t.clone() for name, t in module.reference_cache.tensors.items()}
    tensors["rejected_logps"][:] += 0.02
    module.reference_cache = TensorCache(tensors)


def mix_up_rows(module):
    module.reference_cache = TensorCache(
        {name: t.roll(1) for name, t in module.reference_cache.tensors.items()}
    )


def mix_up_heads(module):
    tensors = module.reference_cache.tensors
    heads = {name: t.roll(1) for name, t in tensors.items() if "head" in name}
    module.reference_cache = TensorCache(tensors | heads)


def means_for_sums(module):
    lengths = torch.tensor([2.0, 3, 4, 5, 2, 3, 4])
    module.reference_cache = TensorCache(
        {name: t / lengths for name, t in module.reference_cache.tensors.items()}
    )


@pytest.mark.parametrize("loss", ["dpo", "dpo_norm", "wpo", "ld_dpo", "mpo"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "64-true"])
def test_a_sound_run_passes(run, loss, precision):
    run(loss=loss, precision=precision)


@pytest.mark.parametrize("first", ["sft", "simpo", "cpo_preference"])
def test_a_sum_that_reports_rewards_without_a_reference_passes(run, first):
    run(loss={"terms": {first: {"weight": 1.0}, "dpo": {"weight": 1.0}}})


def test_a_fresh_adapter_passes(run, llama):
    run({"pretrained": str(llama), "lora": LORA})


def test_dropout_in_training_passes(run, llama, tools, tmp_path):
    assert run(tools.save_llama(tmp_path / "dropout", attention_dropout=0.5)).scored == 14


def test_a_second_model_as_reference_need_not_agree(run, tools, tmp_path):
    other = tools.save_llama(tmp_path / "other", seed=5)
    run(module_options={"reference": str(other)})


@pytest.mark.parametrize(
    ("loss", "change"),
    [
        ("dpo", move_weights),
        ("dpo", shift_one_row),
        ("dpo", mix_up_rows),
        ("dpo_norm", move_weights),
        ("dpo_norm", mix_up_rows),
        ("dpo_norm", means_for_sums),
        ("wpo", mix_up_rows),
        ("ld_dpo", move_weights),
        ("ld_dpo", mix_up_heads),
        ("mpo", move_weights),
        ("mpo", mix_up_rows),
    ],
)
def test_a_run_that_does_not_start_from_its_reference_is_stopped(run, loss, change):
    with pytest.raises(UserError, match=r"must agree with its reference.*Likely causes"):
        run(loss=loss, callbacks=[Meddle(change)])


def test_an_adapter_that_is_not_fresh_is_stopped(run, llama):
    policy = {"pretrained": str(llama), "lora": LORA}
    with pytest.raises(UserError, match="adapter that is not fresh"):
        run(policy, callbacks=[Meddle(move_adapter)])


def test_wrong_numbers_in_a_file_that_looks_sound_are_stopped(run, tmp_path, monkeypatch):
    from lit_align.callbacks import reference_store

    run()
    (part,) = (tmp_path / "reference").glob("*/part-*")
    rows = reference_store._read_part(part)
    wrong = {key: Scored(row.logps - 0.01 * row.tokens, row.tokens) for key, row in rows.items()}
    part.unlink()
    store = ReferenceStore(tmp_path, {})
    store.folder = part.parent
    store.add(wrong, torch.float32)
    with pytest.raises(UserError, match=rf"delete {part.parent}") as caught:
        run()
    # The numbers: 0.01 nats a token, and the loss, whose right value is ln 2.
    assert f"instead of {math.log(2):.6f}" in str(caught.value)
    shutil.rmtree(part.parent)
    run()


def test_a_module_that_averages_on_one_side_only_is_stopped(run, llama):
    class Means(DPOModule):
        def pair_loss(self, batch, logps):
            means = logps._replace(
                chosen=logps.chosen / logps.chosen_lengths,
                rejected=logps.rejected / logps.rejected_lengths,
            )
            return super().pair_loss(batch, means)

    with pytest.raises(UserError, match="must agree"):
        run(module=Means(str(llama), "dpo"))


def test_it_is_made_once_and_only_before_the_first_step(run):
    seen = []

    class Count(DPOModule):
        def pair_logps(self, batch, model=None, **options):
            seen.append((self.trainer.global_step, self.policy.training, torch.is_grad_enabled()))
            return super().pair_logps(batch, model, **options)

    result = run(loss="dpo")
    module = Count({"pretrained": result.module.recipe.pretrained}, "dpo")
    run(module=module, steps=3, accumulate_grad_batches=2)
    assert seen[0] == (0, False, False)
    assert all(training and grad for _, training, grad in seen[1:])
    assert len(seen) == 1 + 3 * 2


# The comparison itself, by hand: beta 1, two tokens a response, 0.01 nats a token allowed, so
# 0.01 * (2 + 4) = 0.06 a response.


def start(chosen, rejected):
    module = DPOModule("unused", {"loss_type": "dpo", "beta": 1.0})
    module.reference_cache = TensorCache(
        {"chosen_logps": torch.tensor([-1.0]), "rejected_logps": torch.tensor([-3.0])}
    )
    lengths = torch.tensor([2])
    reference = PairLogps(*torch.tensor([[-1.0], [-3.0]]), lengths, lengths, None, None)
    logps = PairLogps(*torch.tensor([[chosen], [rejected]]), lengths, lengths, None, None)
    return _start(module, {"index": torch.tensor([0])}, logps, reference, 0.01)


def test_equal_numbers_have_the_analytic_loss():
    result = start(-1.0, -3.0)
    assert result.expected_loss.item() == pytest.approx(math.log(2))
    assert result.fault() is None


@pytest.mark.parametrize(("chosen", "rejected"), [(-1.059, -3.0), (-1.0, -2.941), (-1.05, -2.95)])
def test_what_is_allowed_is_no_fault(chosen, rejected):
    assert start(chosen, rejected).fault() is None


@pytest.mark.parametrize(
    ("chosen", "rejected", "difference"),
    [(-1.061, -3.0, "0.061"), (-1.0, -2.939, "0.061"), (math.nan, -3.0, "nan")],
)
def test_more_than_is_allowed_is_a_fault(chosen, rejected, difference):
    fault = start(chosen, rejected).fault()
    assert f"row 0 their log-probs differ by {difference} nats (allowed: 0.06)" in fault


def test_a_wrong_loss_of_right_log_probs_is_a_fault():
    # At the corners of what is allowed the margin is 0.12, so the loss log(1 + e^0.12).
    sound = start(-1.0, -3.0)
    corner = math.log1p(math.exp(0.12)) - math.log(2)
    assert sound.allowed_loss.item() == pytest.approx(corner, rel=1e-5)
    assert sound._replace(loss=sound.loss + corner * 0.99).fault() is None
    wrong = sound._replace(loss=sound.loss + corner * 1.01)
    assert "loss is 0.755564 instead of 0.693147" in wrong.fault()


def test_rewards_of_equal_log_probs_are_a_fault():
    # At the corners the rewards are off by 0.06.
    sound = start(-1.0, -3.0)
    assert sound._replace(reward=torch.tensor([0.059])).fault() is None
    assert "would be 0.061 instead of 0" in sound._replace(reward=torch.tensor([0.061])).fault()


@pytest.mark.parametrize("part", ["difference", "loss", "reward"])
def test_what_is_no_number_is_a_fault(part):
    assert start(-1.0, -3.0)._replace(**{part: torch.tensor([math.nan])}).fault()


def test_the_first_bad_row_is_the_one_that_is_named():
    zero = torch.zeros(3)
    difference, allowed = torch.tensor([0.0, 1, 1]), torch.tensor([1, 0.5, 0.5])
    start = Start(torch.tensor([7, 8, 9]), difference, allowed, *[zero] * 5)
    assert "row 8 " in start.fault()
