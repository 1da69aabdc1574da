"""Columns of the data in whole runs: who is refused when, and what a step is made of."""

import json
from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch
from distributed.conftest import write_pairs
from distributed.fit import fit
from transformers import GPT2Config, GPT2LMHeadModel

from lit_align import DPOModule, PreferenceDataModule, ReferenceCache
from lit_align.errors import UserError
from lit_align.losses import CombinedConfig
from lit_align.policies import PolicyRecipe

COLUMNS = ("weight", "margin", "label_prob")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """Nothing in it falls back to float32."""
    folder = tmp_path_factory.mktemp("gpt2")
    tokenizer = PolicyRecipe().tokenizer()
    torch.manual_seed(0)
    size = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128}
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **size)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def write(tmp_path):
    """Rows of `write_pairs`, each with what a function of its number says."""

    def written(name, columns, numbers=range(13)):
        lines = Path(write_pairs(tmp_path / name, 13)).read_text().splitlines()
        rows = [{**json.loads(lines[n]), **columns(n)} for n in numbers]
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
        return str(tmp_path / name)

    return written


def all_columns(n):
    return {"weight": n % 3, "margin": (n % 5) / 2 - 1, "label_prob": 1 - (n % 4) / 4}


@pytest.fixture
def gradients(tmp_path, gpt2):
    """Gradients of each step, in float64."""
    options = {"cache": tmp_path / "cache", "optimizer": "sgd", "precision": "64-true"}
    return lambda data, **more: fit(data, policy=gpt2, **options, **more)["gradients"]


@pytest.mark.parametrize("loss", ["dpo", "simpo", "sppo_soft"])
def test_the_gradient_of_a_step_does_not_depend_on_the_cut(loss, write, gradients):
    columns = all_columns
    if loss == "sppo_soft":
        columns = lambda n: {k: v for k, v in all_columns(n).items() if k != "margin"}  # noqa: E731
    data = write("rows.jsonl", columns)
    whole = gradients(data, loss=loss, batch_size=8)
    assert len(whole) == 2
    for size, accumulate in ((4, 2), (1, 8)):
        cut = gradients(data, loss=loss, batch_size=size, accumulate=accumulate)
        for one, other in zip(whole, cut, strict=True):
            assert float((one - other).norm() / one.norm()) < 1e-10


def test_every_column_moves_the_gradient(write, gradients):
    plain = gradients(write("plain.jsonl", lambda n: {}), batch_size=13)[0]
    for column in COLUMNS:
        data = write(f"{column}.jsonl", lambda n, column=column: {column: all_columns(n)[column]})
        read = gradients(data, batch_size=13)[0]
        assert float((read - plain).norm() / plain.norm()) > 1e-2, column


def test_a_weight_of_2_is_the_row_twice_and_of_0_no_row_but_for_their_number(write, gradients):
    weights = {0: 2, 1: 0, 2: 2}
    heavy = gradients(write("w.jsonl", lambda n: {"weight": weights.get(n, 1)}), batch_size=13)
    rows = [0, 0, 2, 2, *range(3, 13)]
    repeated = gradients(write("r.jsonl", lambda n: {}, rows), batch_size=14)
    torch.testing.assert_close(13 * heavy[0], 14 * repeated[0], rtol=1e-10, atol=1e-14)


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_run_reads_the_same_numbers(workers, write, gpt2, tmp_path):
    data = write("rows.jsonl", all_columns)
    options = {"policy": gpt2, "cache": tmp_path / "cache", "num_workers": workers}
    options |= {"batch_size": 2, "max_epochs": 2}
    options |= {"checkpoint_dir": str(tmp_path / "c"), "checkpoint_every": 1}
    whole = fit(data, **options)["weights"]
    for step in (3, 9):
        again = fit(data, **options, ckpt_path=str(tmp_path / "c" / f"step={step}.ckpt"))
        assert all(torch.equal(whole[name], again["weights"][name]) for name in whole)
    plain = write("plain.jsonl", lambda n: {})
    with pytest.raises(UserError, match=r"cannot resume.*'weight', 'margin'.*there are \[\]"):
        fit(plain, **options, ckpt_path=str(tmp_path / "c" / "step=3.ckpt"))


def run(loss, data, tmp_path, *, validate=False, **options):
    module = DPOModule("tiny", loss, optimizer=partial(torch.optim.SGD, lr=0.1))
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ReferenceCache(folder=tmp_path / "reference")],
    )
    data = PreferenceDataModule(data, cache_dir=tmp_path / "cache", batch_size=13, **options)
    (trainer.validate if validate else trainer.fit)(module, data)
    return module


@pytest.mark.parametrize(
    ("loss", "column"),
    [("aot", "weight"), ("aot", "label_prob"), ("apo_zero", "margin"), ("odpo", "label_prob")],
)
def test_a_loss_that_cannot_honour_a_column_is_refused_before_anything_is_loaded(
    loss, column, write, tmp_path
):
    data = write("rows.jsonl", lambda n: {"margin": 1.0 + n} | {column: 0.5 + n / 26})
    ignored = [name for name in ("margin",) if name != column and loss != "odpo"]
    with pytest.raises(UserError, match=f"'{loss}'.*'{column}' that the training data has"):
        run(loss, data, tmp_path, ignore_columns=ignored)
    assert not (tmp_path / "reference").exists()


def test_what_is_ignored_lets_the_loss_train(write, tmp_path):
    data = write("rows.jsonl", all_columns)
    run("aot", data, tmp_path, ignore_columns=list(COLUMNS))


def test_validation_data_are_looked_at_too(write, tmp_path):
    train = write("train.jsonl", lambda n: {})
    val = write("val.jsonl", lambda n: {"margin": 1.0})
    with pytest.raises(UserError, match=r"'ipo'.*'margin' that the validation data has"):
        run("ipo", train, tmp_path, val_path=val)
    with pytest.raises(UserError, match=r"'odpo' reads margin .* the training data does not have"):
        run("odpo", train, tmp_path, val_path=val, validate=True)


def test_a_margin_reaches_the_terms_of_a_sum_that_have_a_use_for_it(write, tmp_path):
    data = write("rows.jsonl", lambda n: {"margin": 1.0 + n})
    config = CombinedConfig({"odpo": {"weight": 2.0, "beta": 0.5}, "sft": {"weight": 0.5}})
    module = run(config, data, tmp_path)
    batch = next(iter(module.trainer.datamodule.train_dataloader()))
    logps = module.pair_logps(batch)
    found = module.pair_losses(batch, logps)
    shifted = module.pair_losses({**batch, "margin": 2 * batch["margin"]}, logps)
    assert (shifted["odpo"].losses > found["odpo"].losses).all()
    assert torch.equal(shifted["sft"].losses, found["sft"].losses)
