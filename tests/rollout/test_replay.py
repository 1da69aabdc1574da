import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_align.errors import UserError
from lit_align.rollout import Completion, Engine, ReplayEngine, Request, Sampling


def line(prompt=(5, 6), sample=0, ids=(7, 2), version=0, **fields):
    """One completion as the rollout log writes it."""
    return {
        "number": 0,
        "version": version,
        "group": 3,
        "row": 4,
        "sample": sample,
        "prompt": "2 + 2 =",
        "completion": "4",
        "prompt_ids": list(prompt),
        "completion_ids": list(ids),
        "finish_reason": "stop",
        "logprobs": [-0.5] * len(ids),
        "rewards": {"exact": 1.0},
        "reward": 1.0,
        "advantage": 0.25,
        **fields,
    }


@pytest.fixture
def record(tmp_path):
    """A function from lines to a file that holds them."""

    def record(*lines, name="rollouts.jsonl"):
        path = tmp_path / name
        path.write_text("\n".join(map(json.dumps, lines)) + "\n")
        return path

    return record


def ask(prompt, *samples):
    return Request(list(prompt), list(samples), [0] * len(samples))


def answer(path, *requests, version=None, **sampling):
    engine: Engine = ReplayEngine(path)
    if version is not None:
        engine.sync_weights(version, None)
    return engine.generate(list(requests), Sampling(**sampling))


def test_a_completion_is_given_as_it_was_recorded(record):
    cut = line(sample=1, ids=[8, 9, 9], finish_reason="length", logprobs=None)
    path = record(line(logprobs=[-0.25, -1.5]), cut, line(prompt=[5], ids=[1]))
    found = answer(path, ask([5], 0), ask([5, 6], 1, 0))
    assert found == [
        [Completion([1], [-0.5], "stop")],
        [Completion([8, 9, 9], None, "length"), Completion([7, 2], [-0.25, -1.5], "stop")],
    ]


def test_the_order_of_lines_and_of_questions_does_not_matter(record):
    lines = [line(sample=sample, ids=[10 + sample]) for sample in range(4)]
    forwards, backwards = record(*lines), record(*lines[::-1], name="backwards.jsonl")
    for path in (forwards, backwards):
        engine = ReplayEngine(path)
        for _ in range(2):
            [group] = engine.generate([ask([5, 6], 3, 0, 2)], Sampling())
            assert [one.ids for one in group] == [[13], [10], [12]]


def test_sampling_is_not_heeded(record):
    path = record(line())
    plain = answer(path, ask([5, 6], 0))
    assert answer(path, ask([5, 6], 0), temperature=0.1, top_k=1, stop_token_ids=[7]) == plain


@pytest.mark.parametrize(
    ("version", "expected"), [(None, 11), (0, 11), (2, 12), (3, 12), (4, 14), (9, 14)]
)
def test_the_newest_recording_that_is_not_newer_than_the_weights_answers(record, version, expected):
    path = record(*(line(version=n, ids=[10 + n]) for n in (4, 1, 2)))
    [[one]] = answer(path, ask([5, 6], 0), version=version)
    assert one.ids == [expected]


def test_what_a_resumed_run_wrote_again_does_not_matter(record):
    path = record(line(ids=[7]), line(ids=[8]))
    assert answer(path, ask([5, 6], 0))[0][0].ids == [7]


def test_all_files_of_a_folder_are_read(record, tmp_path):
    record(line(prompt=[1], ids=[11]), name="a.jsonl")
    record(line(prompt=[2], ids=[12]), name="b.jsonl")
    (tmp_path / "notes.txt").write_text("not a recording")
    found = answer(tmp_path, ask([2], 0), ask([1], 0))
    assert [group[0].ids for group in found] == [[12], [11]]


def test_nothing_but_what_is_read_needs_to_be_there(record):
    bare = {"prompt_ids": [5], "completion_ids": [6], "sample": 0, "finish_reason": "stop"}
    assert answer(record(bare), ask([5], 0)) == [[Completion([6], None, "stop")]]


def test_a_prompt_that_was_not_recorded_is_named_with_the_file(record):
    path = record(line())
    with pytest.raises(UserError, match=r"rollouts\.jsonl.* prompt of 2 tokens, \[5, 7\]; record"):
        answer(path, ask([5, 6], 0), ask([5, 7], 0))


