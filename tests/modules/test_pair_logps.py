"""What a pass over a batch says of responses, prompts and heads, against each row alone."""

import pytest
import torch
from torch.testing import assert_close
from transformers import GPT2Config, GPT2LMHeadModel

from lit_align.losses import CombinedConfig, DPOConfig, TensorCache, pair_config
from lit_align.modules import DPOModule
from lit_align.modules.pair_logps import PairLogps, head_mask, pair_logps, with_prompts

# Prompts and responses of several lengths; responses of which one is empty, one is the shorter.
ROWS = [
    ([5, 6, 7], [1, 2, 3, 4], [9, 8]),
    ([4], [7], [3, 3, 3, 2, 1]),
    ([2, 9, 4, 4, 1], [6, 5], [5, 6]),
    ([8, 8], [1, 2, 3], []),
]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    shape = {"vocab_size": 11, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**shape)).double().eval()


def batch_of(rows):
    """Collated like the loader's batches, each side to its own width."""
    found = {}
    for which, side in ((1, "chosen"), (2, "rejected")):
        width = max(len(row[0]) + len(row[which]) for row in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.int64)
        mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
        for n, row in enumerate(rows):
            prompt, response = row[0], row[which]
            whole = torch.tensor(prompt + response)
            ids[n, : len(whole)], mask[n, : len(whole)] = whole, 1
            labels[n, len(prompt) : len(whole)] = whole[len(prompt) :]
        found |= {
            f"{side}_input_ids": ids,
            f"{side}_attention_mask": mask,
            f"{side}_labels": labels,
        }
    return found


def by_hand(model, prompt, response):
    """The log-probs of all tokens of one row but the first."""
    ids = torch.tensor([prompt + response])
    with torch.no_grad():
        logprobs = model(ids).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(-1, ids[0, 1:, None])[:, 0]


def parts(model, row):
    """Sums by hand: chosen, rejected, prompt, both heads."""
    prompt, chosen, rejected = row
    start, shared = len(prompt) - 1, min(len(chosen), len(rejected))
    of_chosen, of_rejected = by_hand(model, prompt, chosen), by_hand(model, prompt, rejected)
    return [
        of_chosen[start:].sum(),
        of_rejected[start:].sum(),
        of_chosen[:start].sum(),
        of_chosen[start : start + shared].sum(),
        of_rejected[start : start + shared].sum(),
    ]


EVERYTHING = CombinedConfig({"ld_dpo": {"weight": 1}, "sft_whole": {"weight": 1}})


def test_all_sums_are_those_of_each_row_alone(model):
    logps = pair_logps(model, batch_of(ROWS), EVERYTHING)
    expected = torch.tensor([parts(model, row) for row in ROWS], dtype=torch.float64).T
    found = [
        *(logps.chosen, logps.rejected),
        *(logps.prompt, logps.chosen_head, logps.rejected_head),
    ]
    assert_close(torch.stack(found), expected, rtol=1e-12, atol=1e-12)
    assert logps.chosen_lengths.tolist() == [4, 1, 2, 3]
    assert logps.rejected_lengths.tolist() == [2, 5, 2, 0]
    # The first token of a prompt is predicted by nothing.
    assert logps.prompt_lengths.tolist() == [2, 0, 4, 1]


def test_what_no_term_reads_is_not_made(model):
    logps = pair_logps(model, batch_of(ROWS), DPOConfig("dpo"))
    assert logps[4:] == (None,) * 12
    whole = pair_logps(model, batch_of(ROWS), EVERYTHING)
    for part, other in zip(logps[:4], whole[:4], strict=True):
        assert_close(part, other)


def test_alignment_terms_are_of_responses_alone(model):
    with_weights = CombinedConfig(
        {"dpo": {"weight": 1, "wpo": "sampled"}, "sft_whole": {"weight": 1}}
    )
    plain = pair_logps(model, batch_of(ROWS), DPOConfig("wpo"))
    whole = pair_logps(model, batch_of(ROWS), with_weights)
    assert_close(whole.chosen_alignment, plain.chosen_alignment)
    assert_close(whole.rejected_alignment, plain.rejected_alignment)
    assert plain.prompt is None


def test_everything_is_read_from_one_pass(model):
    passes = []
    hook = model.transformer.register_forward_hook(lambda *_: passes.append(1))
    pair_logps(model, batch_of(ROWS), EVERYTHING)
    hook.remove()
    assert len(passes) == 1


