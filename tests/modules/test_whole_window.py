"""Losses that compare the rows of an optimizer step: the same however the step was cut."""

from itertools import pairwise

import lightning as L
import pytest
import torch
from distributed.conftest import write_pairs
from distributed.fit import fit as fit_pairs
from distributed.fit_grpo import fit, save_random
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close
from torch.utils.data import DataLoader

from lit_align.errors import UserError
from lit_align.losses import (
    DPOConfig,
    GRPOConfig,
    TensorCache,
    aggregate,
    compute_loss,
    correction_weights,
    grpo_terms,
    kept_tokens,
    policy_ratio,
    token_losses,
    window_counts,
)
from lit_align.modules import DPOModule
from lit_align.modules.pair_metrics import pair_means
from lit_align.modules.whole_window import WholeWindow

COVARIANCES = {"cov_share": 0.3, "cov_lower": -9.0, "cov_upper": 9.0}
LOSSES = {
    "clip_cov": {"loss_fn": "clip_cov", **COVARIANCES},
    "kl_cov": {"loss_fn": "kl_cov", "cov_share": 0.2},
    "top_entropy": {"token_filter": "top_entropy", "entropy_bonus": 0.01},
    "tis_normalised": {"correction": "tis_normalised"},
    "tis_sequence_normalised": {
        "correction": "tis_sequence_normalised",
        "aggregation": "prompt_mean",
    },
}
# 4 prompts x 3 completions, and a last step of 3: one micro-batch, several, some of them empty.
CUTS = [(5, 1), (2, 1), (5, 6)]
OF_PAIRS = ["aot", "aot_unpaired", "beta_dpo"]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return save_random(tmp_path_factory.mktemp("gpt2"), "gpt2")


@pytest.fixture(scope="module")
def pairs13(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("pairs") / "pairs13.jsonl", 13)


def gradients(policy, loss, cut, **options):
    batch_size, accumulate = cut
    options = {"prompts": 5, "optimizer": "sgd", "off": 0.1, **options}
    options |= {"batch_size": batch_size, "accumulate": accumulate, "loss": LOSSES[loss]}
    return fit(policy, **options)["steps"].gradients


def difference(ones, others):
    return max(float((a - b).norm() / a.norm()) for a, b in zip(ones, others, strict=True))


@pytest.mark.parametrize("loss", LOSSES)
def test_tokens_are_compared_with_all_of_the_step(gpt2, loss):
    """Twice, so that ratios move: in float64."""
    options = {"precision": "64-true", "num_iterations": 2}
    whole = gradients(gpt2, loss, (12, 1), **options)
    assert len(whole) == 4
    for cut in CUTS:
        assert difference(whole, gradients(gpt2, loss, cut, **options)) < 1e-10


@pytest.mark.parametrize("loss", LOSSES)
def test_tokens_are_compared_with_all_of_the_step_in_float32(gpt2, loss):
    whole = gradients(gpt2, loss, (12, 1), max_steps=1)
    assert difference(whole, gradients(gpt2, loss, (2, 1), max_steps=1)) < 1e-6


@pytest.mark.parametrize("loss", LOSSES)
def test_the_comparison_makes_a_difference(gpt2, loss, monkeypatch):
    """Else the tests above would say nothing of it: here each micro-batch stands for itself."""
    options = {"num_iterations": 2, "max_steps": 2, "optimizer": "adamw"}
    whole = gradients(gpt2, loss, (12, 1), **options)
    monkeypatch.setattr(
        "lit_align.modules.whole_window.Windows.look_ahead", lambda self, *arguments: None
    )
    assert difference(whole, gradients(gpt2, loss, (2, 1), **options)) > 1e-3


