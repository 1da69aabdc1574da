"""Ours beside TRL, row by row of one table.

    make bench                                              # all rows: some hours
    python benchmarks/side_by_side.py --rows dpo_fp32,grpo  # some of them
    python benchmarks/side_by_side.py --quick               # a tiny model: whether all of it runs

Writes RESULTS.md beside this file where all rows were measured on the real model, and ends with
status 1 if losses or gradients are not those of TRL.
"""

import argparse
import logging
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

# Before anything reads it: one thread everywhere, also in the tokenizers.
os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}

import table
import transformers
from generation_rows import generation, generation_stops
from keeping import keep, kept
from loops import loop
from memory import dpo_memory, grpo_memory
from reference_pass import reference
from setting import FULL, QUICK, Found, Measured, Setting
from shape_rows import overhead, scaling, short, single
from step_rows import dpo_bf16, dpo_fp32, grpo
from text import one_thread, recipe
from tokenising import tokenisation

from lit_align import PolicyRecipe

ROWS: dict[str, Measured] = {
    "dpo_fp32": dpo_fp32,
    "dpo_bf16": dpo_bf16,
    "grpo": grpo,
    "reference": reference,
    "generation": generation,
    "generation_stops": generation_stops,
    "tokenisation": tokenisation,
    "dpo_memory": dpo_memory,
    "grpo_memory": grpo_memory,
    "loop": loop,
    "short": short,
    "single": single,
    "overhead": overhead,
    "scaling": scaling,
}
RESULTS = Path(__file__).with_name("RESULTS.md")


def options(arguments: Sequence[str]) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=_rows, default=list(ROWS), help="comma-separated names")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a tiny model, one round")
    parser.add_argument("--write", type=Path, help="write the page there, whatever was measured")
    parser.add_argument("--keep", type=Path, help="file of rows that are not measured again")
    return parser.parse_args(arguments)


def _rows(names: str) -> list[str]:
    rows = names.split(",")
    if unknown := [name for name in rows if name not in ROWS]:
        raise argparse.ArgumentTypeError(f"no rows {unknown}: choose of {', '.join(ROWS)}")
    return rows


def setting(*, rounds: int, quick: bool) -> Setting:
    """The model and how much is measured."""
    # Of TRL's side; ours is changed as recipes have it, see `steps.policy`.
    chosen = PolicyRecipe("tiny", lean=False) if quick else recipe(lean=False)
    model, tokenizer = chosen.model(), chosen.tokenizer()
    model.train()
    if quick:
        return Setting(model, tokenizer, QUICK, 1, ("--quick",))
    return Setting(model, tokenizer, FULL, rounds)


def run(rows: Sequence[str], given: Setting, place: Path | None) -> dict[str, Found]:
    """What the rows say; each is told of, and kept, when it is there."""
    found = kept(place)
    for name in rows:
        if name in found:
            continue
        start = time.perf_counter()
        given.model.zero_grad()
        found[name] = ROWS[name](given)
        keep(place, found)
        numbers = ", ".join(f"{base} {number}" for base, number in found[name].numbers.items())
        took = time.perf_counter() - start
        print(f"{name}: {numbers}  ({took:.0f} s)", file=sys.stderr, flush=True)
    return {name: found[name] for name in ROWS if name in found}


def prepare() -> None:
    """One thread, and no hints about loaders, loggers and deprecations of either side."""
    one_thread()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in ("lightning.pytorch", "lightning.fabric", "trl"):
        logging.getLogger(name).setLevel(logging.ERROR)


def main(arguments: Sequence[str]) -> int:
    """Measure, print, write; 1 if a check failed."""
    chosen = options(arguments)
    prepare()
    given = setting(rounds=chosen.rounds, quick=chosen.quick)
    found = run(chosen.rows, given, chosen.keep)
    page = table.page(found)
    print(page)
    is_whole = found.keys() == ROWS.keys() and not chosen.quick
    if place := chosen.write or (RESULTS if is_whole else None):
        place.write_text(page)
    return 0 if table.all_hold(found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
