"""What is logged of pairs, against each row alone and all its logits."""

import pytest
import torch
from modules.test_pair_logps import EVERYTHING, ROWS, batch_of
from torch.testing import assert_close
from transformers import GPT2Config, GPT2LMHeadModel

from lit_align.losses import DPOConfig
from lit_align.modules import DPOModule
from lit_align.modules.metrics import Sums
from lit_align.modules.pair_logps import pair_logps
from lit_align.modules.pair_metrics import PAIR_SUMS, pair_means, pair_sums


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    shape = {"vocab_size": 11, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**shape, initializer_range=0.5)).double().eval()


def tokens(model, rows, which):
    """Of each token of a response: entropy, mean logit, and whether it is the likeliest."""
    found = []
    for row in rows:
        ids = torch.tensor([row[0] + row[which]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(row[0]) - 1 : -1]
        logprobs = logits.log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        is_likeliest = logits.argmax(-1) == ids[0, len(row[0]) :]
        found.append(torch.stack([entropy, logits.mean(-1), is_likeliest.double()], -1))
    return torch.cat(found)


def expected(model, rows):
    """TRL's four: over the tokens of both responses, of the chosen one, of each."""
    chosen, rejected = tokens(model, rows, 1), tokens(model, rows, 2)
    return {
        "entropy": torch.cat([chosen, rejected])[:, 0].mean().item(),
        "mean_token_accuracy": chosen[:, 2].mean().item(),
        "logits/chosen": chosen[:, 1].mean().item(),
        "logits/rejected": rejected[:, 1].mean().item(),
    }


@pytest.mark.parametrize("loss", [DPOConfig("simpo"), EVERYTHING], ids=["simpo", "with prompts"])
def test_statistics_are_means_over_the_tokens_of_all_micro_batches(model, loss):
    module = DPOModule(model, loss)
    sums = Sums(*PAIR_SUMS)
    # A filler repeats a row and does not count.
    for rows, mask in ((ROWS[:3], [True, True, False]), (ROWS[2:], [True, True])):
        batch = batch_of(rows)
        if module.loss.reads_reference:
            zeros = torch.zeros(len(rows), dtype=torch.float64)
            names = ("chosen", "rejected", "chosen_head", "rejected_head")
            batch |= {f"reference_{name}_logps": zeros for name in names}
        logps = module.pair_logps(batch, statistics=True)
        pair = module.pair_loss(batch, logps)
        sums.update_rows(pair_sums(pair, logps), torch.tensor(mask))
    found = pair_means(sums.compute())
    by_hand = expected(model, ROWS)
    assert 0 < by_hand["mean_token_accuracy"] < 1
    assert {name: found[name].item() for name in by_hand} == pytest.approx(by_hand, rel=1e-5)
    assert not any(value.requires_grad for value in found.values())


def test_statistics_change_nothing_else(model):
    plain = pair_logps(model, batch_of(ROWS), EVERYTHING)
    found = pair_logps(model, batch_of(ROWS), EVERYTHING, statistics=True)
    for name, one in plain._asdict().items():
        if one is not None:
            assert_close(getattr(found, name), one, rtol=1e-12, atol=1e-12)
    assert (found.chosen_likeliest <= found.chosen_lengths).all()


def test_of_no_token_every_mean_is_0():
    assert set(map(float, pair_means(Sums(*PAIR_SUMS).compute()).values())) == {0.0}