def pairs_of(rows, seed=0):
    """Log-probs of policy and reference, (rows,), and what a pair is known by."""
    generator = torch.Generator().manual_seed(seed)
    names = ("chosen", "rejected", "reference_chosen_logps", "reference_rejected_logps", "draws")
    return {
        **{n: torch.rand(rows, generator=generator, dtype=torch.float64) for n in names},
        "key": torch.randperm(rows, generator=generator).unsqueeze(-1),
        "is_real": torch.ones(rows, dtype=torch.bool),
    }


def total(loss, rows):
    return compute_loss(DPOConfig(loss), rows, rows["chosen"], rows["rejected"]).losses.sum()


@pytest.mark.parametrize("loss", OF_PAIRS)
@given(st.integers(1, 12), st.lists(st.integers(0, 12), max_size=4))
def test_gradients_of_the_parts_are_those_of_the_whole(loss, rows, bounds):
    """Parts of any sizes, empty ones too, whichever rank they are of; one row is a filler's."""
    pairs = pairs_of(rows)
    leaves = {name: pairs[name].clone().requires_grad_() for name in ("chosen", "rejected")}
    order = pairs["key"].flatten().argsort()
    whole = {name: values[order] for name, values in {**pairs, **leaves}.items()}
    expected = torch.autograd.grad(total(loss, whole), [*leaves.values()])
    cuts = [0, *sorted(min(bound, rows) for bound in bounds), rows]
    places = [torch.arange(a, b) for a, b in pairwise(cuts)]
    parts = [{name: v[place] for name, v in {**pairs, **leaves}.items()} for place in places]
    filler = {name: values[:1] for name, values in pairs.items()}
    window = WholeWindow([*parts, {**filler, "is_real": torch.tensor([False])}])
    found = [torch.zeros(rows, dtype=torch.float64) for _ in leaves]
    for part, place in zip(parts, places, strict=True):
        given, is_own = window.around(part)
        assert is_own.sum() == len(place)
        gradient = torch.autograd.grad(total(loss, given), [*leaves.values()], retain_graph=True)
        found = [a + b for a, b in zip(found, gradient, strict=True)]
    for ours, right in zip(found, expected, strict=True):
        assert_close(ours, right, rtol=1e-10, atol=1e-12)


def test_rows_are_put_together_as_wide_as_the_widest():
    parts = [
        {"key": torch.tensor([[2, 0]]), "is_real": torch.tensor([True]), "t": torch.ones(1, 2)},
        {
            "key": torch.tensor([[1, 5], [1, 4]]),
            "is_real": torch.tensor([True, True]),
            "t": torch.tensor([[5.0, 5, 5], [4, 4, 4]]),
        },
    ]
    live = {**parts[0], "t": torch.full((1, 2), 7.0, requires_grad=True)}
    rows, is_own = WholeWindow(parts).around(live)
    assert rows["t"].tolist() == [[4, 4, 4], [5, 5, 5], [7, 7, 0]]
    assert is_own.tolist() == [False, False, True]
    rows["t"].sum().backward()
    assert live["t"].grad.tolist() == [[1, 1]]


