"""A random two-layer model with a tokenizer of letters, pairs of words, and runs that use both.

For runs that write completions, the bundled model and its sums.
"""

import json
import logging
import math
import shutil
import string
from functools import partial
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lit_align.callbacks import ReferenceCache, reference_build
from lit_align.data import (
    Arithmetic,
    HeldOutArithmetic,
    PreferenceDataModule,
    RolloutDataModule,
)
from lit_align.errors import UserError
from lit_align.modules import DPOModule, GRPOModule
from lit_align.rewards import exact_match, in_process

LETTERS = string.ascii_lowercase + " ."


def save_llama(folder, seed=0, **config):
    """A folder like one from the hub, with random weights that prefer some words to others."""
    vocabulary = {token: n for n, token in enumerate(["<pad>", "</s>", "<unk>", *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    torch.manual_seed(seed)
    shape = {
        "vocab_size": len(vocabulary),
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
    }
    LlamaForCausalLM(LlamaConfig(**(shape | config))).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("llama"))


def words(number, length):
    """Letters that look random and are the same every time."""
    generator = torch.Generator().manual_seed(number)
    picks = torch.randint(0, 26, (length,), generator=generator).tolist()
    return "".join(LETTERS[pick] for pick in picks)


def pair(number):
    """Prompts of 3 to 7 letters, answers of 1 to 9: no two pairs are alike."""
    return {
        "prompt": words(3 * number, 3 + number % 5) + " ",
        "chosen": words(3 * number + 1, 1 + number % 4),
        "rejected": words(3 * number + 2, 3 + number % 7),
    }


def write_pairs(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def pairs(tmp_path):
    """Seven of them: a number that two ranks cannot divide."""
    return write_pairs(tmp_path / "pairs.jsonl", map(pair, range(7)))


@pytest.fixture
def broken(tmp_path, llama):
    """A model to which a full stop is no number, and seven pairs of which one response has one."""
    folder = tmp_path / "broken"
    shutil.copytree(llama, folder)
    state = load_file(folder / "model.safetensors")
    state["model.embed_tokens.weight"][-1] = math.nan
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    rows = [pair(number) for number in range(7)]
    rows[5]["rejected"] = "ab.cd"
    return folder, write_pairs(tmp_path / "broken.jsonl", rows)


@pytest.fixture
def run(tmp_path, llama, pairs, said, scored):
    """A short training run with a reference cache; says what it computed."""

    def fit(  # noqa: PLR0913
        policy=llama,
        loss="dpo",
        *,
        data=pairs,
        lr=0.01,
        steps=4,
        batch_size=2,
        folder=tmp_path / "reference",
        cache_batch_size=4,
        cache_tokens=None,
        callbacks=(),
        ckpt_path=None,
        module=None,
        data_options=None,
        module_options=None,
        **trainer_options,
    ):
        L.seed_everything(trainer_options.pop("seed", 1), verbose=False)
        recipe = {"pretrained": str(policy)} if hasattr(policy, "joinpath") else policy
        module = module or DPOModule(
            recipe,
            loss,
            optimizer=partial(torch.optim.SGD, lr=lr, momentum=0.9),
            **(module_options or {}),
        )
        datamodule = PreferenceDataModule(
            data, batch_size=batch_size, cache_dir=tmp_path / "pairs", **(data_options or {})
        )
        # Lightning warns of validation without rows.
        validates = "val_path" in (data_options or {})
        trainer = quiet_trainer(
            max_steps=steps,
            callbacks=[ReferenceCache(folder, cache_batch_size, cache_tokens), *callbacks],
            default_root_dir=tmp_path,
            **({} if validates else {"limit_val_batches": 0}) | trainer_options,
        )
        before = len(scored)
        del said[:]
        trainer.fit(module, datamodule, ckpt_path=ckpt_path)
        return SimpleNamespace(
            module=module,
            trainer=trainer,
            datamodule=datamodule,
            cache=module.reference_cache,
            scored=sum(scored[before:]),
            said=list(said),
        )

    return fit


def quiet_trainer(**options):
    return L.Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "log_every_n_steps": 1,
            **options,
        }
    )


@pytest.fixture
def scored(monkeypatch):
    """How many responses each forward pass of a reference had."""
    rows = []
    score = reference_build.response_logprobs

    def counting(model, input_ids, *rest, **options):
        rows.append(len(input_ids))
        return score(model, input_ids, *rest, **options)

    monkeypatch.setattr(reference_build, "response_logprobs", counting)
    return rows


@pytest.fixture
def said():
    """What is told to the user on the console."""
    messages = []

    class Keep(logging.Handler):
        def emit(self, record):
            messages.append(record.getMessage())

    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    handler = Keep()
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


@pytest.fixture
def tools():
    """The functions of this file, which tests cannot import."""
    return SimpleNamespace(
        save_llama=save_llama, pair=pair, write_pairs=write_pairs, quiet_trainer=quiet_trainer
    )


@pytest.fixture
def act(tmp_path, said):
    """A short run of the bundled model on its sums, three micro-batches a step."""

    def fit(*callbacks, ckpt_path=None, module=None, data=None, lr=1e-3, **trainer_options):
        L.seed_everything(trainer_options.pop("seed", 1), verbose=False)
        module = GRPOModule(
            **{
                "policy": "tiny",
                "reward": {"right": in_process(exact_match)},
                "sampling": {"max_new_tokens": 6},
                "optimizer": partial(torch.optim.SGD, lr=lr, momentum=0.9),
                "max_refills": 0,
                **(module or {}),
            }
        )
        datamodule = RolloutDataModule(
            **{
                "path": Arithmetic(),
                "val_path": HeldOutArithmetic(),
                "max_rows": 12,
                "val_max_rows": 5,
                "prompts_per_step": 3,
                "num_generations": 4,
                "batch_size": 4,
                **(data or {}),
            }
        )
        trainer = quiet_trainer(
            **{
                "max_steps": 4,
                "callbacks": list(callbacks),
                "default_root_dir": tmp_path,
                "limit_val_batches": 0,
                "use_distributed_sampler": False,
                **trainer_options,
            }
        )
        del said[:]
        result = SimpleNamespace(
            module=module, trainer=trainer, datamodule=datamodule, said=said, ended_by=None
        )
        try:
            trainer.fit(module, datamodule, ckpt_path=ckpt_path)
        except (SystemExit, UserError) as end:
            result.ended_by = end
        return result

    return fit
