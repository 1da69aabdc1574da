"""What a whole run promises, however it was cut or stopped.

The gradient does not depend on micro-batches and accumulation; a run that was stopped ends with the
weights of one that was not.
"""

from functools import partial

import pytest
import torch
from distributed.conftest import write_pairs
from distributed.fit import OPTIMIZERS, fit
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from lit_align.errors import UserError
from lit_align.losses import CombinedConfig, pair_config
from lit_align.policies import PolicyRecipe

LOSSES = ["dpo", "dpo_norm", "simpo", "wpo", "ld_dpo", "orpo", "mpo"]
# Those that compare the pairs of a step with each other, and those that remember earlier steps.
OF_STEPS = ["aot", "aot_unpaired", "beta_dpo", "bco_pair"]
CUTS = [(4, 2), (2, 4), (1, 8)]


@pytest.fixture(scope="module")
def pairs13(tmp_path_factory):
    """13 rows: a window of 8, then one of 5."""
    return write_pairs(tmp_path_factory.mktemp("pairs") / "pairs13.jsonl", 13)


@pytest.fixture(scope="module")
def random_llama(tmp_path_factory):
    """The bundled architecture and tokenizer with random weights."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    LlamaForCausalLM(PolicyRecipe().model().config).save_pretrained(folder)
    PolicyRecipe().tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def random_gpt2(tmp_path_factory):
    """No rotary table and no RMSNorm: nothing in it falls back to float32."""
    folder = tmp_path_factory.mktemp("gpt2")
    tokenizer = PolicyRecipe().tokenizer()
    torch.manual_seed(0)
    size = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128}
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **size)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def worst_difference(tmp_path, data, **options):
    """Largest relative difference between the gradients of one cut and those of another."""
    options |= {"cache": tmp_path / "cache", "optimizer": "sgd"}
    whole = fit(data, batch_size=8, **options)["gradients"]
    assert len(whole) == 2 * options.get("max_epochs", 1)
    return max(
        float((one - other).norm() / one.norm())
        for batch_size, accumulate in CUTS
        for one, other in zip(
            whole,
            fit(data, batch_size=batch_size, accumulate=accumulate, **options)["gradients"],
            strict=True,
        )
    )


@pytest.mark.parametrize("loss", LOSSES + OF_STEPS)
def test_gradient_does_not_depend_on_the_cut(tmp_path, pairs13, random_llama, loss):
    assert worst_difference(tmp_path, pairs13, policy=random_llama, loss=loss) < 1e-6


@pytest.mark.parametrize("loss", LOSSES)
def test_gradient_does_not_depend_on_the_cut_in_float64(tmp_path, pairs13, random_gpt2, loss):
    options = {"policy": random_gpt2, "loss": loss, "precision": "64-true"}
    assert worst_difference(tmp_path, pairs13, **options) < 1e-10


@pytest.mark.parametrize("loss", OF_STEPS)
def test_what_looks_beyond_a_micro_batch_does_not_depend_on_the_cut(
    tmp_path, pairs13, random_gpt2, loss
):
    """Four steps: from the second on, log-ratios differ and there is something to remember."""
    options = {"policy": random_gpt2, "loss": loss, "precision": "64-true", "max_epochs": 2}
    assert worst_difference(tmp_path, pairs13, **options) < 1e-10


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("step", [1, 3, 4, 6])
def test_resumed_run_ends_bit_identical(tmp_path, pairs13, num_workers, step):
    """13 rows, 2 at a time, accumulation 2: four steps an epoch, the last of one micro-batch.

    Dropout is on: the random state has to come back as well.
    """
    options = {
        "cache": tmp_path / "cache",
        "batch_size": 2,
        "accumulate": 2,
        "max_epochs": 2,
        "dropout": 0.1,
        "num_workers": num_workers,
        "checkpoint_every": 1,
    }
    saved = tmp_path / "checkpoints"
    whole = fit(pairs13, checkpoint_dir=saved, **options)
    at = saved / f"step={step}.ckpt"
    resumed = fit(pairs13, checkpoint_dir=saved, ckpt_path=at, **options)
    seen = min(step, 4) * 2 - (step >= 4) + max(step - 4, 0) * 2
    assert resumed["rows"] == whole["rows"][seen:]
    for name, weight in whole["weights"].items():
        assert torch.equal(weight, resumed["weights"][name]), name


def test_dropout_changes_the_weights(tmp_path, pairs13):
    """Else the test above would say nothing about random states."""
    options = {"cache": tmp_path / "cache", "max_steps": 2}
    without, dropped = (fit(pairs13, dropout=p, **options)["weights"] for p in (0.0, 0.1))
    assert any(not torch.equal(without[name], dropped[name]) for name in without)


def test_checkpoint_loads_with_weights_only(tmp_path, pairs13):
    saved = tmp_path / "checkpoints"
    fit(pairs13, cache=tmp_path, max_steps=1, checkpoint_dir=saved, checkpoint_every=1)
    checkpoint = torch.load(saved / "step=1.ckpt", weights_only=True)
    assert checkpoint["hyper_parameters"]["loss"]["loss_type"] == "dpo"


def test_a_checkpoint_of_another_loss_is_not_gone_on_with(tmp_path, pairs13):
    options = {"cache": tmp_path, "checkpoint_dir": tmp_path / "saved", "checkpoint_every": 1}
    fit(pairs13, loss="simpo", max_steps=1, **options)
    with pytest.raises(UserError, match=r"'simpo'.*'dpo'.*repeat the settings"):
        fit(pairs13, loss="dpo", ckpt_path=tmp_path / "saved" / "step=1.ckpt", cache=tmp_path)


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_a_checkpoint_of_a_sum_of_losses_is_one_of_the_same_terms(tmp_path, pairs13):
    options = {"cache": tmp_path, "checkpoint_dir": tmp_path / "saved", "checkpoint_every": 1}
    whole = fit(pairs13, loss="mpo", **options)
    at = tmp_path / "saved" / "step=1.ckpt"
    kept = torch.load(at, weights_only=True)["hyper_parameters"]["loss"]
    assert pair_config(kept) == CombinedConfig.named("mpo")
    resumed = fit(pairs13, loss=pair_config(kept), ckpt_path=at, **options)
    for name, weight in whole["weights"].items():
        assert torch.equal(weight, resumed["weights"][name]), name
    kept["terms"]["dpo"]["beta"] = 0.7
    with pytest.raises(UserError, match=r"\(terms\.dpo\.beta 0\.1 is now 0\.7\): repeat"):
        fit(pairs13, loss=pair_config(kept), ckpt_path=at, **options)


def test_an_optimizer_that_cannot_be_built_is_named(tmp_path, pairs13, monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "sgd", partial(torch.optim.SGD, betas=(0.9, 0.99)))
    with pytest.raises(UserError, match=r"optimizer cannot be built.*betas"):
        fit(pairs13, loss="simpo", cache=tmp_path, optimizer="sgd")


def test_a_loss_that_is_no_number_stops_the_run(tmp_path, pairs13, monkeypatch):
    """Also in a step that is not logged: one epoch of two steps."""
    monkeypatch.setitem(OPTIMIZERS, "sgd", partial(torch.optim.SGD, lr=1e30))
    with pytest.raises(UserError, match=r"training loss is (nan|inf).*lower optimizer.lr"):
        fit(pairs13, loss="simpo", cache=tmp_path, optimizer="sgd", log_every=100, max_epochs=3)


@pytest.mark.parametrize("lora", [None, {"r": 2, "target_modules": "all-linear"}])
def test_a_loaded_model_is_taken_as_it_is(tmp_path, pairs13, lora):
    model = PolicyRecipe(lora=lora).model()
    before = [p.detach().clone() for p in model.parameters() if p.requires_grad]
    fit(pairs13, policy=model, cache=tmp_path, max_steps=2)
    moved = (p for p in model.parameters() if p.requires_grad)
    assert any(not torch.equal(p, old) for p, old in zip(moved, before, strict=True))
