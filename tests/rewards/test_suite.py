"""The suite: what functions are given, what their answers count for, and how failures end."""

import asyncio
import copy
import functools
import logging
import math
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from reward_functions import (
    Longer,
    computing,
    crashing,
    ending,
    hanging,
    infinite,
    leaving,
    lengths,
    own_pid,
    raising,
    slow_lengths,
    wordy,
)

from lit_align.errors import UserError
from lit_align.rewards import RewardSuite, exact_match, in_process

PROMPTS = ["1 + 1 =", "1 + 2 =", "2 + 2 =", "2 + 3 ="]
COMPLETIONS = ["2", "4", "4", "five"]
IDS = [[7], [8], [8], [1, 2, 3, 4]]
COLUMNS = {"answer": ["2", "3", "4", "5"], "level": [1, 1, 2, 2]}


def scored(function, **options):
    """Scores of one function over the four completions."""
    suite = RewardSuite({"mine": function}, **options)
    try:
        return suite.score(PROMPTS, COMPLETIONS, IDS, COLUMNS)
    finally:
        suite.close()


def marks(function, **options):
    return scored(function, **options).by_name["mine"]


def alive(pid):
    """Whether a process is there: it runs, or it has ended and its parent has not looked."""
    return Path(f"/proc/{pid}").exists()


def gone(pid, *, orphan=False):
    """Whether a process ends within seconds; who looks after an orphan is not ours to test."""
    end = time.monotonic() + 5
    while time.monotonic() < end:
        if not alive(pid) or (orphan and "State:\tZ" in Path(f"/proc/{pid}/status").read_text()):
            return True
        time.sleep(0.01)
    return False


# What functions are given.


def test_a_function_gets_the_columns_it_names_and_no_others():
    def by_name(completion_ids, level):
        return [len(ids) * of for ids, of in zip(completion_ids, level, strict=True)]

    assert marks(by_name) == [1, 1, 2, 8]


def test_a_function_of_trl_gets_everything():
    def accuracy(prompts, completions, completion_ids, **kwargs):
        assert sorted(kwargs) == ["answer", "level"]
        assert (prompts, completion_ids) == (PROMPTS, IDS)
        return [float(a == b) for a, b in zip(completions, kwargs["answer"], strict=True)]

    assert marks(accuracy) == [1, 0, 1, 0]


def test_a_column_that_is_missing_is_named():
    def solved(completions, solution):
        return [0.0] * len(completions)

    with pytest.raises(UserError, match=r"solved takes 'solution'.*answer.*level"):
        scored(solved, on_error="zero")


def test_a_default_stands_in_for_a_missing_column():
    assert marks(lambda completions, solution=7: [solution] * len(completions)) == [7, 7, 7, 7]


def test_what_a_partial_has_set_is_not_taken_from_the_data():
    def levels(completions, level):
        return [level] * len(completions)

    assert marks(functools.partial(levels, level=9)) == [9, 9, 9, 9]


def test_conversations_come_as_messages():
    suite = RewardSuite({"roles": lambda completions: [len(c[0]["role"]) for c in completions]})
    message = [{"role": "assistant", "content": "2"}]
    assert suite.score([message], [message], [[1]], {}).total == [9]


# What can be a reward function.


@pytest.mark.parametrize(
    "function",
    [
        lengths,
        slow_lengths,
        functools.partial(lengths),
        lambda completions: (len(completion) for completion in completions),
        lambda completions: np.array([len(completion) for completion in completions]),
        lambda completions: torch.tensor([len(completion) for completion in completions]),
    ],
    ids=["function", "async", "partial", "lambda", "numpy", "torch"],
)
def test_every_kind_of_function_scores(function):
    result = marks(function)
    assert result == [1, 1, 1, 4]
    assert {type(mark) for mark in result} == {float}


def test_objects_and_methods_score():
    assert marks(Longer(3)) == [0, 0, 0, 1]
    assert marks(Longer(3).method) == [0, 0, 0, 1]


def test_a_closure_takes_along_what_it_refers_to():
    bonus = {"2": 0.5}

    def helper(completion):
        return bonus.get(completion, 0)

    assert marks(lambda completions: [helper(completion) for completion in completions]) == [
        *(0.5, 0, 0, 0)
    ]


