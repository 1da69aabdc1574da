"""What the policy wrote: files that can be trained from, and a table that can be read."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from lightning import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_align.callbacks import RolloutLog
from lit_align.callbacks.rollout_table import rendered, rewards, shortened, telling
from lit_align.errors import UserError
from lit_align.rollout import ReplayEngine, Rollout, Sample


class Rollouts(Callback):
    """Keeps every rollout as training has it."""

    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if pl_module.rollout not in self.seen:
            self.seen.append(pl_module.rollout)


def read(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def files(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def weights(result):
    return torch.cat([p.detach().flatten() for p in result.module.policy.parameters()])


def test_a_file_holds_every_completion_of_a_rollout_as_it_was(act, tmp_path):
    kept = Rollouts()
    act(kept, RolloutLog(tmp_path / "log", rows=0))
    assert list(files(tmp_path / "log")) == [f"rollout-{n:06d}.jsonl" for n in range(4)]
    assert sum(len(rollout.left_out) for rollout in kept.seen) > 0
    for number, rollout in enumerate(kept.seen):
        rows = read(tmp_path / "log" / f"rollout-{number:06d}.jsonl")
        samples = rollout.samples + rollout.left_out
        assert len(rows) == len(samples) == 12, "3 prompts x 4 completions"
        for row, sample in zip(rows, samples, strict=True):
            assert row.pop("left_out", False) == (sample in rollout.left_out)
            assert row == {
                "number": number,
                "version": number,
                "group": sample.group,
                "row": sample.row,
                "sample": sample.number,
                "prompt": sample.prompt,
                "completion": sample.completion,
                "prompt_ids": sample.prompt_ids,
                "completion_ids": sample.completion_ids,
                "finish_reason": sample.finish_reason,
                "logprobs": sample.sampler_logprobs,
                "rewards": sample.rewards,
                "reward": sample.reward,
                "advantage": sample.advantage,
            }
    assert any(sample.advantage > 0 for rollout in kept.seen for sample in rollout.samples)


@pytest.mark.parametrize(
    "loss", [{}, {"correction": "tis"}, {"advantage": "remax"}], ids=["plain", "tis", "remax"]
)
def test_a_replay_of_the_files_trains_the_same_weights(act, tmp_path, loss):
    options = {"limit_val_batches": 1.0, "num_sanity_val_steps": -1, "data": {"num_iterations": 2}}
    first = act(RolloutLog(tmp_path / "log", rows=0), module={"loss": loss}, **options)

    def replayed():
        return act(module={"loss": loss, "engine": ReplayEngine(tmp_path / "log")}, **options)

    again = replayed()
    assert again.ended_by is None
    assert torch.equal(weights(again), weights(first))
    assert torch.equal(weights(replayed()), weights(first))
    for name, value in first.trainer.callback_metrics.items():
        assert value.equal(again.trainer.callback_metrics[name]), name
    # Were it not what is read, this would not show.
    path = tmp_path / "log" / "rollout-000001.jsonl"
    rows = read(path)
    for row in rows[::4]:
        row["completion_ids"] = row["completion_ids"][::-1]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert not torch.equal(weights(replayed()), weights(first))


def test_a_validation_is_written_with_the_step_it_came_after(act, tmp_path):
    result = act(
        RolloutLog(tmp_path / "log", rows=0),
        limit_val_batches=1.0,
        num_sanity_val_steps=-1,
        val_check_interval=6,
        max_steps=2,
        module={"val_generations": 2, "val_sampling": {"max_new_tokens": 6, "temperature": 1.0}},
    )
    names = [name for name in files(tmp_path / "log") if name.startswith("validation")]
    assert names == ["validation-step-000000.jsonl", "validation-step-000002.jsonl"]
    rows = read(tmp_path / "log" / names[-1])
    samples = result.module.evaluation.samples
    assert [(row["row"], row["sample"]) for row in rows] == [
        (r, s) for r in range(5) for s in (0, 1)
    ]
    assert [row["completion_ids"] for row in rows] == [s.completion_ids for s in samples]
    assert {row["version"] for row in rows} == {2}
    mean = sum(row["reward"] for row in rows) / len(rows)
    assert mean == pytest.approx(float(result.trainer.callback_metrics["val/reward"]))


def test_a_check_of_a_few_batches_and_a_validation_without_training_write_nothing(
    act, tools, tmp_path
):
    log = RolloutLog(tmp_path / "log", rows=0)
    result = act(
        log,
        limit_val_batches=1.0,
        num_sanity_val_steps=1,
        val_check_interval=99,
        check_val_every_n_epoch=None,
        max_steps=1,
    )
    tools.quiet_trainer(callbacks=[log]).validate(result.module, result.datamodule, verbose=False)
    assert list(files(tmp_path / "log")) == ["rollout-000000.jsonl"]


# The resumed run saves nothing, and Lightning says so.
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_resumed_run_writes_its_files_again_as_they_were(act, tmp_path):
    log, saved = tmp_path / "log", tmp_path / "saved"
    options = {"data": {"steps_per_rollout": 2}, "max_steps": 6}
    saver = ModelCheckpoint(saved, "{step}", every_n_train_steps=1, save_top_k=-1)
    act(RolloutLog(log, rows=0), saver, enable_checkpointing=True, **options)
    before = files(log)
    assert len(before) == 3
    for path in log.iterdir():
        path.write_text("lost\n")
    # After step 3 the second rollout has served one step of two: its texts are not kept.
    act(RolloutLog(log, rows=0), ckpt_path=saved / "step=3.ckpt", **options)
    lost = dict.fromkeys(["rollout-000000.jsonl", "rollout-000001.jsonl"], b"lost\n")
    assert files(log) == before | lost


def test_another_run_in_the_same_folder_is_warned_of(act, tmp_path):
    act(RolloutLog(tmp_path / "log", rows=0), max_steps=1)
    with pytest.warns(UserWarning, match="holds rollouts of another run"):
        act(RolloutLog(tmp_path / "log", rows=0), max_steps=1)


def test_a_rollout_is_shown_every_few(act, tmp_path, capsys):
    act(RolloutLog(tmp_path / "log", every_n_rollouts=2, rows=3))
    shown = capsys.readouterr().out
    titles = [line.strip() for line in shown.splitlines() if "written after" in line]
    assert titles == ["rollout 0, written after 0 steps", "rollout 2, written after 2 steps"]
    assert "user: " in shown
    assert "right 1" in shown


def test_without_rows_nothing_is_shown(act, tmp_path, capsys):
    act(RolloutLog(tmp_path / "log", every_n_rollouts=1, rows=0), max_steps=1)
    assert capsys.readouterr().out == ""


def test_the_table_stands_above_the_bar(act, tmp_path, capsys):
    act(RolloutLog(tmp_path / "log", rows=2), max_steps=1, enable_progress_bar=True)
    shown = capsys.readouterr().out
    assert "rollout 0, written after 0 steps" in shown


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rows": -1}, r"rollout_log\.rows .* at least 0, not -1"),
        ({"rows": 1.5}, r"rollout_log\.rows"),
        ({"every_n_rollouts": 0}, r"rollout_log\.every_n_rollouts .* at least 1, not 0"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(tmp_path, options, named):
    with pytest.raises(UserError, match=named):
        RolloutLog(tmp_path, **options)


# --- what may stand in a file


def sample(number=0, group=0, *, completion="17", reward=1.0, advantage=0.5, **other):
    return Sample(
        group=group,
        row=group,
        number=number,
        prompt_ids=[1],
        completion_ids=[2],
        finish_reason="stop",
        prompt=f"prompt of {group}",
        completion=completion,
        reward=reward,
        rewards={"right": reward},
        advantage=advantage,
        **other,
    )


def logged(rollout, folder):
    """What the callback writes of a rollout that nobody trains on."""
    from lit_align.callbacks.rollout_log import _rollout_rows, _write

    _write(folder / "rollout.jsonl", _rollout_rows(rollout))
    return (folder / "rollout.jsonl").read_bytes()


def test_no_reward_is_null_and_a_file_is_json_that_anybody_reads(tmp_path):
    unscored = sample(reward=math.nan)
    unscored.rewards = {"right": None, "odd": math.inf}
    content = logged(Rollout(0, 0, [unscored]), tmp_path)
    (row,) = [json.loads(line, parse_constant=pytest.fail) for line in content.splitlines()]
    assert row["reward"] is None
    assert row["rewards"] == {"right": None, "odd": None}


def test_any_text_can_be_written_and_is_read_as_it_was(tmp_path):
    # A line end of Unicode, half of a surrogate pair, and letters that stay readable.
    texts = ["a\u2028b\nc\x00", "\ud83d", "你好 \\n"]
    content = logged(Rollout(0, 0, [sample(completion=text) for text in texts]), tmp_path)
    lines = content.decode("utf-8").split("\n")
    assert [json.loads(line)["completion"] for line in lines[:-1]] == texts
    assert "你好" in lines[2]


# --- what stands in the table


@pytest.fixture
def terminal(monkeypatch):
    """Says how wide the terminal is and which characters it has."""

    def of(width, encoding="utf-8"):
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setattr(
            "sys.stdout", SimpleNamespace(encoding=encoding, isatty=lambda: False, fileno=lambda: 1)
        )

    return of


def test_the_best_and_the_worst_of_each_prompt_are_shown():
    advantages = {0: [0.1, -0.2, 0.9, -0.8], 1: [0.0], 2: [1.0, -1.0]}
    samples = [
        sample(number, group, advantage=advantage)
        for group, values in advantages.items()
        for number, advantage in enumerate(values)
    ]
    rollout = Rollout(0, 0, samples)

    def shown(rows):
        return [(s.group, s.number) for s in telling(rollout, rows)]

    assert shown(9) == [(0, 2), (0, 3), (1, 0), (2, 0), (2, 1)]
    assert shown(4) == shown(9)[:4]
    assert shown(1) == [(0, 2)]


def test_what_a_model_writes_is_no_markup_and_moves_no_cursor(terminal):
    terminal(100)
    written = "[bold]x[/bold] [/] \x1b[2J\r\n\tend\u202e"
    shown = rendered(Rollout(3, 7, []), [sample(completion=written)])
    assert r"[bold]x[/bold] [/] \x1b[2J\r\n\tend\u202e" in shown
    assert "\x1b" not in shown
    assert "rollout 3, written after 7 steps" in shown


def test_backslashes_stay_as_they_are():
    assert shortened(r"\frac{1}{2} \n", 99) == r"\frac{1}{2} \n"


def test_a_long_text_loses_its_middle():
    text = "a" * 30 + "b" * 40 + "c" * 30
    assert shortened(text, 60) == "a" * 30 + " [... 40 characters ...] " + "c" * 30
    assert shortened(text, 100) == text


@pytest.mark.parametrize("width", [20, 80, 200])
def test_the_table_is_no_wider_than_the_terminal(terminal, width):
    terminal(width)
    shown = rendered(
        Rollout(0, 0, []), [sample(completion="x " * 900), sample(completion="y" * 900)]
    )
    assert max(map(len, shown.splitlines())) <= width


def test_a_terminal_without_these_letters_gets_others(terminal):
    terminal(80, encoding="ascii")
    shown = rendered(Rollout(0, 0, []), [sample(completion="你好")])
    assert shown.isascii()
    assert r"\u4f60\u597d" in shown


def test_rewards_stand_by_name_and_a_sum_where_there_are_several():
    one = sample(reward=0.25)
    assert rewards(one) == "right 0.25"
    one.rewards = {"right": None, "short": 0.5}
    one.reward = 0.5
    assert rewards(one) == "right -\nshort 0.5\ntotal 0.5"


def test_a_prompt_stands_once(terminal):
    terminal(100)
    shown = rendered(Rollout(0, 0, []), [sample(0, 4), sample(1, 4), sample(0, 5)])
    assert shown.count("prompt of 4") == 1
    assert shown.count("prompt of 5") == 1


def test_a_module_that_writes_nothing_is_refused(run, tmp_path):
    with pytest.raises(UserError, match="RolloutLog serves a module that writes completions"):
        run(callbacks=[RolloutLog(tmp_path)])
