"""Public faults, with the right values: what others got wrong, ours gets right.

The folder is the one LIT_ALIGN_CASES names, else tests/cases. A case without an adapter is not a
test; the closing summary lists it.
"""

import pytest
from case_adapters import ADAPTERS, FOLDER, load

pytestmark = pytest.mark.cases

CASES = load()
MAPPED = [case for case in CASES if case["id"] in ADAPTERS]


@pytest.mark.parametrize("case", MAPPED, ids=[case["id"] for case in MAPPED])
def test_case(case, record_property):
    record_property("cases", "passed")
    ADAPTERS[case["id"]](case)


def test_the_folder_holds_cases(record_property):
    record_property("cases", "folder")
    assert CASES, f"no cases in {FOLDER}"
    assert len({case["id"] for case in CASES}) == len(CASES)
