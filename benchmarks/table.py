"""The table: what must be reached, and what was measured beside it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch
from paired import Spread
from setting import Found

NAMES = {"trl": "TRL as shipped", "response": "TRL on response tokens, same BLAS"}
NOTES = """\
Ratios of CPU seconds of one thread: how many times less ours takes than the other. Both sides run
in one process, on the same weights and the same batches, one after the other, in reverse order
every other round; given are the median over the rounds of the ratio within a round, and the least
and the greatest. Memory is the peak of a fresh process per variant, at least three of each.

The model is SmolLM2-135M-Instruct, float32. Preference pairs have prompts of 256 to 512 tokens and
answers of 64 to 256, two pairs a batch; a GRPO batch is a prompt of 256 tokens and eight
completions of 64 to 128. A step is collating, the loss with all metrics that TRL logs, and the
backward pass. "TRL on response tokens" projects onto the vocabulary what TRL projects on a GPU
(on a CPU, as shipped, it projects all positions), and there both sides multiply with torch's own
BLAS; against TRL as shipped ours multiplies as it does unless told otherwise (`cpu_matmul: auto`).
Against `generate` that second column means torch's own BLAS on both sides.
"""


class Target(NamedTuple):
    """What a number must reach, and what would be better still; None: nothing is asked."""

    must: float
    stretch: float | None = None


@dataclass(frozen=True)
class Line:
    """A row of the table.

    Attributes:
        title: what is measured.
        targets: against each baseline.
        unit: of the numbers; "x": times less than the baseline's.
        is_ceiling: whether less is better.
    """

    title: str
    targets: Mapping[str, Target]
    unit: str = "x"
    is_ceiling: bool = field(default=False, kw_only=True)


def both(trl: Target, response: Target) -> dict[str, Target]:
    """Targets against both baselines."""
    return {"trl": trl, "response": response}


LINES = {
    "dpo_fp32": Line("DPO step, float32", both(Target(4.0, 5.0), Target(1.8, 2.0))),
    "dpo_bf16": Line("DPO step, bfloat16 autocast", both(Target(2.7, 3.2), Target(1.8, 2.1))),
    "grpo": Line("GRPO step, 8 completions", both(Target(6.0, 7.5), Target(2.6, 3.0))),
    "dpo_memory": Line(
        "DPO peak memory, no checkpointing", both(Target(3.0, 3.8), Target(2.4, 3.0))
    ),
    "grpo_memory": Line("GRPO peak memory, no checkpointing", {"trl": Target(3.6, 4.2)}),
    "reference": Line("reference pass", both(Target(4.5, 6.0), Target(2.1, 2.4))),
    "generation": Line(
        "generation, 8 per prompt, against `generate`", both(Target(5.5, 8.0), Target(3.5, 4.5))
    ),
    "generation_stops": Line(
        "the same, completions that end early", both(Target(5.5, 8.0), Target(3.5, 4.5))
    ),
    "tokenisation": Line("tokenisation, one thread", {"trl": Target(1.7)}),
    "loop": Line("whole loop, 20 DPO steps", both(Target(3.0), Target(1.6))),
    "short": Line("prompts of 16 tokens, against the padded layout", {"padded": Target(1.0)}),
    "single": Line("one completion a prompt, against the padded layout", {"padded": Target(1.0)}),
    "overhead": Line(
        "own cost per step over a bare loop, all metrics",
        {"bare": Target(0.7)},
        "ms",
        is_ceiling=True,
    ),
    "scaling": Line(
        "time per token, rows of 320 to 1,280 tokens", {"fastest": Target(1.25)}, is_ceiling=True
    ),
}


def verdict(line: Line, target: Target, measured: Spread) -> str:
    """What the median reaches: the stretch, what must be, or neither."""
    sign = -1 if line.is_ceiling else 1

    def reaches(bound: float | None) -> bool:
        return bound is not None and sign * measured.median >= sign * bound

    if not reaches(target.must):
        return "missed"
    return "stretch" if reaches(target.stretch) else "reached"


def markdown(found: Mapping[str, Found]) -> str:
    """A line for each row and baseline."""
    head = ["what", "against", "must", "stretch", "measured, median [least, most]", "rounds", ""]
    rows = [
        [
            line.title,
            NAMES.get(base, base),
            _bound(line, target.must),
            "" if target.stretch is None else _bound(line, target.stretch),
            f"{measured} {line.unit}",
            str(measured.rounds),
            verdict(line, target, measured),
        ]
        for key, line in LINES.items()
        if key in found
        for base, target in line.targets.items()
        if (measured := found[key].numbers.get(base)) is not None
    ]
    return "\n".join(_row(cells) for cells in [head, ["---"] * len(head), *rows])


def checks(found: Mapping[str, Found]) -> str:
    """What was compared, and how close it is."""
    head = ["row", "difference", "found", "at most", ""]
    rows = [
        [
            LINES[key].title,
            check.what,
            f"{check.value:.1e}",
            f"{check.bound:.1e}",
            "" if check.holds else "FAILED",
        ]
        for key, row in found.items()
        for check in row.checks
    ]
    return "\n".join(_row(cells) for cells in [head, ["---"] * len(head), *rows])


def all_hold(found: Mapping[str, Found]) -> bool:
    """Whether every difference is within its bound: if not, the times mean nothing."""
    return all(check.holds for row in found.values() for check in row.checks)


def details(found: Mapping[str, Found]) -> str:
    """What else each row has to say."""
    return "\n".join(
        f"- {LINES[key].title}; {name}: {text}"
        for key, row in found.items()
        for name, text in row.details.items()
    )


def page(found: Mapping[str, Found]) -> str:
    """The whole of RESULTS.md."""
    packages = ("torch", "trl", "transformers", "lightning")
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    machine = f"{processor()}, one thread, {torch.backends.cpu.get_cpu_capability()}"
    return "\n".join(
        [
            "# Side by side with TRL",
            "",
            f"Written by `make bench` on {date.today().isoformat()}: {versions}; {machine}.",
            "",
            NOTES,
            markdown(found),
            "",
            "Checked in the same run:",
            "",
            checks(found),
            "",
            "What stands behind the numbers:",
            "",
            details(found),
            "",
        ]
    )


def processor() -> str:
    """The name of the CPU, as Linux tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "an unknown CPU")


def _bound(line: Line, bound: float) -> str:
    return f"{'<=' if line.is_ceiling else '>='} {bound:g}"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
