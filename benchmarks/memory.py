"""The rows of peak memory: each variant takes one step in a process of its own.

    python benchmarks/memory.py dpo ours    # what such a process says, in MB

The peak is the kernel's (VmHWM), set back after a small step has made whatever is made once; it
holds the weights, their gradients, and what Python and torch take themselves.
"""

import argparse
import ctypes
import gc
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import baselines
import steps
from paired import spread
from setting import Found, Setting, with_matmul

PROCESSES = 3
PAIRS = 2


def dpo_memory(setting: Setting) -> Found:
    """Two pairs, float32."""
    return _found(setting, "dpo", {"trl": "trl", "response": "trl_response"})


def grpo_memory(setting: Setting) -> Found:
    """One prompt with eight completions, float32."""
    return _found(setting, "grpo", {"trl": "trl"})


def _found(setting: Setting, kind: str, against: dict[str, str]) -> Found:
    """How many times lower our peak is; a ratio for each process of a variant."""
    number = PROCESSES if setting.rounds > 1 else 1
    peaks: dict[str, list[float]] = {name: [] for name in ("ours", *against.values())}
    for _ in range(number):
        for name, known in peaks.items():
            known.append(_of_process(kind, name, setting.program))
    pairs = {base: zip(peaks[name], peaks["ours"], strict=True) for base, name in against.items()}
    numbers = {base: spread([a / b for a, b in both]) for base, both in pairs.items()}
    said = (f"{name} {spread(values)}" for name, values in peaks.items())
    return Found(numbers, [], {"peak, MB": ", ".join(said)})


def _of_process(kind: str, name: str, arguments: Sequence[str]) -> float:
    command = [sys.executable, __file__, kind, name, *arguments]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    peak: float = json.loads(said.splitlines()[-1])["peak"]
    return peak


def _variant(setting: Setting, kind: str, name: str) -> tuple[Callable[[Any], Any], Any, Any]:
    """The step, a small batch, and the one that is measured."""
    model, number = setting.model, {"dpo": PAIRS, "grpo": 8}[kind]
    small = setting.few()[0 if kind == "dpo" else 1]
    batch: Any = setting.pairs(PAIRS, 100) if kind == "dpo" else setting.groups(1, 200)
    if name == "ours":
        module: Any = getattr(steps, f"{kind}_module")(model)
        return getattr(steps, f"{kind}_step")(module), small, batch
    trainer = getattr(baselines, f"{kind}_trainer")(model, setting.tokenizer, number)
    return getattr(baselines, f"{kind}_step")(trainer, model), small, batch


def peak(setting: Setting, kind: str, name: str) -> float:
    """Of one step in this process, MB."""
    step, small, batch = _variant(setting, kind, name)
    contexts = [baselines.response_only] if name == "trl_response" else []
    with with_matmul("auto" if name == "ours" else "default", *contexts)():
        step(small)
        setting.model.zero_grad()
        _give_back()
        Path("/proc/self/clear_refs").write_text("5")
        step(batch)
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def _give_back() -> None:
    """What loading and the small step have left behind: how much that is varies from run to run."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # of the C library of GNU
        trim(0)


if __name__ == "__main__":
    import side_by_side

    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["dpo", "grpo"])
    parser.add_argument("variant", choices=["ours", "trl", "trl_response"])
    parser.add_argument("--quick", action="store_true")
    chosen = parser.parse_args()
    side_by_side.prepare()
    measured = peak(side_by_side.setting(rounds=1, quick=chosen.quick), chosen.kind, chosen.variant)
    print(json.dumps({"peak": measured}))
