"""Every notebook runs from top to bottom, and the numbers it states are asserted in it."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
CODE_LINES = 80


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("LIT_ALIGN_CACHE", str(tmp_path / "cache"))
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=540, resources={"metadata": {"path": tmp_path}})
    client.execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_short_and_shows_what_it_made(path):
    cells = code(nbformat.read(path, as_version=4))
    assert sum(len(cell.source.splitlines()) for cell in cells) <= CODE_LINES
    assert all(cell.execution_count for cell in cells)
    assert not any(
        "def training_step" in cell.source or "def loss" in cell.source for cell in cells
    )
