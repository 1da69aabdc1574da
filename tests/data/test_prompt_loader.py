from itertools import chain

import lightning as L
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_align.data.loader import Replica
from lit_align.data.prompt_loader import PromptLoader
from lit_align.data.prompts import Prompt, PromptRows


def prompts(count):
    """The number of a prompt is its one token, and what a reward reads."""
    columns = [{"answer": str(n), "about": {"tags": [n, None]}} for n in range(count)]
    return PromptRows([Prompt(n, f"{n}=", [n], columns[n]) for n in range(count)])


def loaders(count, batch_size, ranks):
    rows = prompts(count)
    return [
        PromptLoader(rows, batch_size=batch_size, replica=Replica(rank, ranks))
        for rank in range(ranks)
    ]


def real(batches):
    return [
        prompt.row
        for batch in batches
        for prompt, counts in zip(batch["prompts"], batch["is_real"], strict=True)
        if counts
    ]


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 5))
def test_every_prompt_counts_once_and_all_ranks_take_as_many_turns(count, batch_size, ranks):
    made = loaders(count, batch_size, ranks)
    per_rank = [list(loader) for loader in made]
    assert {len(batches) for batches in per_rank} == {len(loader) for loader in made}
    assert sorted(real(chain(*per_rank))) == list(range(count))
    assert all(1 <= len(batch["prompts"]) <= batch_size for batch in chain(*per_rank))


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 5))
def test_a_rank_has_a_filler_only_in_place_of_nothing(count, batch_size, ranks):
    for batch in chain(*loaders(count, batch_size, ranks)):
        assert all(batch["is_real"]) or batch["is_real"] == [False]


def test_prompts_are_dealt_in_turn():
    # Five prompts, two to a batch on each of two ranks: 0 1 2 3 | 4.
    first, second = loaders(5, 2, 2)
    assert [[p.row for p in batch["prompts"]] for batch in first] == [[0, 2], [4]]
    assert [[p.row for p in batch["prompts"]] for batch in second] == [[1, 3], [4]]
    assert [batch["is_real"] for batch in second] == [[True, True], [False]]


class Recorder(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.batches = []

    def validation_step(self, batch):
        self.batches.append(batch)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_lightning_hands_over_prompts_as_they_are(batch_size, tmp_path):
    module, loader = Recorder(), PromptLoader(prompts(4), batch_size=batch_size)
    trainer = L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    trainer.validate(module, loader, verbose=False)
    assert module.batches == list(loader)
    assert all(type(prompt) is Prompt for batch in module.batches for prompt in batch["prompts"])