@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_without_trained_tokens_has_a_loss_of_0_and_a_gradient_of_0(loss):
    """All completions were cut for their length: every micro-batch is as good as a filler."""
    config = GRPOConfig(**LOSSES[loss])
    rows = {"key": torch.arange(2).unsqueeze(-1), "is_real": torch.zeros(2, dtype=torch.bool)}
    live = {**rows, "new": torch.zeros(2, 3, requires_grad=True)}
    given, is_own = WholeWindow([live]).around(live)
    new = given["new"]
    assert new.shape == (0, 3)
    assert is_own.shape == (0,)
    mask = torch.ones_like(new, dtype=torch.bool)
    old, zeros = new.detach(), torch.zeros_like(new)
    kept = kept_tokens(config, entropy=zeros, mask=mask, new_logprobs=new, advantages=zeros)
    weights = correction_weights(config, old, old, mask)
    ratio = policy_ratio(config, new, old, mask)
    others = {"old_logprobs": old, "mask": mask, "draws": zeros}
    terms = grpo_terms(new, ratio, zeros, None, config, weights, kept, **others)
    counts = window_counts(mask, torch.arange(0))
    share = aggregate(config, token_losses(config, terms, new, 0.01), mask, counts)
    assert share == 0
    share.backward()
    assert live["new"].grad.tolist() == [[0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("loss", OF_PAIRS)
def test_both_passes_drop_out_the_same(tmp_path, pairs13, loss, monkeypatch):
    """What a micro-batch computes with gradients is what the pass before has said of it."""
    apart, around = [], WholeWindow.around

    def compared(self, own):
        for name in ("chosen", "rejected"):
            rows, is_own = around(self, own)
            apart.append(float((rows[name].detach() - self.rows[name])[is_own].abs().max()))
        return around(self, own)

    monkeypatch.setattr(WholeWindow, "around", compared)
    options = {"cache": tmp_path, "loss": loss, "batch_size": 2, "accumulate": 4}
    fit_pairs(pairs13, dropout=0.3, **options)
    assert len(apart) == 14
    assert max(apart) == 0
    monkeypatch.setattr(DPOModule, "seed_step", lambda self, ahead=0: None)
    fit_pairs(pairs13, dropout=0.3, **options)
    assert max(apart) > 0.01


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_autocast_keeps_no_weight_without_a_gradient(tmp_path, pairs13, precision):
    options = {"cache": tmp_path, "loss": "aot", "precision": precision, "max_steps": 1}
    options |= {"optimizer": "sgd"}
    whole = fit_pairs(pairs13, batch_size=8, **options)["gradients"]
    parts = fit_pairs(pairs13, batch_size=2, accumulate=4, **options)["gradients"]
    assert difference(whole, parts) < 0.05


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
def test_a_loader_that_knows_nothing_of_steps_is_refused(tmp_path, pairs13):
    def run(accumulate):
        trainer = L.Trainer(
            accelerator="cpu",
            max_steps=1,
            accumulate_grad_batches=accumulate,
            limit_val_batches=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = DPOModule("tiny", "aot")
        module.reference_cache = TensorCache({"chosen_logps": ONES, "rejected_logps": ONES})
        trainer.fit(module, DataLoader(range(8), batch_size=4, collate_fn=batch_of_sums))

    run(1)
    with pytest.raises(UserError, match=r"loss 'aot' compares the rows of an optimizer step"):
        run(2)


ONES = -torch.ones(8)


def batch_of_sums(rows):
    """Pairs like those of the bundled data, by hand."""
    ids = torch.tensor([[5, 6 + row, 7, 8] for row in rows])
    labels = ids.masked_fill(torch.arange(4) < 2, -100)
    halves = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    batch = {f"chosen_{name}": values for name, values in halves.items()}
    batch |= {f"rejected_{name}": values for name, values in halves.items()}
    batch["rejected_labels"] = batch["rejected_input_ids"] = ids.flip(-1)
    return batch | {"index": torch.tensor(rows)}


@pytest.mark.parametrize("loss", ["aot", "aot_unpaired"])
def test_validation_compares_the_real_pairs_of_a_batch(loss):
    module = DPOModule("tiny", loss)
    module.configure_model()
    module.reference_cache = TensorCache(
        {"chosen_logps": torch.linspace(-9, -1, 8), "rejected_logps": torch.linspace(-3, -8, 8)}
    )

    def validated(batch):
        with torch.no_grad():
            module.validation_step(batch, 0)
        found = pair_means(module.val_sums.compute())
        module.val_sums.reset()
        return found

    alone = validated(batch_of_sums([1, 4, 6]))
    mask = torch.tensor([True, True, False, True])
    padded = validated({**batch_of_sums([1, 4, 0, 6]), "pair_mask": mask})
    for name, value in alone.items():
        assert_close(padded[name], value)
    assert validated({**batch_of_sums([2]), "pair_mask": torch.tensor([False])})["loss"] == 0
