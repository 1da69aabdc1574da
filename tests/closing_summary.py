"""What the golden and cases runners say at the end: what was compared, and what was not.

A test joins a runner's summary by recording the runner's name as a property.
"""

import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping

import pytest


def outcomes(reporter: pytest.TerminalReporter, runner: str) -> Counter[str]:
    """How often each outcome was recorded; a test that failed counts as failed only."""
    reports = [report for found in reporter.stats.values() for report in found]
    recorded = [
        (report, dict(report.user_properties).get(runner))
        for report in reports
        if getattr(report, "when", None) == "call"
    ]
    return Counter(
        "failed" if report.failed else outcome for report, outcome in recorded if outcome
    )


def write(
    reporter: pytest.TerminalReporter, title: str, counts: Mapping[str, int], unmapped: Counter[str]
) -> None:
    """The section of one runner: counts in a line, then everything that no adapter answers."""
    reporter.section(title)
    reporter.line(", ".join(f"{number} {outcome}" for outcome, number in counts.items()))
    reporter.line(f"{unmapped.total()} unmapped{':' if unmapped else ''}")
    # A name is one word to the wrapping, whatever it is made of.
    names = [f"{name} ({n})" if n > 1 else name for name, n in unmapped.items()]
    words = ", ".join(name.replace(" ", "\N{NO-BREAK SPACE}") for name in names)
    for line in textwrap.wrap(words, 96, break_on_hyphens=False):
        reporter.line("  " + line.replace("\N{NO-BREAK SPACE}", " "))


def summarise(reporter: pytest.TerminalReporter) -> None:
    """The sections of the runners of which a test was run."""
    if counts := outcomes(reporter, "golden"):
        # Heavy, and of no use to most runs.
        from golden_adapters import ADAPTERS, mapped_as
        from golden_cases import FOLDER, load, matches, read_not_offered

        counts = {name: counts[name] for name in ("passed", "failed", "overruled")}
        absent = [row.pattern for row in read_not_offered()]
        cases = [(mapped_as(case), matches(case.id, absent)) for case in load()]
        counts["not offered"] = sum(is_absent for _, is_absent in cases)
        names = [name for name, is_absent in cases if not is_absent]
        write(reporter, f"golden values of {FOLDER}", counts, _without(names, ADAPTERS))
    if counts := outcomes(reporter, "cases"):
        from case_adapters import ADAPTERS as CASE_ADAPTERS
        from case_adapters import FOLDER as CASE_FOLDER
        from case_adapters import load as load_cases

        counts = {name: counts[name] for name in ("passed", "failed")}
        names = [case["id"] for case in load_cases()]
        write(reporter, f"cases of {CASE_FOLDER}", counts, _without(names, CASE_ADAPTERS))


def _without(names: Iterable[str], adapters: Iterable[str]) -> Counter[str]:
    return Counter(sorted(name for name in names if name not in set(adapters)))
