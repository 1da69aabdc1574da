import pickle

import pytest
from datasets import Dataset
from torch import tensor
from torch.testing import assert_close

from lit_align.data.pairs import PairCollate, PairRows
from lit_align.ops import IGNORE_INDEX, completion_lengths

X = IGNORE_INDEX
PAIRS = [
    {"prompt_ids": [5, 2, 6], "chosen_ids": [7, 8, 2], "rejected_ids": [9, 2]},
    {"prompt_ids": [], "chosen_ids": [7, 8, 2], "rejected_ids": [9, 8, 7, 2]},
]


def test_a_batch_by_hand_where_padding_looks_like_the_end_token():
    batch = PairCollate(pad_token_id=2)([{"index": 4, **PAIRS[0]}, {"index": 9, **PAIRS[1]}])
    expected = {
        "index": [4, 9],
        "chosen_input_ids": [[5, 2, 6, 7, 8, 2], [7, 8, 2, 2, 2, 2]],
        "chosen_attention_mask": [[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]],
        "chosen_labels": [[X, X, X, 7, 8, 2], [7, 8, 2, X, X, X]],
        "rejected_input_ids": [[5, 2, 6, 9, 2], [9, 8, 7, 2, 2]],
        "rejected_attention_mask": [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]],
        "rejected_labels": [[X, X, X, 9, 2], [9, 8, 7, 2, X]],
    }
    assert batch.keys() == expected.keys()
    for name, values in expected.items():
        assert_close(batch[name], tensor(values), msg=name)
    assert completion_lengths(batch["chosen_labels"]).tolist() == [3, 2]


def test_collate_can_be_sent_to_workers():
    assert pickle.loads(pickle.dumps(PairCollate(3))) == PairCollate(3)


def test_rows_are_some_of_the_pairs_under_numbers_of_their_own():
    rows = PairRows(Dataset.from_list(PAIRS), positions=[1], first_index=10)
    assert list(rows) == [{"index": 10, **PAIRS[1]}]
    assert rows[-1] == rows[0]
    assert [row["index"] for row in PairRows(Dataset.from_list(PAIRS))] == [0, 1]
    with pytest.raises(IndexError):
        rows[1]
