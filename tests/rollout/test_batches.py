"""From samples to tensors, by hand."""

import pytest
import torch
from small_samples import sample
from torch.testing import assert_close

from lit_align.ops import completion_mask
from lit_align.rollout.batches import collate, filler, window_stamps

LOGPROBS = {
    "sampler_logprobs": [-0.1, -0.2],
    "old_logprobs": [-1.0, -2.0],
    "ref_logprobs": [-3.0, -4.0],
}


def expected(batch, **columns):
    for name, rows in columns.items():
        assert_close(batch[name], torch.tensor(rows), msg=lambda m, name=name: f"{name}: {m}")


def test_prompt_completion_and_padding_lie_where_they_belong():
    batch = collate(
        [
            sample(0, prompt=[11, 12, 13], completion=[21, 22], advantage=0.5),
            sample(1, prompt=[14], completion=[23], advantage=-2.0),
        ]
    )
    expected(
        batch,
        input_ids=[[11, 12, 13, 21, 22], [14, 23, 0, 0, 0]],
        attention_mask=[[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]],
        labels=[[-100, -100, -100, 21, 22], [-100, 23, -100, -100, -100]],
        advantages=[0.5, -2.0],
        masked_tokens=[0, 0],
    )
    assert batch.keys().isdisjoint(LOGPROBS)


def test_column_t_of_the_log_probs_speaks_of_token_t_plus_1():
    batch = collate(
        [
            sample(0, prompt=[11, 12, 13], completion=[21, 22], **LOGPROBS),
            sample(1, prompt=[14], completion=[23, 24], **LOGPROBS),
        ]
    )
    # Tokens 12 13 21 22 are predicted, then 23 24 and two of padding.
    expected(
        batch,
        sampler_logprobs=[[0, 0, -0.1, -0.2], [-0.1, -0.2, 0, 0]],
        old_logprobs=[[0, 0, -1.0, -2.0], [-1.0, -2.0, 0, 0]],
        ref_logprobs=[[0, 0, -3.0, -4.0], [-3.0, -4.0, 0, 0]],
    )
    assert torch.equal(batch["old_logprobs"] != 0, completion_mask(batch["labels"]))


def test_a_masked_completion_is_read_and_not_learnt_from():
    cut = sample(0, prompt=[11], completion=[21, 22], is_trained=False, **LOGPROBS)
    batch = collate(
        [cut, sample(0, 1, prompt=[11], completion=[23], **{n: [-5.0] for n in LOGPROBS})]
    )
    expected(
        batch,
        input_ids=[[11, 21, 22], [11, 23, 0]],
        labels=[[-100, -100, -100], [-100, 23, -100]],
        masked_tokens=[2, 0],
        old_logprobs=[[-1.0, -2.0], [-5.0, 0]],
    )


def test_an_empty_completion_is_a_row_without_tokens():
    batch = collate([sample(0, prompt=[11, 12], completion=[], old_logprobs=[])])
    expected(batch, input_ids=[[11, 12]], labels=[[-100, -100]], masked_tokens=[0])
    expected(batch, old_logprobs=[[0.0]])
    alone = collate([sample(0, prompt=[11], completion=[], old_logprobs=[])])
    assert alone["old_logprobs"].shape == (1, 0)


def test_only_log_probs_that_all_have_are_given():
    one = sample(0, completion=[3, 4], **LOGPROBS)
    other = sample(0, 1, completion=[3], old_logprobs=[-1.0])
    assert collate([one, other]).keys() & LOGPROBS.keys() == {"old_logprobs"}


def test_a_filler_is_the_shortest_sample_and_nothing_of_it_counts():
    cut = sample(0, completion=[5], is_trained=False, advantage=3.0, old_logprobs=[-1.0])
    long = sample(1, completion=[6, 7], advantage=3.0, old_logprobs=[-1.0, -2.0])
    batch = filler([long, cut])
    expected(batch, input_ids=[[1, 2, 5]], labels=[[-100] * 3], masked_tokens=[0], advantages=[0.0])
    # The same columns as its fellows have: the ranks compute alike.
    assert batch.keys() == collate([long]).keys()
    assert not cut.is_trained
    assert cut.advantage == 3.0


# Two micro-batches on two ranks. Group 1 has 2 + 1 tokens on three of the four shares and a masked
# completion, group 2 has 3, group 3 none at all.
WINDOW = [
    [
        [sample(1, 0, completion=[1, 2]), sample(2, 0, completion=[1, 2, 3])],
        [sample(1, 1, completion=[1])],
    ],
    [[sample(3, 0, completion=[9, 9], is_trained=False), sample(1, 2, completion=[])], []],
]


@pytest.mark.parametrize(
    ("rank", "row_prompt_tokens"), [(0, [[3.0, 3.0], [0.0, 3.0]]), (1, [[3.0], [0.0]])]
)
def test_the_counts_of_a_window_are_those_of_all_ranks_and_micro_batches(rank, row_prompt_tokens):
    stamps = window_stamps(WINDOW, rank)
    for stamp, of_rows in zip(stamps, row_prompt_tokens, strict=True):
        # Rows with tokens: three of five; groups with tokens: two of three.
        expected(stamp, window_tokens=6.0, window_rows=3.0, window_prompts=2.0)
        expected(stamp, row_prompt_tokens=of_rows)


def test_a_window_without_a_token_counts_none():
    [stamp] = window_stamps([[[sample(0, completion=[1], is_trained=False)]]], 0)
    expected(stamp, window_tokens=0.0, window_rows=0.0, window_prompts=0.0)
    expected(stamp, row_prompt_tokens=[0.0])
