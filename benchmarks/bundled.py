"""The README's table of what each loss does for the bundled model: run, read, write.

    python benchmarks/bundled.py              # one run per loss, a few minutes
    python benchmarks/bundled.py --write      # and put the table into README.md

Each run is `python train.py loss=NAME` in a process of its own, from import to exported model.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOSSES = ["dpo", "dpo_norm", "simpo", "wpo"]
METRICS = {"val/ranking_accuracies": "pairs ranked right", "val/exact_match": "sums right"}
START, END = "<!-- benchmarks/bundled.py -->", "<!-- end -->"


def measure(loss: str, folder: Path) -> str:
    """One row of the table."""
    started = time.perf_counter()
    command = [sys.executable, "train.py", f"loss={loss}", f"hydra.run.dir={folder}"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
    seconds = time.perf_counter() - started
    values = json.loads((folder / "before_after.json").read_text())
    cells = [f"{values['before'][key]:.2f} to {values['after'][key]:.2f}" for key in METRICS]
    return f"| `loss={loss}` | {' | '.join(cells)} | {seconds:.0f} s |"


def table() -> str:
    """Markdown: a row per loss, before and after training, and the wall time of the command."""
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(loss, Path(folder) / loss) for loss in LOSSES]
    head = ["", *METRICS.values(), "whole command, two CPU cores"]
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *rows])


def write(text: str) -> None:
    """Replace what stands between the two marks in README.md."""
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text().partition(START)
    _, _, after = rest.partition(END)
    readme.write_text(f"{before}{START}\n{text}\n{END}{after}")


if __name__ == "__main__":
    made = table()
    sys.stdout.write(f"{made}\n")
    if "--write" in sys.argv[1:]:
        write(made)
