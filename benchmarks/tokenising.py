"""The row of tokenisation: conversations to the token ids of pairs, one thread."""

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import steps
from baselines import dpo_trainer
from datasets import Dataset
from paired import Took, Variant, measure, spread
from setting import Check, Found, Setting
from text import Text

from lit_align.data.preparation import Preparation
from lit_align.data.sources import open_source
from lit_align.data.tokenise import PairTokeniser

OFTEN = 5  # times the rounds of other rows, for one takes a fraction of a second
Ids = list[list[list[int]]]


def tokenisation(setting: Setting) -> Found:
    """Ours reads a file and leaves its pairs on disk; TRL maps over rows that are in memory.

    What both do once for a whole data set, such as telling tokenizers apart, is part of it.
    """
    ids: dict[str, Ids] = {}

    def keep(name: str, number: int, result: Ids) -> None:
        ids[name] = result

    variants = {"trl": Variant(_trl(setting)), "ours": Variant(partial(_ours, setting))}
    times = measure(
        variants,
        partial(_conversations, setting),
        OFTEN * setting.rounds,
        after=keep,
        warm_up=_conversations(setting, -1),
    )
    unlike = sum(a != b for a, b in zip(ids["ours"], ids["trl"], strict=True))
    rows = setting.sizes.tokenised_pairs
    rates = (f"{name} {rows / times.median(name):.0f}" for name in times.by_name)
    return Found(
        {"trl": spread(times.ratios("trl", "ours"))},
        [Check("pairs with other ids than TRL's", unlike, 0)],
        {"pairs per CPU second": ", ".join(rates)},
    )


def _conversations(setting: Setting, number: int) -> list[dict[str, Any]]:
    text, sizes = Text(setting.tokenizer, 600 + number), setting.sizes

    def turn(role: str, lengths: tuple[int, int]) -> list[dict[str, str]]:
        return [{"role": role, "content": setting.tokenizer.decode(text.cut(lengths))}]

    return [
        {
            "prompt": turn("user", sizes.prompt),
            "chosen": turn("assistant", sizes.answer),
            "rejected": turn("assistant", sizes.answer),
        }
        for _ in range(sizes.tokenised_pairs)
    ]


def _ours(setting: Setting, rows: list[dict[str, Any]]) -> Took:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "pairs.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        cpu, wall = time.process_time(), time.perf_counter()
        prepare = Preparation(PairTokeniser(setting.tokenizer, None), cache_dir=folder)
        pairs = prepare(open_source(path, "train")).pairs
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        return Took(cpu, wall, _ids(pairs))


def _trl(setting: Setting) -> Callable[[list[dict[str, Any]]], Took]:
    trainer = dpo_trainer(steps.twin(setting.model), setting.tokenizer, 1)

    def step(rows: list[dict[str, Any]]) -> Took:
        dataset = Dataset.from_list(rows)
        cpu, wall = time.process_time(), time.perf_counter()
        made: Any = trainer._prepare_dataset(dataset, setting.tokenizer, trainer.args, "train")
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        return Took(cpu, wall, _ids(made))

    return step


def _ids(dataset: Dataset) -> Ids:
    columns = [dataset[f"{name}_ids"][:] for name in ("prompt", "chosen", "rejected")]
    return [list(row) for row in zip(*columns, strict=True)]
