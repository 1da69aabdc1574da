import json
import sys

import pytest
from small_tokenizers import char_level
from transformers import AutoTokenizer

from lit_align.data.prompts import open_prompts
from lit_align.data.tasks import (
    Arithmetic,
    HeldOutArithmetic,
    HeldOutReasoningGym,
    ReasoningGym,
)
from lit_align.errors import UserError
from lit_align.resources import resource
from lit_align.resources.arithmetic import Sum
from lit_align.resources.make_arithmetic import encode


def rows(task):
    return [row for _, row in task]


def questions(task):
    return [row["prompt"] for row in rows(task)]


# --- the bundled sums


def test_every_sum_is_asked_once_in_training_or_held_out():
    train, held_out = questions(Arithmetic()), questions(HeldOutArithmetic())
    every = [f"{a} + {b} =" for a in range(100) for b in range(100)]
    assert sorted(train + held_out) == sorted(every)
    assert len(train) == 8999


def test_no_held_out_sum_is_a_training_sum_read_backwards():
    backwards = {f"{b} + {a} =" for a, b in map(operands, questions(Arithmetic()))}
    assert not backwards & set(questions(HeldOutArithmetic()))


def operands(question):
    a, _, b, _ = question.split()
    return a, b


@pytest.mark.parametrize("task", [Arithmetic(), HeldOutArithmetic()])
def test_the_answer_is_the_sum(task):
    assert all(int(row["answer"]) == sum(map(int, operands(row["prompt"]))) for row in rows(task))


@pytest.mark.parametrize("task", [Arithmetic(), HeldOutArithmetic()])
def test_the_first_sums_stand_for_all(task):
    first = [int(operands(question)[0]) for question in questions(task)[:300]]
    # Uniform on 0..99 the mean of 300 is 49.5 +- 1.7; sorted it would be below 4.
    assert 43 < sum(first) / len(first) < 56
    assert rows(task) == rows(task)


def test_the_bundled_model_reads_what_it_was_made_with():
    tokenizer = AutoTokenizer.from_pretrained(resource("tiny"))
    prompt = open_prompts(Arithmetic(), tokenizer, max_rows=1)[0]
    question = Sum(*map(int, operands(prompt.prompt[0]["content"])))
    ids, labels = encode(tokenizer, [question])
    assert prompt.ids == ids[labels == -100].tolist()
    assert prompt.columns == {"answer": question.answer}


# --- reasoning-gym


@pytest.fixture
def gym():
    pytest.importorskip("reasoning_gym", exc_type=ImportError)


@pytest.mark.usefixtures("gym")
def test_a_row_is_an_item_of_the_task_with_all_that_its_scorer_reads():
    task = ReasoningGym("chain_sum", size=3, seed=5, config={"min_terms": 2, "max_terms": 2})
    from reasoning_gym import create_dataset, get_score_answer_fn

    items = list(create_dataset("chain_sum", size=3, seed=5, min_terms=2, max_terms=2))
    assert questions(task) == [item["question"] for item in items]
    for row, item in zip(rows(task), items, strict=True):
        assert row.keys() == {"prompt", "answer", "task", "entry"}
        assert (row["answer"], row["task"]) == (item["answer"], "chain_sum")
        score = get_score_answer_fn(row["task"])
        assert score(row["answer"], json.loads(row["entry"])) == 1.0


@pytest.mark.usefixtures("gym")
def test_rows_are_the_same_every_time_and_others_for_a_far_seed():
    task = ReasoningGym("leg_counting", size=4)
    assert rows(task) == rows(task) == rows(ReasoningGym("leg_counting", size=4))
    assert not set(questions(task)) & set(questions(ReasoningGym("leg_counting", size=4, seed=99)))


@pytest.mark.usefixtures("gym")
def test_held_out_questions_are_other_ones_and_all_different():
    # One digit and two terms: a few hundred questions, most of which occur in training.
    config = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    task = ReasoningGym("chain_sum", size=100, config=config)
    held_out = questions(HeldOutReasoningGym(task, size=30))
    assert len(set(held_out)) == len(held_out) == 30
    assert not set(held_out) & set(questions(task))


@pytest.mark.usefixtures("gym")
def test_a_task_too_small_to_hold_anything_out_is_named():
    config = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    task = ReasoningGym("chain_sum", size=5000, config=config)
    with pytest.raises(UserError, match=r"'chain_sum' occur in training: .*smaller than 5000"):
        questions(HeldOutReasoningGym(task, size=3))


@pytest.mark.usefixtures("gym")
def test_an_unknown_task_is_answered_with_those_like_it():
    with pytest.raises(UserError, match=r"no task 'chain_sums' .*chain_sum"):
        questions(ReasoningGym("chain_sums"))


@pytest.mark.usefixtures("gym")
@pytest.mark.parametrize("config", [{"minterms": 1}, {"min_terms": 0}, {"min_terms": "x"}])
def test_an_option_that_the_task_refuses_is_told(config):
    with pytest.raises(UserError, match=r"'chain_sum' refuses its options .*min_?terms.*: \S"):
        questions(ReasoningGym("chain_sum", config=config))


@pytest.mark.usefixtures("gym")
def test_questions_are_prompts_with_columns_for_the_scorer():
    prompts = open_prompts(ReasoningGym("chain_sum", size=3), char_level())
    assert [prompt.row for prompt in prompts] == [0, 1, 2]
    assert prompts[0].columns.keys() == {"answer", "task", "entry"}


def test_without_the_package_the_command_that_brings_it_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r"pip install 'lit-align\[gym\]'"):
        questions(ReasoningGym("chain_sum"))


def test_held_out_questions_of_a_file_are_refused():
    with pytest.raises(UserError, match=r"not of pairs.jsonl: .*data.val_path.*data=prompts"):
        questions(HeldOutReasoningGym("pairs.jsonl"))
