"""The README's tables of what each loss does for the bundled model: run, read, write.

    python benchmarks/bundled.py              # one run per loss, some minutes
    python benchmarks/bundled.py --write      # and put the tables into README.md

Each run is `python train.py loss=NAME` in a process of its own, from import to exported model.
"""

import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
END = "<!-- end -->"


class Table(NamedTuple):
    """Losses, what is said of each, and the mark in the README behind which it stands."""

    mark: str
    losses: Sequence[str]
    metrics: Mapping[str, str]


TABLES = [
    Table(
        "<!-- benchmarks/bundled.py -->",
        ["dpo", "dpo_norm", "simpo", "wpo"],
        {"val/ranking_accuracies": "pairs ranked right", "val/exact_match": "sums right"},
    ),
    Table(
        "<!-- benchmarks/bundled.py grpo -->",
        ["cispo", "dapo", "dr_grpo", "grpo", "gspo", "rloo"],
        {"val/pass@1": "sums right (greedy pass@1)"},
    ),
]


def measure(loss: str, metrics: Mapping[str, str], folder: Path) -> str:
    """One row of a table."""
    before = cpu_seconds()
    command = [sys.executable, "train.py", f"loss={loss}", f"hydra.run.dir={folder}"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
    seconds = cpu_seconds() - before
    values = json.loads((folder / "before_after.json").read_text())
    cells = [f"{values['before'][key]:.2f} to {values['after'][key]:.2f}" for key in metrics]
    return f"| `loss={loss}` | {' | '.join(cells)} | {seconds:.0f} s |"


def cpu_seconds() -> float:
    """What all commands so far have computed: unlike wall time, the same on a busy machine."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def markdown(table: Table) -> str:
    """A row per loss: before and after training, and the CPU time of the command."""
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(loss, table.metrics, Path(folder) / loss) for loss in table.losses]
    head = ["", *table.metrics.values(), "whole command, CPU time"]
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *rows])


def write(mark: str, text: str) -> None:
    """Replace what stands between the mark and the end in README.md."""
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text().partition(mark)
    _, _, after = rest.partition(END)
    readme.write_text(f"{before}{mark}\n{text}\n{END}{after}")


if __name__ == "__main__":
    for table in TABLES:
        made = markdown(table)
        sys.stdout.write(f"{made}\n\n")
        if "--write" in sys.argv[1:]:
            write(table.mark, made)
