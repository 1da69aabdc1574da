"""`make bench`: the statistics, the table, and, where TRL is installed, that all of it runs."""

import os
import subprocess
import sys
import time
import tomllib
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from keeping import keep, kept
from paired import Spread, Times, Took, Variant, measure, spread
from setting import Check, Found
from table import LINES, Line, Target, all_hold, checks, details, markdown, verdict

ROOT = Path(__file__).parents[1]
ENTRY = ROOT / "benchmarks" / "side_by_side.py"


def test_ratios_are_taken_round_by_round():
    times = Times()
    for slow, fast in [(4.0, 2.0), (9.0, 3.0), (8.0, 1.0)]:
        times.add("slow", slow, slow)
        times.add("fast", fast, fast)
    assert times.ratios("slow", "fast") == [2, 3, 8]
    assert times.median("slow") == 8
    found = spread(times.ratios("slow", "fast"))
    assert found == Spread(median=3, least=2, most=8, rounds=3)
    assert str(found) == "3.00 [2.00, 8.00]"


def test_every_other_round_runs_in_reverse_order():
    seen = []
    variants = {name: Variant(lambda batch, name=name: seen.append((name, batch))) for name in "ab"}
    measure(variants, lambda number: 10 * number, rounds=3, warm_up=-1)
    warm_up, measured = seen[:2], seen[2:]
    assert warm_up == [("a", -1), ("b", -1)]
    assert measured == [("a", 0), ("b", 0), ("b", 10), ("a", 10), ("a", 20), ("b", 20)]


def spin(seconds):
    """Keep the processor busy."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_what_a_step_runs_in_is_not_timed():
    @contextmanager
    def around():
        spin(0.2)
        yield
        spin(0.2)

    variants = {"step": Variant(lambda _: spin(0.05), around)}
    times = measure(variants, lambda number: None, 1, before=lambda: spin(0.2))
    assert 0.05 <= times.median("step") < 0.2


def test_a_step_may_say_itself_what_it_took():
    found = []
    times = measure(
        {"loop": Variant(lambda _: Took(3.0, 4.0, "result"))},
        lambda number: None,
        2,
        after=lambda *seen: found.append(seen),
    )
    assert times.by_name == {"loop": [3, 3]}
    assert times.wall == {"loop": [4, 4]}
    assert found == [("loop", 0, "result"), ("loop", 1, "result")]


FLOOR = Line("a step", {"trl": Target(2, 3)})
CEILING = Line("a cost", {"bare": Target(0.7)}, "ms", is_ceiling=True)


@pytest.mark.parametrize(
    ("line", "median", "expected"),
    [
        (FLOOR, 1.99, "missed"),
        (FLOOR, 2, "reached"),
        (FLOOR, 3, "stretch"),
        (CEILING, 0.7, "reached"),
        (CEILING, 0.71, "missed"),
    ],
)
def test_the_median_decides_what_is_reached(line, median, expected):
    (target,) = line.targets.values()
    assert verdict(line, target, Spread(median, 0, 9, 5)) == expected


def test_the_table_has_a_line_for_each_number_that_was_measured():
    numbers = {"trl": Spread(4.5, 4.25, 5.0, 5), "response": Spread(1.5, 1.25, 1.75, 5)}
    written = markdown({"dpo_fp32": Found(numbers, [], {})}).splitlines()
    assert written[2:] == [
        "| DPO step, float32 | TRL as shipped | >= 4 | >= 5 | 4.50 [4.25, 5.00] x | 5 | reached |",
        "| DPO step, float32 | TRL on response tokens, same BLAS | >= 1.8 | >= 2 "
        "| 1.50 [1.25, 1.75] x | 5 | missed |",
    ]
    cost = {"overhead": Found({"bare": Spread(0.5, 0.4, 0.6, 3)}, [], {"ms": "all of them"})}
    assert "| <= 0.7 |  | 0.50 [0.40, 0.60] ms | 3 | reached |" in markdown(cost)
    assert details(cost).endswith("; ms: all of them")


@pytest.mark.parametrize(("value", "holds"), [(1e-6, True), (2e-5, False), (float("nan"), False)])
def test_a_difference_beyond_its_bound_fails_the_run(value, holds):
    found = {"grpo": Found({}, [Check("gradient", 0, 0), Check("loss", value, 1e-5)], {})}
    assert all_hold(found) is holds
    assert ("FAILED" in checks(found)) is not holds


def test_rows_that_were_kept_are_as_they_were_measured(tmp_path):
    place = tmp_path / "found.json"
    found = {"grpo": Found({"trl": Spread(6, 5, 7, 5)}, [Check("loss", 0.1, 1)], {"seconds": "9"})}
    assert kept(None) == kept(place) == {}
    keep(place, found)
    assert kept(place) == found


def test_trl_is_pinned_once_and_needed_by_nothing_else():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert "trl==1.16.0" in extras["bench"]
    assert "trl==1.16.0" in (ROOT / "constraints.txt").read_text().splitlines()
    others = [*project["dependencies"], *(d for n, e in extras.items() if n != "bench" for d in e)]
    assert not [package for package in others if "trl" in package or "bench" in package]
    makefile = (ROOT / "Makefile").read_text()
    assert "\nbench: .venv/.bench\n" in makefile
    assert "-e '.[bench]'" in makefile


def side_by_side(*arguments, timeout=500):
    pytest.importorskip("trl", reason="the extra bench is not installed")
    command = [sys.executable, str(ENTRY), "--quick", *arguments]
    # As `make bench` has it, and not as the tests of a second rank left it.
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=timeout, env=env
    )


def test_a_part_of_the_table_can_be_measured(tmp_path):
    page = tmp_path / "page.md"
    done = side_by_side("--rows", "dpo_fp32,grpo,tokenisation", "--write", str(page))
    assert done.returncode == 0, done.stdout + done.stderr
    said = page.read_text()
    assert said in done.stdout
    for row in ("dpo_fp32", "grpo", "tokenisation"):
        assert f"\n| {LINES[row].title} | TRL as shipped |" in said
    assert LINES["loop"].title not in said
    assert f"torch {torch.__version__}, trl 1.16.0" in said


def test_an_unknown_row_is_refused_with_the_known_ones():
    done = side_by_side("--rows", "dpo_fp32,speed")
    assert done.returncode == 2
    assert "no rows ['speed']: choose of dpo_fp32, dpo_bf16, grpo" in done.stderr


@pytest.mark.slow
def test_every_row_can_be_measured(tmp_path):
    page = tmp_path / "page.md"
    done = side_by_side("--write", str(page), timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [
        line.title for line in LINES.values() if f"| {line.title} |" not in page.read_text()
    ] == []
