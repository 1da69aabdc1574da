"""What `make docs` writes is what it would write today, and leads where it says."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from composing import names
from torch.testing import assert_close

from lit_align.losses import PREFERENCE_LOSSES, SURROGATES, GRPOConfig
from lit_align.losses.unpaired import UNPAIRED_LOSSES

DOCS = Path(__file__).parents[1] / "docs"
sys.path.insert(0, str(DOCS))

import make_losses  # noqa: E402, beside the page it makes
from loss_docstrings import Docstring  # noqa: E402
from loss_files import LossFile  # noqa: E402
from loss_sections import slug  # noqa: E402

PAGE = (DOCS / "losses.md").read_text()
HEADINGS = re.findall(r"^#+ (.*)$", PAGE, re.MULTILINE)
STALE = "docs/ is not what the code says today: run make docs"


@pytest.fixture(scope="module")
def kept():
    return json.loads((DOCS / "plots/points.json").read_text())


def test_the_page_is_what_the_code_says():
    # Compared line by line: pytest would take minutes over so long a text.
    today, written = (text.splitlines() for text in (make_losses.page(), PAGE))
    differ = [pair for pair in zip(today, written, strict=False) if pair[0] != pair[1]]
    assert not differ, f"{STALE}\nit would say {differ[0][0]!r}\nand it says {differ[0][1]!r}"
    assert len(today) == len(written), STALE


def test_the_plots_show_the_numbers_of_the_code(kept):
    today = {name: make_losses.points(curves) for name, curves in make_losses.pictures().items()}
    assert today.keys() == kept.keys(), STALE
    for name, lines in today.items():
        assert lines.keys() == kept[name].keys(), f"{STALE} ({name})"
        for legend, line in lines.items():
            numbers = torch.tensor([line, kept[name][legend]], dtype=torch.float64)
            assert_close(*numbers, rtol=1e-6, atol=1e-9, msg=f"{STALE} ({name}, {legend})")


def test_there_is_a_plot_for_the_numbers_of_each_and_no_other(kept):
    assert sorted(path.stem for path in (DOCS / "plots").glob("*.svg")) == sorted(kept), STALE


def test_every_loss_and_every_choice_has_a_section():
    losses = {f"`{name}`" for name in [*names("loss"), *PREFERENCE_LOSSES, *UNPAIRED_LOSSES]}
    choices = {
        f"{make_losses.AXES[option]} `{name}`"
        for option, table in make_losses.TABLES.items()
        for name in table
    }
    assert losses | choices <= set(HEADINGS)
    assert len(set(HEADINGS)) == len(HEADINGS)


def test_every_axis_of_policy_losses_is_there():
    assert make_losses.TABLES.keys() == make_losses.AXES.keys() == GRPOConfig().variants.keys()


def test_every_loss_of_pairs_and_every_surrogate_has_a_plot(kept):
    wanted = {*PREFERENCE_LOSSES, *UNPAIRED_LOSSES, *(f"surrogate-{name}" for name in SURROGATES)}
    assert wanted <= kept.keys()


def test_every_link_within_the_repository_leads_somewhere():
    anchors = {f"#{slug(heading)}" for heading in HEADINGS}
    targets = [t for t in re.findall(r"\]\(([^)\s]+)\)", PAGE) if not t.startswith("https://")]
    assert [t for t in targets if t not in anchors and not (DOCS / t).exists()] == []


def test_a_docstring_is_taken_apart():
    def loss():
        """First line.

            x = y

        Args:
            x: a number
                of two lines.
            y_w: another: one.

        Elsewhere:
            Others halve it.

        Source:
            Somebody 2020, arXiv:2001.00001.
        """

    doc = Docstring.of(loss)
    assert doc.text == "First line.\n\n    x = y"
    assert doc.args == {"x": "a number of two lines.", "y_w": "another: one."}
    assert doc.line("Elsewhere") == "Others halve it."
    assert doc.line("Source").endswith("[arXiv:2001.00001](https://arxiv.org/abs/2001.00001).")


def test_a_file_is_taken_apart():
    file = LossFile.read("dapo")
    assert file.title.startswith("Decoupled clip")
    assert file.settings["clip_higher"] == ("0.28", "the same: clip-higher")
    assert LossFile.read("shared/policy").settings["ddof"].value == "null"
    assert not {"_target_", "defaults", "loss"} & file.settings.keys()