def test_a_function_of_a_module_that_a_worker_cannot_import_goes_as_code(tmp_path, monkeypatch):
    (tmp_path / "elsewhere.py").write_text(
        "def helper(text):\n    return len(text)\n"
        "def mine(completions):\n    return [helper(text) for text in completions]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import elsewhere

    monkeypatch.undo()
    assert str(tmp_path) not in sys.path
    assert marks(elsewhere.mine) == [1, 1, 1, 4]


def test_functions_of_the_script_that_was_started_do_not_start_it_again(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
            from lit_align.rewards import RewardSuite
            print("once")
            def mine(completions):
                print("from a reward")
                return [len(completion) for completion in completions]
            suite = RewardSuite({"mine": mine})
            print(suite.score(["a"], ["bcd"], [[1]], {}).total)
        """)
    )
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert run.stdout == "once\n[3.0]\n"
    assert run.stderr == "from a reward\n"


def test_what_cannot_be_pickled_is_told_of_in_process():
    import threading

    lock = threading.Lock()

    def locked(completions):
        with lock:
            return lengths(completions)

    with pytest.raises(UserError, match=r"'mine' \(locked\) cannot be pickled.*in_process"):
        scored(locked, on_error="zero")
    assert marks(in_process(locked)) == [1, 1, 1, 4]


def test_a_function_in_process_sees_and_changes_this_process():
    seen = []

    def mine(completions):
        seen.append(os.getpid())
        return lengths(completions)

    assert marks(in_process(mine)) == [1, 1, 1, 4]
    assert seen == [os.getpid()]
    assert marks(mine) == [1, 1, 1, 4]
    assert len(seen) == 1, "the worker has a list of its own"


def test_an_async_function_in_process_works_inside_a_running_loop():
    async def notebook():
        return marks(in_process(slow_lengths))

    assert asyncio.run(notebook()) == [1, 1, 1, 4]


# What scores count for.


def test_the_total_is_the_weighted_sum_by_hand():
    suite = RewardSuite(
        {"right": exact_match, "short": lambda completion_ids: [-len(i) for i in completion_ids]},
        weights={"short": 0.25},
    )
    scores = suite.score(PROMPTS, COMPLETIONS, IDS, COLUMNS)
    assert scores.by_name == {"right": [1, 0, 1, 0], "short": [-1, -1, -1, -4]}
    assert scores.total == [0.75, -0.25, 0.75, -1.0]
    assert scores.failures == {"right": 0, "short": 0}


def test_none_and_nan_are_left_out_of_the_sum():
    suite = RewardSuite(
        {
            "a": lambda completions: [1.0, None, math.nan, None],
            "b": lambda completions: [2.0, 2.0, None, math.nan],
        }
    )
    scores = suite.score(PROMPTS, COMPLETIONS, IDS, COLUMNS)
    assert scores.by_name["a"] == [1.0, None, None, None]
    assert scores.total == [3.0, 2.0, None, None]
    assert scores.failures == {"a": 0, "b": 0}


def test_weight_0_measures_and_does_not_count():
    suite = RewardSuite({"mine": lengths}, weights={"mine": 0})
    scores = suite.score(PROMPTS, COMPLETIONS, IDS, COLUMNS)
    assert scores.by_name["mine"] == [1, 1, 1, 4]
    assert scores.total == [None] * 4


def test_no_completions_no_calls():
    suite = RewardSuite({"mine": lambda completions: 1 / 0})
    scores = suite.score([], [], [], {"answer": []})
    assert (scores.total, scores.by_name, scores.failures) == ([], {"mine": []}, {"mine": 0})


# Failures.


FAILURES = {
    raising: r"raised KeyError: 'five' \(reward_functions.py, line \d+\)",
    hanging: "took longer than 0.6 s",
    computing: "took longer than 0.6 s",
    ending: r"ended its process \(exit code 3\)",
    crashing: r"ended its process \(SIGSEGV\)",
    leaving: "raised SystemExit: bye",
    infinite: "gave the score inf",
    wordy: "gave the score '0.5'",
}


@pytest.mark.parametrize("function", FAILURES, ids=lambda function: function.__name__)
def test_a_failure_raises_with_name_cause_and_remedy(function):
    with pytest.raises(UserError, match=FAILURES[function]) as caught:
        scored(function, timeout=0.6)
    assert f"reward 'mine' ({function.__name__})" in str(caught.value)
    assert "on_error=zero" in str(caught.value)


@pytest.mark.parametrize("function", FAILURES, ids=lambda function: function.__name__)
def test_only_the_completion_to_blame_loses_its_score(function):
    scores = scored(function, on_error="skip", timeout=0.6)
    assert all(mark is not None and mark > 0 for mark in scores.by_name["mine"][:3])
    assert scores.by_name["mine"][3] is None
    assert scores.total[3] is None
    assert scores.failures == {"mine": 1}


def test_a_failed_completion_can_count_as_0():
    scores = scored(raising, on_error="zero")
    assert scores.by_name == {"mine": [1.0, 0.5, 0.5, 0.0]}
    assert scores.total[3] == 0.0
    assert scores.failures == {"mine": 1}


@pytest.mark.parametrize("returned", [[1.0], [1.0] * 5, [], 1.0, None, "1111", {0: 1.0}])
def test_the_wrong_length_raises_and_never_counts_for_a_part(returned):
    what = "returned .*, not a list"
    if isinstance(returned, list):
        what = rf"returned a list of the wrong length \(4 expected, {len(returned)} returned\)"
    with pytest.raises(UserError, match=rf"'mine' \(<lambda>\) {what}"):
        scored(lambda completions: returned)
    scores = scored(lambda completions: returned, on_error="skip")
    assert scores.by_name == {"mine": [None] * 4}
    assert scores.failures == {"mine": 4}


def test_a_mistake_of_the_setup_is_never_counted_away():
    with pytest.raises(UserError, match=r"'mine' \(exact_match\).*no column 'solution'.*answer"):
        scored(functools.partial(exact_match, column="solution"), on_error="zero")


def test_failures_are_told_once(caplog):
    with caplog.at_level(logging.WARNING, "lit_align.rewards"):
        scored(raising, on_error="zero")
    assert len(caplog.messages) == 1
    assert "'mine' (raising) raised KeyError" in caplog.text


@pytest.mark.parametrize("timeout", [0.3, 0.8])
def test_the_deadline_holds_within_a_second(timeout):
    start = time.monotonic()
    with pytest.raises(UserError, match="took longer"):
        scored(lambda completions: time.sleep(60), timeout=timeout)
    assert timeout < time.monotonic() - start < timeout + 1


def test_the_suite_recovers_after_every_failure():
    def mine(completions, how):
        if how[0] == "hang":
            time.sleep(60)
        if how[0] == "die":
            os._exit(1)
        if how[0] == "raise":
            raise RuntimeError
        return lengths(completions)

    suite = RewardSuite({"mine": mine}, on_error="zero", timeout=0.4)
    for how in ("hang", "fine", "die", "fine", "raise", "fine"):
        scores = suite.score(["a"], ["abc"], [[1]], {"how": [how]})
        assert scores.total == [3.0 if how == "fine" else 0.0]


# Processes.


def test_any_thread_may_score():
    suite = RewardSuite({"mine": raising}, on_error="skip", workers=2)
    with ThreadPoolExecutor(4) as threads:
        futures = [
            threads.submit(suite.score, PROMPTS, COMPLETIONS, IDS, COLUMNS) for _ in range(8)
        ]
        assert {tuple(future.result().total) for future in futures} == {(1.0, 0.5, 0.5, None)}


def test_workers_run_functions_at_once():
    def nap(completions):
        time.sleep(0.5)
        return lengths(completions)

    suite = RewardSuite(dict.fromkeys("abc", nap), workers=3)
    suite.score(PROMPTS, COMPLETIONS, IDS, COLUMNS)
    start = time.monotonic()
    scores = suite.score(PROMPTS, COMPLETIONS, IDS, COLUMNS)
    assert time.monotonic() - start < 1.2
    assert list(scores.by_name) == ["a", "b", "c"]


def test_a_worker_is_kept_from_batch_to_batch():
    suite = RewardSuite({"mine": own_pid})
    pids = [suite.score(["a"], ["b"], [[1]], {}).total for _ in range(3)]
    assert pids[0] == pids[1] == pids[2] != [os.getpid()]


def test_a_worker_that_was_killed_between_batches_is_replaced():
    suite = RewardSuite({"mine": own_pid})
    [pid] = suite.score(["a"], ["b"], [[1]], {}).total
    os.kill(int(pid), signal.SIGKILL)
    os.waitid(os.P_PID, int(pid), os.WEXITED | os.WNOWAIT)
    [other] = suite.score(["a"], ["b"], [[1]], {}).total
    assert other != pid
    assert gone(int(pid))


def test_two_suites_do_not_disturb_each_other():
    one, two = (RewardSuite({"mine": own_pid}) for _ in range(2))
    [first], [second] = (suite.score(["a"], ["b"], [[1]], {}).total for suite in (one, two))
    assert first != second
    one.close()
    assert gone(int(first))
    assert two.score(["a"], ["b"], [[1]], {}).total == [second]


def test_closed_suites_score_again():
    suite = RewardSuite({"mine": own_pid})
    [first] = suite.score(["a"], ["b"], [[1]], {}).total
    suite.close()
    suite.close()
    [second] = suite.score(["a"], ["b"], [[1]], {}).total
    assert first != second


def test_a_forgotten_suite_leaves_no_process():
    suite = RewardSuite({"mine": own_pid})
    [pid] = suite.score(["a"], ["b"], [[1]], {}).total
    assert alive(int(pid))
    del suite
    assert gone(int(pid))


def test_what_a_function_started_dies_with_it(tmp_path):
    def mine(completions):
        child = subprocess.Popen(["sleep", "60"])
        (tmp_path / "pid").write_text(str(child.pid))
        time.sleep(60)

    with pytest.raises(UserError, match="took longer"):
        scored(mine, timeout=0.5)
    assert gone(int((tmp_path / "pid").read_text()), orphan=True)


@pytest.mark.parametrize("busy", ["time.sleep(60)", "pass"])
def test_a_killed_trainer_leaves_no_worker(tmp_path, busy):
    script = textwrap.dedent(f"""
        import os, sys, time
        from lit_align.rewards import RewardSuite
        def mine(completions):
            print(os.getpid(), flush=True)
            {busy}
            return [0] * len(completions)
        suite = RewardSuite({{"mine": mine}})  # kept: its end is that of its workers
        suite.score(["a"], ["b"], [[1]], {{}})
        time.sleep(60)
    """)
    trainer = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    with trainer:
        pid = int(trainer.stderr.readline())
        assert alive(pid)
        trainer.kill()
    assert gone(pid, orphan=True)


def test_the_end_of_the_trainer_is_the_end_of_its_workers():
    script = textwrap.dedent("""
        import os
        from lit_align.rewards import RewardSuite
        suite = RewardSuite({"mine": lambda completions: [os.getpid()]})
        print(int(suite.score(["a"], ["b"], [[1]], {}).total[0]))
    """)
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=True
    )
    assert run.stderr == ""
    assert gone(int(run.stdout), orphan=True)


def test_what_functions_print_and_read_does_not_disturb_the_talk(capfd):
    def mine(completions):
        sys.stdout.write("noise " * 20_000)
        os.write(1, b"raw noise")
        os.system("echo a child")
        assert sys.stdin.read() == ""
        return lengths(completions)

    assert marks(mine) == [1, 1, 1, 4]
    out, err = capfd.readouterr()
    assert out == ""
    assert "raw noise" in err
    assert "a child" in err


def test_what_a_function_printed_before_it_hung_is_not_lost(capfd, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)

    def mine(completions):
        sys.stdout.write("here it hangs\n")
        time.sleep(60)

    with pytest.raises(UserError, match="took longer"):
        scored(mine, timeout=0.3)
    assert "here it hangs" in capfd.readouterr().err


def test_workers_see_no_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    suite = RewardSuite({"mine": lambda completions: [os.environ["CUDA_VISIBLE_DEVICES"] == ""]})
    assert suite.score(["a"], ["b"], [[1]], {}).total == [1.0]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"


def test_workers_do_not_import_torch():
    code = "import sys, lit_align.rewards.worker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_copies_have_workers_of_their_own():
    suite = RewardSuite({"mine": own_pid}, timeout=7)
    [pid] = suite.score(["a"], ["b"], [[1]], {}).total
    for other in (
        copy.deepcopy(suite),
        pickle.loads(pickle.dumps(RewardSuite({"e": exact_match}))),
    ):
        assert other.timeout in {7, 30}
        if "mine" in other.functions:
            assert other.score(["a"], ["b"], [[1]], {}).total != [pid]
    assert suite.score(["a"], ["b"], [[1]], {}).total == [pid]


def test_ctrl_c_during_a_call_ends_the_worker_and_the_next_call_is_right():
    script = textwrap.dedent("""
        import os, signal, threading, time
        from lit_align.rewards import RewardSuite
        def mine(completions):
            time.sleep(float(completions[0]))
            return [float(completion) for completion in completions]
        # Where this runs in the background, a shell has told its children to ignore Ctrl-C.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        suite = RewardSuite({"mine": mine})
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        try:
            suite.score(["a"], ["20"], [[1]], {})
        except KeyboardInterrupt:
            print(suite.score(["a"], ["0.25"], [[1]], {}).total)
    """)
    start = time.monotonic()
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout == "[0.25]\n"
    assert time.monotonic() - start < 5


# What is refused.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"functions": {}}, "at least one"),
        ({"functions": {"mine": None}}, "'mine' is None, which cannot be called"),
        ({"weights": {"other": 1}}, "'other', which is no reward: there are mine"),
        ({"weights": {"mine": math.inf}}, "weight of reward 'mine'"),
        ({"on_error": "ignore"}, "raise, zero or skip, not 'ignore'"),
        ({"timeout": 0}, "timeout"),
        ({"workers": 0}, "workers"),
    ],
)
def test_a_suite_that_makes_no_sense_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        RewardSuite(**{"functions": {"mine": lengths}, **options})


def test_columns_of_another_length_are_named():
    suite = RewardSuite({"mine": lengths})
    with pytest.raises(UserError, match="2 completions, but 1 entries of 'answer'"):
        suite.score(["a", "b"], ["1", "2"], [[1], [2]], {"answer": ["1"]})
