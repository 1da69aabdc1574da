"""How our code answers the public faults of generation."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import PhiConfig, PhiForCausalLM

from lit_align.logprobs import response_logprobs
from lit_align.rollout import Completion, HuggingFaceEngine, Request, Sampling, stop_token_ids

Case = dict[str, Any]


def bigram(logits: Tensor) -> PhiForCausalLM:
    """A real model that looks at the last token only: row i of `logits`, (V, V), follows token i.

    Each token is a direction of its own, nothing is added to it, and the final norm is undone.
    """
    size = len(logits)
    model = PhiForCausalLM(
        PhiConfig(
            vocab_size=size,
            hidden_size=size,
            intermediate_size=1,
            num_hidden_layers=1,
            num_attention_heads=1,
            partial_rotary_factor=1.0,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
    ).eval()
    layer = model.model.layers[0]
    with torch.no_grad():
        for part in (layer.self_attn.dense, layer.mlp.fc2):
            part.weight.zero_()
            part.bias.zero_()
        # So long that the norm's epsilon does not count.
        model.model.embed_tokens.weight.copy_(1e4 * torch.eye(size))
        # A unit vector has mean 1 / size and deviation sqrt(size - 1) / size.
        model.model.final_layernorm.weight.fill_((size - 1) ** 0.5 / size)
        model.model.final_layernorm.bias.fill_(1 / size)
        model.lm_head.weight.copy_(logits.T)
        model.lm_head.bias.zero_()
    return model


def answers(model: PhiForCausalLM, request: Request, sampling: Sampling) -> list[Completion]:
    engine = HuggingFaceEngine()
    engine.sync_weights(0, model)
    [completions] = engine.generate([request], sampling)
    return completions


def logits_are_divided_by_the_temperature(case: Case) -> None:
    """In the engine and in the trainer's own log-probs; and greedy divides by nothing."""
    given, expected = case["input"], case["expected"]
    token, tolerance = given["token"], {"rtol": 0, "atol": case["tolerance"]}
    model = bigram(torch.tensor(given["logits"]).expand(2, -1))
    request = Request([0], list(range(50)), list(range(50)))
    for temperature, logp in (
        (given["temperature"], expected["logp"]),
        (1.0, expected["value_if_not_applied"]),
        (0.0, expected["value_if_not_applied"]),
    ):
        found = answers(model, request, Sampling(1, temperature=temperature))
        drawn = [one.logprobs[0] for one in found if one.ids == [token]]
        assert drawn
        assert_close(torch.tensor(drawn), torch.full((len(drawn),), logp), **tolerance)
    ids = torch.tensor([[0, token]])
    scored = response_logprobs(
        model, ids, torch.ones_like(ids), ids, temperature=given["temperature"]
    )
    assert_close(scored.logprobs, torch.tensor([[expected["logp"]]]), **tolerance)


def every_stop_ends_a_completion(case: Case) -> None:
    given, expected = case["input"], case["expected"]
    tokenizer = SimpleNamespace(eos_token_id=given["tokenizer_eos"])
    for n, ids in enumerate(given["completions"]):
        # Left to itself, the model says just this.
        chain = [121, *ids]
        logits = torch.zeros(122, 122)
        logits[chain[:-1], ids] = 50.0
        model = bigram(logits)
        model.generation_config.eos_token_id = given["generation_eos"]
        stops = stop_token_ids(model, tokenizer)
        assert set(stops) == {given["tokenizer_eos"], *given["generation_eos"]}
        request = Request(chain[:1], [0], [0])
        [one] = answers(model, request, Sampling(len(ids), stop_token_ids=stops))
        assert one.ids == [
            token for token, kept in zip(ids, expected["mask"][n], strict=True) if kept
        ]
        assert len(one.ids) == expected["lengths"][n]
        assert (one.finish_reason == "length") == expected["truncated"][n]


GENERATION_CASES: dict[str, Callable[[Case], None]] = {
    "BC11": logits_are_divided_by_the_temperature,
    "BC20": every_stop_ends_a_completion,
}
