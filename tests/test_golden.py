"""Our numbers against those of other projects, case by case.

The folder is the one LIT_ALIGN_GOLDEN names, else tests/golden. A variant without an adapter is
not a test; the closing summary lists it.
"""

from collections import Counter
from fnmatch import fnmatchcase

import pytest
import torch
from golden_adapters import ADAPTERS, LEFT_OUT, OVERRULED_WHERE, mapped_as
from golden_adapters_e2e import tiny_llama
from golden_cases import (
    FOLDER,
    HERE,
    differences,
    load,
    matches,
    read_not_offered,
    read_overruled,
)

pytestmark = pytest.mark.golden

CASES = load()
MAPPED = [case for case in CASES if mapped_as(case) in ADAPTERS]
OVERRULED = read_overruled()
NOT_OFFERED = read_not_offered()


def overruled_by(case):
    """The line of DISAGREEMENTS.md that speaks of the case, if one does."""
    if not OVERRULED_WHERE.get(case.variant, lambda _: True)(case):
        return None
    return next((row for row in OVERRULED if fnmatchcase(case.id, row.pattern)), None)


@pytest.mark.parametrize("row", NOT_OFFERED, ids=[row.pattern for row in NOT_OFFERED])
def test_what_is_not_offered_is_said_of_cases_that_nothing_answers(row, record_property):
    record_property("golden", "not offered")
    spoken_of = [case for case in CASES if fnmatchcase(case.id, row.pattern)]
    if not spoken_of and FOLDER != HERE:
        pytest.skip("this folder has no such cases")
    assert spoken_of, f"stale line of DISAGREEMENTS.md: no case matches {row.pattern}"
    answered = [case.id for case in spoken_of if mapped_as(case) in ADAPTERS]
    assert not answered, f"stale line of DISAGREEMENTS.md: {row.pattern} is offered"
    assert len(row.reason) > 40


@pytest.mark.parametrize("case", MAPPED, ids=[case.id for case in MAPPED])
def test_golden(case, record_property):
    row = overruled_by(case)
    record_property("golden", "overruled" if row else "passed")
    allowed = row.differs_in if row else ()
    found = differences(case, ADAPTERS[mapped_as(case)], LEFT_OUT, allowed)
    unexplained = [f"{name}: {why}" for name, why in found.items() if not matches(name, allowed)]
    assert not unexplained, "\n".join(unexplained)
    assert found or not row, f"stale line of DISAGREEMENTS.md: {case.id} agrees with us"


def test_the_folder_holds_whole_files(record_property):
    record_property("golden", "folder")
    assert CASES, f"no golden cases in {FOLDER}"
    files = {case.file["group"]: case.file for case in CASES}
    for name, file in files.items():
        assert file["schema"] == "lit_align-golden/1", name
        assert file["n_cases"] == len(file["cases"]), name
    assert not [name for name, times in Counter(c.id for c in CASES).items() if times > 1]


def test_every_line_of_the_disagreements_says_where_and_why():
    lines = (HERE / "DISAGREEMENTS.md").read_text().splitlines()
    heads = 2 + 2
    assert len(OVERRULED) + len(NOT_OFFERED) == sum(line.startswith("|") for line in lines) - heads
    for row in OVERRULED:
        assert row.differs_in, row.pattern
        assert len(row.reason) > 40, row.pattern


def test_the_tiny_llama_is_filled_as_its_file_says():
    case = next((case for case in CASES if case.variant == "e2e_model"), None)
    if case is None:
        pytest.skip("this folder has no end-to-end model")
    parameters = dict(tiny_llama(case).named_parameters())
    described = {entry["name"]: entry for entry in case.file["model"]["parameters"]}
    assert list(parameters) == list(described)
    for name, entry in described.items():
        values = parameters[name].detach()
        assert list(values.shape) == entry["shape"]
        torch.testing.assert_close(values.sum().item(), entry["sum"])
        torch.testing.assert_close(values.square().sum().item(), entry["sum_sq"])
