"""Small real objects that many tests share."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

# Modules that several tests share lie beside this one.
sys.path.insert(0, str(Path(__file__).parent))

# Two workers of pytest, or two ranks, must not fight over one core; and nothing may reach out.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# The same examples every time, however busy the machine.
settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--layout",
        choices=["padded", "packed", "shared"],
        help="of all log-probs that are left to choose theirs, in the tests' own process",
    )


@pytest.fixture(autouse=True)
def forced_layout(request, monkeypatch):
    """Every layout must pass every test."""
    forced = request.config.getoption("--layout")
    if forced:
        from lit_align.logprobs import layouts, response

        def packed_batch(model, layout, *batch):
            return layouts.packed_batch(model, forced if layout == "auto" else layout, *batch)

        monkeypatch.setattr(response, "packed_batch", packed_batch)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    from closing_summary import summarise

    summarise(terminalreporter)
