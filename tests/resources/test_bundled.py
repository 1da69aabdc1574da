"""The files as they ship: read from the package's folder, not made anew."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import TemplateError
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_align.resources import resource
from lit_align.resources.arithmetic import held_out_sums, training_sums

TINY = resource("tiny")
TOKENIZER = AutoTokenizer.from_pretrained(TINY)
CHAT = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": "12 + 34 ="},
    {"role": "assistant", "content": "46"},
]
PARTS = ["train", "val"]
# UTF-8 has no surrogates, and a special token in a text is read as that token.
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


def pairs(part):
    lines = resource(f"arithmetic/{part}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def questions(part):
    return [row["prompt"][0]["content"] for row in pairs(part)]


def test_a_resource_that_does_not_ship_names_those_that_do():
    with pytest.raises(FileNotFoundError, match=r"'large'.*'arithmetic'.*'tiny'"):
        resource("large")


@pytest.mark.parametrize(("part", "rows"), [("train", 3200), ("val", 500)])
def test_each_part_asks_every_question_once(part, rows):
    assert len(set(questions(part))) == len(questions(part)) == rows


def test_the_parts_follow_the_split():
    assert set(questions("train")) <= {q.prompt for q in training_sums()}
    assert set(questions("val")) <= {q.prompt for q in held_out_sums()}


@pytest.mark.parametrize("part", PARTS)
def test_chosen_is_the_sum_and_rejected_another_number(part):
    for row in pairs(part):
        a, plus, b, equals = row["prompt"][0]["content"].split()
        assert (plus, equals) == ("+", "=")
        assert row["chosen"][0]["content"] == str(int(a) + int(b))
        assert row["rejected"][0]["content"].isdigit()
        assert row["rejected"][0]["content"] != row["chosen"][0]["content"]


@pytest.mark.parametrize("part", PARTS)
def test_each_row_is_one_question_and_two_answers(part):
    for row in pairs(part):
        assert row.keys() == {"prompt", "chosen", "rejected", "margin"}
        roles = {field: [message["role"] for message in row[field]] for field in list(row)[:3]}
        expected = {"prompt": ["user"], "chosen": ["assistant"], "rejected": ["assistant"]}
        assert roles == expected


@pytest.mark.parametrize("part", PARTS)
def test_a_margin_is_1_and_how_far_the_wrong_sum_is_off(part):
    for row in pairs(part):
        right, wrong = (int(row[side][0]["content"]) for side in ("chosen", "rejected"))
        assert row["margin"] == 1 + abs(right - wrong)


@given(TEXTS)
def test_any_text_survives_the_tokenizer(text):
    ids = TOKENIZER(text, add_special_tokens=False).input_ids
    assert TOKENIZER.decode(ids) == text
    assert len(ids) == len(text.encode())


@given(TEXTS)
def test_plain_text_gets_one_bos(text):
    ids = TOKENIZER(text).input_ids
    assert ids == [TOKENIZER.bos_token_id, *TOKENIZER(text, add_special_tokens=False).input_ids]


def test_numbers_are_read_digit_by_digit():
    assert TOKENIZER.tokenize("198") == ["1", "9", "8"]


def test_the_end_is_not_the_padding():
    special = [TOKENIZER.bos_token_id, TOKENIZER.eos_token_id, TOKENIZER.pad_token_id]
    assert len(set(special)) == 3
    assert TOKENIZER.eos_token == "<|end|>"


def test_a_chat_renders_as_one_line_of_roles():
    text = TOKENIZER.apply_chat_template(CHAT, tokenize=False)
    expected = "<bos><|system|>Add.<|end|><|user|>12 + 34 =<|end|><|assistant|>46<|end|>"
    assert text == expected


def test_a_prompt_is_the_beginning_of_its_chat():
    prompt = TOKENIZER.apply_chat_template(CHAT[:2], add_generation_prompt=True, return_dict=False)
    chat = TOKENIZER.apply_chat_template(CHAT, return_dict=False)
    assert chat[: len(prompt)] == prompt
    assert TOKENIZER.decode(chat[len(prompt) :]) == "46<|end|>"
    assert chat.count(TOKENIZER.bos_token_id) == 1


def test_the_template_marks_what_the_assistant_says():
    chat = TOKENIZER.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    said = [
        token
        for token, mask in zip(chat["input_ids"], chat["assistant_masks"], strict=True)
        if mask
    ]
    assert TOKENIZER.decode(said) == "46<|end|>"


def test_the_template_names_a_role_it_does_not_know():
    with pytest.raises(TemplateError, match="unknown role 'narrator': use system, user"):
        TOKENIZER.apply_chat_template([{"role": "narrator", "content": "Once"}], tokenize=False)


def test_the_model_is_small_and_agrees_with_its_tokenizer(model):
    assert model.num_parameters() < 1_000_000
    assert (TINY / "model.safetensors").stat().st_size < 2_000_000
    assert model.config.model_type == "llama"
    assert model.config.vocab_size == len(TOKENIZER)
    for config in (model.config, model.generation_config):
        ids = (config.bos_token_id, config.eos_token_id, config.pad_token_id)
        assert ids == (TOKENIZER.bos_token_id, TOKENIZER.eos_token_id, TOKENIZER.pad_token_id)


def answers(model, sums, **settings):
    """The model's answers, by transformers' own generation."""
    chats = [[{"role": "user", "content": question.prompt}] for question in sums]
    inputs = TOKENIZER.apply_chat_template(
        chats,
        add_generation_prompt=True,
        padding=True,
        tokenizer_kwargs={"padding_side": "left"},
        return_dict=True,
        return_tensors="pt",
    )
    output = model.generate(**inputs, max_new_tokens=5, **settings)
    return TOKENIZER.batch_decode(
        output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    )


def test_the_model_gets_about_half_of_the_held_out_sums_right(model):
    sums = held_out_sums()[::5][:200]
    given = answers(model, sums, do_sample=False)
    right = [answer == question.answer for answer, question in zip(given, sums, strict=True)]
    assert len(right) == 200
    assert 0.4 < sum(right) / len(right) < 0.65


def test_a_sample_is_right_often_enough_to_learn_from_rewards(model):
    # At less than 0.2, eight samples would often hold no right answer.
    torch.manual_seed(0)
    sums = held_out_sums()[::5][:200]
    given = answers(model, sums, do_sample=True, temperature=1.0, top_k=0)
    right = [answer == question.answer for answer, question in zip(given, sums, strict=True)]
    assert 0.2 < sum(right) / len(right) < 0.5
