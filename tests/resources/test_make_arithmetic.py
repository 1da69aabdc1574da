import json

import pytest
import torch
from transformers import LlamaForCausalLM

from lit_align.resources import make_arithmetic as made
from lit_align.resources import resource
from lit_align.resources.arithmetic import Sum, held_out_sums

SUMS = [Sum(1, 2), Sum(12, 34), Sum(99, 99)]


@pytest.fixture(scope="module")
def tokenizer():
    return made.byte_tokenizer()


@pytest.fixture(scope="module")
def model():
    return LlamaForCausalLM.from_pretrained(resource("tiny"), dtype=torch.float32).eval()


def test_the_bundled_tokenizer_is_the_one_that_the_script_makes(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / name).read_text() == (resource("tiny") / name).read_text()


def test_only_the_answer_and_its_end_are_scored(tokenizer):
    ids, labels = made.encode(tokenizer, SUMS)
    scored = [tokenizer.decode(row[row != -100]) for row in labels]
    assert scored == ["3<|end|>", "46<|end|>", "198<|end|>"]
    assert (ids == labels)[labels != -100].all()


def test_exact_match_without_generation_agrees_with_generation(model, tokenizer):
    sums = held_out_sums()[:100]
    prompts = [made.prompt_text(tokenizer, question) for question in sums]
    inputs = tokenizer(
        prompts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt"
    )
    output = model.generate(
        input_ids=inputs.input_ids,
        attention_mask=inputs.attention_mask,
        max_new_tokens=5,
        do_sample=False,
    )
    texts = tokenizer.batch_decode(output[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    right = sum(text == question.answer for text, question in zip(texts, sums, strict=True))
    assert made.exact_match(model, *made.encode(tokenizer, sums)) == pytest.approx(right / 100)


def test_wrong_answers_are_wrong_and_one_to_a_sum(model, tokenizer):
    pairs = made.wrong_answers(model, tokenizer, held_out_sums(), wanted=20, seed=0)
    assert len({question for question, _ in pairs}) == len(pairs) == 20
    assert all(text.isdigit() and text != question.answer for question, text in pairs)


def test_batches_visit_every_row_of_an_epoch_once():
    stream = made.batches(10, 5, seed=0)
    first, second = ([next(stream), next(stream)] for _ in range(2))
    assert torch.cat(first).sort().values.tolist() == list(range(10))
    assert torch.cat(second).sort().values.tolist() == list(range(10))
    assert torch.cat(first).tolist() != torch.cat(second).tolist()


def test_written_pairs_are_conversations(tmp_path):
    made.write_pairs(tmp_path / "new" / "pairs.jsonl", [(Sum(12, 34), "47")])
    assert json.loads((tmp_path / "new" / "pairs.jsonl").read_text()) == {
        "prompt": [{"role": "user", "content": "12 + 34 ="}],
        "chosen": [{"role": "assistant", "content": "46"}],
        "rejected": [{"role": "assistant", "content": "47"}],
        "margin": 2,
    }
