"""How our code answers public faults of losses of labelled completions."""

from typing import Any

import pytest
import torch

from lit_align.data.mismatch import mismatched_rows
from lit_align.errors import UserError
from lit_align.losses import UnpairedLoss
from lit_align.modules.labelled_metrics import labelled_means, labelled_sums

Case = dict[str, Any]


def a_row_is_never_its_own_mismatch(case: Case) -> None:
    """Partners are of the whole set: no batch, not even a last one of a single row, lacks one."""
    given, expected = case["input"], case["expected"]
    for rows in given["rotate"]:
        found = mismatched_rows(range(rows), range(rows), range(rows))
        assert found == expected["mismatch_index"][str(rows)]
    with pytest.raises(UserError, match="at least two different"):
        mismatched_rows([0], [0], [0] * given["single"])
    rows = given["dataset_rows"]
    last_batch = range(rows - rows % given["batch_size"], rows)
    partners = mismatched_rows(range(rows), range(rows), range(rows))
    assert len(last_batch) == 1
    assert all(partners[row] != row for row in last_batch)
    labels = torch.tensor(given["labels_all_undesirable"]).bool()
    of_rows = torch.zeros(len(labels))
    sums = labelled_sums(
        UnpairedLoss(of_rows, of_rows), of_rows, labels, torch.ones_like(labels), None
    )
    means = labelled_means(sums)
    assert all(value.isfinite() for value in means.values())
    assert "rewards/rejected" in means
    assert "rewards/chosen" not in means


UNPAIRED_CASES = {"BC05": a_row_is_never_its_own_mismatch}
