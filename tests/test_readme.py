"""Everything the README says to type is composed or run; everything it lists is there."""

import json
import re
import shlex
from pathlib import Path

import pytest
from composing import REFRESHED
from hydra import compose, initialize_config_dir

from lit_align.data import PreferenceDataModule, UnpairedDataModule
from lit_align.losses import (
    COMBINATIONS,
    PAIR_COLUMNS,
    PREFERENCE_LOSSES,
    SURROGATES,
    UNPAIRED_LOSSES,
)
from lit_align.losses.columns import objection
from lit_align.policies import PolicyRecipe

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands():
    lines = "".join(blocks("bash")).splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


def overrides():
    """Arguments of each `python train.py`, a sweep taken apart into its runs."""
    for program, *arguments in commands():
        if program != "python":
            continue
        given = [argument for argument in arguments[1:] if argument != "-m"]
        first, *rest = given
        name, _, values = first.partition("=")
        yield from ([f"{name}={value}", *rest] for value in values.split(","))


@pytest.mark.parametrize("given", list(overrides()), ids=" ".join)
def test_every_train_command_composes(given):
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("train", overrides=given)
    of_data = {*PREFERENCE_LOSSES, *UNPAIRED_LOSSES}
    named = {cfg.loss.get("loss_type"), *cfg.loss.get("terms", ())}
    assert named & of_data or cfg.loss.loss_fn in SURROGATES
    assert cfg.data.path


def test_every_make_target_exists():
    targets = [words[1] for words in commands() if words[0] == "make"]
    makefile = (ROOT / "Makefile").read_text()
    assert targets
    assert all(f"\n{target}:" in makefile for target in targets)


@pytest.mark.parametrize("source", blocks("python"))
def test_every_python_block_runs(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_ALIGN_CACHE", str(tmp_path / "cache"))
    exec(compile(source, "README.md", "exec"), {})


@pytest.mark.parametrize("block", blocks("json"))
def test_the_rows_it_shows_are_rows(block, tmp_path):
    (tmp_path / "rows.jsonl").write_text(block)
    tokenizer = PolicyRecipe().tokenizer()
    kind = UnpairedDataModule if '"label"' in block else PreferenceDataModule
    data = kind(tmp_path / "rows.jsonl", tokenizer=tokenizer, cache_dir=tmp_path)
    data.setup()
    shown = [json.loads(line) for line in block.splitlines()]
    assert len(data.train_rows) == len(shown)
    assert all(column in shown[-1] for column in data.train_rows.columns)


def test_the_table_of_columns_says_who_honours_them():
    section = README.split("numbers that bear on its own loss")[1].split("\n\nData with")[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| `")]
    assert {row[0].split("`")[1] for row in rows} == set(PAIR_COLUMNS)
    for column, *_, who in rows:
        named = set(re.findall(r"`(\w+)`", who))
        honoured = PREFERENCE_LOSSES.keys() - named if who.startswith("all losses but") else named
        name = column.split("`")[1]
        assert honoured == {n for n, v in PREFERENCE_LOSSES.items() if not objection(v, name)}


def test_the_table_lists_every_loss():
    section = README.split("## Losses")[1].split("##")[0]
    listed = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert listed == sorted([*PREFERENCE_LOSSES, *REFRESHED])


def test_the_table_lists_every_sum_with_its_weights_and_options():
    section = README.split("### Sums of losses")[1].split("\n\nEach term")[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| `")]
    assert [row[0].strip("| `") for row in rows][1:] == sorted(COMBINATIONS)
    for name, written, _ in rows[1:]:
        terms = re.findall(r"(?:([\d.]+) )?`(\w+)`(?: \((.*?)\))?", written)
        options = (dict(re.findall(r"(\w+) ([\d.]+)", inside)) for *_, inside in terms)
        told = {
            term: {"weight": float(weight or 1)} | {k: float(v) for k, v in given.items()}
            for (weight, term, _), given in zip(terms, options, strict=True)
        }
        assert told == COMBINATIONS[name.strip("| `")]


def test_the_table_lists_every_loss_of_labelled_completions():
    section = README.split("### Losses of labelled completions")[1].split("##")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == sorted(UNPAIRED_LOSSES)


def test_the_table_lists_every_preset_as_it_is():
    """Name, surrogate, ratio level and aggregation; the clip's bounds stand beside its name."""
    section = README.split("## Policy losses")[1].split("##")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines()]
    rows = [row for row in rows if row and row[0].startswith("`") and row[0] != "`loss=`"]
    presets = [path.stem for path in (ROOT / "conf/loss").glob("*.yaml")]
    assert [row[0].strip("`") for row in rows] == sorted(
        set(presets) - {*PREFERENCE_LOSSES, *COMBINATIONS, *REFRESHED, *UNPAIRED_LOSSES}
    )
    for name, surrogate, ratio, aggregation, *_ in rows:
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            loss = compose("train", overrides=[f"loss={name.strip('`')}"]).loss
        assert surrogate.startswith(f"`{loss.loss_fn}`")
        assert aggregation == f"`{loss.aggregation}`"
        reads = SURROGATES[loss.loss_fn].tensors
        own = "own" if "old_logprobs" in reads else "none"
        assert ratio == (loss.ratio_level if "ratio" in reads else own)
        if loss.loss_fn == "clip":
            bounds = f"{1 - loss.clip_lower:g} ... {1 + loss.clip_higher:g}"
            assert bounds in surrogate
        if loss.beta:
            assert f"KL in the {loss.kl_in} (beta {loss.beta:g})" in surrogate


def test_the_tree_is_true():
    tree = README.split("## Tree")[1].split("```")[1]
    below = ROOT
    for line in tree.strip().splitlines():
        name = line.split()[0]
        if line.startswith(" " * 21):  # the text of the line before goes on
            continue
        below = ROOT / "lit_align" if line.startswith("  ") else ROOT
        assert (below / name).exists(), name


def test_the_table_lists_every_correction():
    section = README.split("| `correction=` |")[1].split("\n\n")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(path.stem for path in (ROOT / "conf/correction").glob("*.yaml"))