def test_only_the_chosen_row_scores_its_prompt():
    ids = torch.arange(1, 9).view(4, 2)
    mask = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1]])
    labels = torch.tensor([[-100, 2], [-100, -100], [-100, 6], [-100, 8]])
    asked = with_prompts(ids, mask, labels)
    assert asked.tolist() == [[1, 2], [3, -100], [-100, 6], [-100, 8]]


def test_a_head_has_as_many_scored_tokens_as_the_shorter_response():
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 1], [0, 1, 1, 0], [1, 1, 1, 1]]).bool()
    expected = torch.tensor([[0, 1, 1, 0], [1, 1, 0, 1], [0, 1, 1, 0], [1, 1, 1, 0]]).bool()
    assert torch.equal(head_mask(mask), expected)


# From sums to terms


@pytest.fixture
def step(model):
    """Loss and terms of a config on the rows, the reference another model."""
    torch.manual_seed(4)
    reference = GPT2LMHeadModel(model.config).double().eval()
    rows = batch_of(ROWS) | {"index": torch.arange(len(ROWS))}

    def of(loss):
        module = DPOModule(model, loss)
        with torch.no_grad():
            sums = pair_logps(reference, rows, module.loss).sums("")
        module.reference_cache = TensorCache({k.removeprefix("_"): v for k, v in sums.items()})
        logps = module.pair_logps(rows)
        return module.pair_loss(rows, logps), module.pair_losses(rows, logps)

    return of


@pytest.mark.parametrize("name", ["mpo", "rpo", "cpo", "cpo_simpo", "orpo", "slic_hf"])
def test_a_sum_is_its_terms_each_as_if_alone(step, name):
    config = pair_config(name)
    pair, terms = step(name)
    assert list(terms) == list(config.terms)
    expected = 0
    for term, (weight, alone) in config.terms.items():
        found, _ = step(alone)
        for part, other in zip(terms[term], found, strict=True):
            assert_close(part, other)
        expected = expected + weight * found.losses
    assert_close(pair.losses, expected)
    first = next(iter(terms.values()))
    assert_close(pair.chosen_rewards, first.chosen_rewards)
    assert_close(pair.rejected_rewards, first.rejected_rewards)


def test_means_and_sums_stand_in_one_sum(step):
    """The means are those of policy and of reference."""
    pair, terms = step(CombinedConfig({"dpo_norm": {"weight": 1}, "ld_dpo": {"weight": 1}}))
    assert pair.losses.isfinite().all()
    for name in terms:
        assert_close(terms[name].losses, step(name)[0].losses)


def test_means_of_both_models_are_over_the_policy_s_lengths():
    logps = PairLogps(*torch.tensor([[-6.0, 0.0], [-10.0, -4.0]]), *torch.tensor([[3, 0], [5, 2]]))
    sums = logps.sums("policy") | {"reference_chosen_logps": torch.tensor([-9.0, 0.0])}
    means = logps.per_token(sums)
    assert means["policy_chosen_logps"].tolist() == [-2.0, 0.0]
    assert means["policy_rejected_logps"].tolist() == [-2.0, -2.0]
    assert means["reference_chosen_logps"].tolist() == [-3.0, 0.0]


def test_orpo_by_hand(step, model):
    """Mean over prompt and chosen response, and the odds ratio of means over responses."""
    pair, _ = step("orpo")
    for n, (prompt, chosen, rejected) in enumerate(ROWS[:3]):
        whole = by_hand(model, prompt, chosen)
        means = [by_hand(model, prompt, r)[len(prompt) - 1 :].mean() for r in (chosen, rejected)]
        odds_w, odds_l = (mean - torch.log1p(-mean.exp()) for mean in means)
        expected = -whole.mean() - 0.1 * torch.nn.functional.logsigmoid(odds_w - odds_l)
        assert_close(pair.losses[n], expected)


@pytest.mark.parametrize("weight", [0.5, 2.0])
def test_a_weight_column_weighs_the_whole_sum(model, weight):
    module = DPOModule(model, "cpo")
    rows = batch_of(ROWS)
    logps = module.pair_logps(rows)
    column = {"weight": torch.full((len(ROWS),), weight)}
    plain, heavy = module.pair_loss(rows, logps), module.pair_loss(rows | column, logps)
    assert_close(heavy.losses, weight * plain.losses)