def test_all_prompts_that_lack_something_are_counted_in_one_error(record):
    with pytest.raises(UserError, match="and 2 more prompts"):
        answer(record(line()), ask([1], 0), ask([2], 0), ask([5, 6], 0), ask([3], 0))


def test_too_few_completions_are_named_with_file_and_prompt(record):
    path = record(line(sample=0), line(sample=1))
    with pytest.raises(UserError, match=r"rollouts\.jsonl: 2 completions.*'2 \+ 2 ='.*sample 2, 3"):
        answer(path, ask([5, 6], 0, 1, 2, 3))


def test_a_completion_longer_than_the_bound_is_refused(record):
    path = record(line(prompt=[1]), line(ids=[7, 8, 9]))
    assert answer(path, ask([5, 6], 0), max_new_tokens=3)
    with pytest.raises(UserError, match=r"line 2: .*3 tokens.*raise max_new_tokens \(now 2\)"):
        answer(path, ask([5, 6], 0), max_new_tokens=2)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{not json", "it is not JSON"),
        ("[1]", "must be an object"),
        (json.dumps(line(prompt_ids=None)), "there is no 'prompt_ids'"),
        (json.dumps(line(prompt_ids=[])), "'prompt_ids' must be a list of token ids"),
        (json.dumps(line(prompt_ids="56")), "'prompt_ids' must be a list of token ids"),
        (json.dumps(line(completion_ids=[1.5])), "'completion_ids' must be a list of token ids"),
        (json.dumps(line(completion_ids=[])), "'completion_ids' must be a list of token ids"),
        (json.dumps(line(sample=-2)), "'sample' must be a whole number"),
        (json.dumps(line(sample=True)), "'sample' must be a whole number"),
        (json.dumps(line(finish_reason="eos")), "'finish_reason' must be 'stop' or 'length'"),
        (json.dumps(line(finish_reason=[])), "'finish_reason' must be 'stop' or 'length'"),
        (json.dumps(line(logprobs=[-0.5])), "1 'logprobs' for 2 tokens"),
        (json.dumps(line(logprobs=[-0.5, float("nan")])), "'logprobs' must be a list of finite"),
        (json.dumps(line(logprobs=[-0.5, 0.5])), "'logprobs' must be a list of finite"),
        (json.dumps(line(version="new")), "'version' must be a whole number"),
    ],
)
def test_a_broken_line_is_named_with_its_file(tmp_path, text, complaint):
    path = tmp_path / "broken.jsonl"
    path.write_text(f"{json.dumps(line())}\n\n{text}\n")
    with pytest.raises(UserError, match=rf"broken\.jsonl, line 3: .*{complaint}"):
        ReplayEngine(path)


@given(st.binary(max_size=40))
def test_whatever_a_line_holds_the_error_is_ours(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"any\.jsonl"):
        ReplayEngine(path)


def test_a_path_with_nothing_to_read_is_refused(tmp_path, record):
    with pytest.raises(UserError, match="there is no file or folder"):
        ReplayEngine(tmp_path / "absent.jsonl")
    with pytest.raises(UserError, match=r"holds no \.jsonl file"):
        ReplayEngine(tmp_path)
    with pytest.raises(UserError, match="no recorded completion"):
        ReplayEngine(record(name="empty.jsonl"))


def test_it_says_that_its_log_probs_are_not_the_policys(record):
    engine = ReplayEngine(record(line()))
    assert not engine.in_process
    assert engine.version is None
    engine.sync_weights(3, None)
    engine.load_state_dict(engine.state_dict())
    assert engine.version == 3
    engine.close()


def test_the_greedy_completion_has_a_number_of_its_own(record):
    path = record(line(sample=0), line(sample=-1, ids=[9, 2]))
    assert answer(path, ask([5, 6], -1))[0][0].ids == [9, 2]
    with pytest.raises(UserError, match=r"none of them is sample -1 \(the greedy one"):
        answer(record(line(sample=0)), ask([5, 6], -1))
    with pytest.raises(UserError, match="'sample' must be a whole number >= 0, or -1 for the gr"):
        ReplayEngine(record(line(sample=-2)))
