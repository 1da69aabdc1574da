import logging

import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig

from lit_align.logprobs import eval_mode
from lit_align.rollout import Sampling
from lit_align.rollout import sharing as sharing_module
from lit_align.rollout.cached import start_cached
from lit_align.rollout.forward import Forward
from lit_align.rollout.shared import Branches, Prompts
from lit_align.rollout.sharing import sharing


def found_out(policy):
    return sharing(policy, Forward(policy))


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", "mistral"])
def test_models_that_attend_to_everything_share(build, family):
    assert found_out(build(family)).obstacle is None


@pytest.mark.parametrize(
    ("family", "reason"), [("gemma2", "goes by softcap"), ("lfm2", "convolutions")]
)
def test_models_that_do_more_than_attend_do_not_and_say_so_once(build, caplog, family, reason):
    policy = build(family)
    with caplog.at_level(logging.INFO):
        assert reason in found_out(policy).obstacle
        found_out(policy)
    said = [r for r in caplog.records if r.name == sharing_module.__name__]
    assert [reason in record.getMessage() for record in said] == [True]


def test_attention_sinks_are_no_part_of_a_shared_prompt():
    config = GptOssConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        pad_token_id=0,
        eos_token_id=2,
    )
    assert "s_aux" in found_out(AutoModelForCausalLM.from_config(config)).obstacle


def test_rows_longer_than_a_window_do_not_share(build):
    found = found_out(build("mistral"))
    assert found.window == 16
    assert found.start(16) is Prompts
    assert found.start(17) is start_cached


def test_rows_of_a_window_share_and_longer_ones_come_out_right(build, engine, requests_for):
    policy = build("mistral")
    widths = []
    policy.get_input_embeddings().register_forward_pre_hook(
        lambda _, inputs: widths.append(inputs[0].shape[0])
    )
    requests = requests_for([[5, 6, 7], [9, 10, 11]], 2)
    engine(policy).generate(requests, Sampling(13))
    widths.clear()
    short = engine(policy).generate(requests, Sampling(13))
    assert widths[0] == 1, "the prompts were not one sequence"
    widths.clear()
    long = engine(policy).generate(requests, Sampling(14))
    assert widths[0] == 2, "the prompts were one sequence"
    for before, after in zip(short, long, strict=True):
        assert [one.ids for one in before] == [one.ids[:13] for one in after]


def test_an_attention_that_comes_out_otherwise_is_found_by_trial(build, monkeypatch):
    attend = Branches.attend
    monkeypatch.setattr(Branches, "attend", lambda *given: 1.01 * attend(*given))
    assert "logits differ by" in found_out(build("llama")).obstacle


def test_the_trial_leaves_attention_and_modes_as_they_were(build):
    policy = build("llama").train()
    before = policy.config._attn_implementation
    found_out(policy)
    assert policy.config._attn_implementation.removesuffix("_in_segments") == before
    assert policy.training
    with torch.no_grad(), eval_mode(policy):
        assert policy(torch.tensor([[5, 6]])).logits.isfinite().all()
