"""The command line: what it understands, what it leaves behind, what it says when it fails."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from lit_align import cli
from lit_align.cli import errors
from lit_align.cli import train as verb
from lit_align.cli.aliases import with_our_names
from lit_align.cli.outcome import Outcome
from lit_align.cli.process import TERMINATED, left_as_found
from lit_align.cli.run import optimized
from lit_align.cli.sweep import SweepReport, processes, varied
from lit_align.errors import UserError
from lit_align.resources import resource

ROOT = Path(__file__).parents[1]
TRAIN = [sys.executable, str(ROOT / "train.py")]
SHORT = [
    "trainer.max_steps=2",
    "trainer.enable_progress_bar=false",
    "trainer.enable_model_summary=false",
    "trainer.log_every_n_steps=1",
    "data.max_rows=20",
    "data.val_max_rows=6",
    "data.batch_size=8",
    "callbacks=default",
]
PAIRS = resource("arithmetic/train.jsonl")
BAD_PAIRS = '{"prompt": "1 + 1 =", "rejected": "3"}\n'


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """An empty folder to work in, with a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_ALIGN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    handlers = logging.root.handlers[:]
    yield tmp_path
    for handler in set(logging.root.handlers) - set(handlers):
        handler.close()
    logging.root.handlers[:] = handlers


@pytest.fixture
def lit_align(elsewhere, monkeypatch, capfd):
    """Runs the command in this process: (exit code, stdout, stderr)."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["lit-align", *arguments])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            # What Python itself does with the argument of sys.exit.
            code = end.code if isinstance(end.code, int) else 1
            if isinstance(end.code, str):
                sys.stderr.write(end.code)
        out, err = capfd.readouterr()
        return code or 0, out, err

    return run


def run_folder(where="outputs"):
    (folder,) = Path(where).glob("*/*")
    return folder


def command(*arguments, **options):
    done = subprocess.run(
        arguments, check=False, capture_output=True, text=True, timeout=300, **options
    )
    return done.returncode, done.stdout, done.stderr


# --- verbs


def test_a_verb_is_taken_out_of_the_arguments(monkeypatch):
    # What is left is what Lightning starts further ranks with.
    seen = []
    monkeypatch.setattr(verb, "main", lambda: seen.append(sys.argv[1:]))
    for arguments in (["train", "loss=simpo"], ["loss=simpo"], []):
        monkeypatch.setattr(sys, "argv", ["lit-align", *arguments])
        cli.main()
    assert seen == [["loss=simpo"], ["loss=simpo"], []]


def test_an_unknown_verb_is_answered_with_those_there_are(lit_align):
    code, _, err = lit_align("trian", "loss=simpo")
    assert code == 1
    assert err == "error: unknown verb 'trian'; known: train"


def test_help_lists_verbs_and_the_options_of_every_group(lit_align):
    code, out, _ = lit_align("--help")
    assert code == 0
    assert "train " in out
    losses = sorted(path.stem for path in (ROOT / "conf" / "loss").glob("*.yaml"))
    assert " ".join(losses) in out


def test_all_doors_lead_to_one_configuration(elsewhere):
    script = [str(Path(sys.executable).with_name("lit-align"))]
    doors = (TRAIN, [*script, "train"], script, [sys.executable, "-m", "lit_align"])
    answers = {command(*door, "loss=simpo", "--cfg", "job") for door in doors}
    ((code, out, err),) = answers
    assert (code, err) == (0, "")
    assert OmegaConf.create(out).loss.loss_type == "simpo"


def test_the_configuration_is_that_of_the_checkout(elsewhere):
    # An editable installation has a second copy, as old as the installation.
    _, out, _ = command(*TRAIN, "--info", "searchpath")
    assert f"file://{ROOT / 'conf'}" in out
    assert "site-packages" not in out


def test_completion_does_not_wait_for_torch(elsewhere):
    code = "import lit_align.cli.train, sys; sys.exit('torch' in sys.modules)"
    assert command(sys.executable, "-c", code)[0] == 0


# --- names of other projects


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        (["loss=sigmoid"], ["loss=dpo"]),
        (["loss=sigmoid_norm", "loss.beta=2"], ["loss=dpo_norm", "loss.beta=2"]),
        (["-m", "loss=sigmoid,ipo,sigmoid_norm"], ["-m", "loss=dpo,ipo,dpo_norm"]),
        (["loss=choice(sigmoid, simpo)"], ["loss=choice(dpo, simpo)"]),
        (["loss=sigmoidal"], ["loss=sigmoidal"]),
        (["model.pretrained=sigmoid"], ["model.pretrained=sigmoid"]),
        (["loss.loss_type=sigmoid"], ["loss.loss_type=sigmoid"]),
        ([], []),
    ],
)
def test_a_loss_is_chosen_by_the_name_of_another_project(given, ours):
    assert with_our_names(given) == ours


@pytest.mark.parametrize("flag", [["--config-dir", "mine"], ["--config-dir=mine"], ["-cd", "mine"]])
def test_a_file_of_the_user_s_own_keeps_its_name(elsewhere, flag):
    Path("mine/loss").mkdir(parents=True)
    Path("mine/loss/sigmoid.yaml").touch()
    given = [*flag, "loss=sigmoid,sigmoid_norm"]
    assert with_our_names(given) == [*flag, "loss=sigmoid,dpo_norm"]


def test_a_run_of_an_alias_is_that_of_the_loss(lit_align):
    _, ours, _ = lit_align("loss=dpo", "--cfg", "job")
    _, theirs, _ = lit_align("loss=sigmoid", "--cfg", "job")
    assert ours == theirs
    assert "loss_type: dpo\n" in ours


# --- mistakes


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["loss=simpoo"], "no option 'simpoo' of loss; did you mean loss=simpo?"),
        (["loss=qqq"], "no option 'qqq' of loss\nloss has: alphapo, aot, "),
        (["loss=grpo", "loss.epsilon=0.1"], "no key 'loss.epsilon'; epsilon is clip_lower and cl"),
        (["loss=aot_pair"], "no option 'aot_pair' of loss; aot_pair is loss=aot\n"),
        (["loss=grpo", "loss.delta=2"], "delta is the largest ratio, of loss.loss_fn=two_sided"),
        (["loss=bco_pair", "loss.delta=2"], "bco and bco_pair measure their own"),
        (["loss.wpo=sampled"], "added with a plus: +loss.wpo=..."),
        (["loss=mpo", "loss.wpo=sampled"], "added with a plus: +loss.terms.dpo.wpo=..."),
        (["loss=mpo", "loss.terms.dpo.wpo=sampled"], "with a plus: +loss.terms.dpo.wpo=..."),
        (["loss=orpo", "loss.beta=1"], "of a term: loss.terms.orpo_odds_ratio.weight\n"),
        (["loss.betta=1"], "no key 'loss.betta'; did you mean loss.beta?"),
        (["lss=dpo"], "no key 'lss'; did you mean loss?"),
        (["+loss.betta=1"], "loss 'dpo' takes beta, label_smoothing, not betta"),
        (["loss.beta=-1"], "beta must be"),
        (["loss=simpo", "loss.simpo_gamma=1"], "simpo_gamma is beta * gamma_beta_ratio of loss=s"),
        (["loss=simpo", "+loss.simpo_gamma=1"], "simpo_gamma is beta * gamma_beta_ratio of loss=s"),
        (["loss=mpo", "loss.beta=1"], "of a term: loss.terms.dpo.beta, loss.terms.bco_pair.beta\n"),
        (["loss=mpo", "+loss.beta=1"], "a sum of losses takes terms alone, not beta"),
        (["loss=mpo", "loss.terms.sft.weight=0"], "leave it out (~loss.terms.sft)"),
        (["loss.loss_type=[sigmoid,sft]"], "a sum of losses is CombinedConfig("),
        (["loss=wpo", "+loss.wpo=sampled"], "loss 'wpo' has these weights without the option wpo"),
        (["+trainer.stepz=1"], "unexpected keyword argument 'stepz'"),
        (["trainer.precision=33"], "precision"),
        (["data=preference"], "set data.path=..."),
        (["data.path=nowhere.jsonl"], "nowhere.jsonl"),
        (["ckpt_path=nowhere.ckpt"], "there is no checkpoint nowhere.ckpt"),
        (["model.pretrained=./nowhere"], "nowhere"),
        (["ckpt_path=last"], "there is no checkpoint last"),
        (["model=lora"], "model.pretrained has no default"),
        (["scheduler=null"], "a group cannot be null"),
        (["seed=abc"], "seed must be a whole number"),
        (["num_threads=0"], "num_threads must be a whole number of at least 1"),
        (["trainer.accumulate_grad_batches=0"], "accumulate_grad_batches must be a whole number"),
        (["optimizer.lr=-1"], "the optimizer cannot be built: Invalid learning rate"),
        (["optimizer=sgd", "+optimizer.betas=[0.9,0.9]"], "the optimizer cannot be built"),
        (["output_dir=/dev/null/x"], "Not a directory"),
        (["-m", "loss=dpo,simpoo"], "no option 'simpoo' of loss; did you mean loss=simpo?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_told_in_one_message(lit_align, arguments, said):
    code, _, err = lit_align(*arguments, *SHORT)
    assert code == 1
    assert err.count("error: ") == 1
    assert said in err
    assert "Traceback" not in err
    assert "use +" not in err


def test_a_row_without_an_answer_stops_the_run_and_leaves_no_model(lit_align):
    Path("bad.jsonl").write_text(BAD_PAIRS)
    code, _, err = lit_align("data=preference", "data.path=bad.jsonl", *SHORT)
    assert code == 1
    assert "line 1" in err
    assert "chosen" in err
    assert not list(run_folder().glob("model*"))


def test_a_fault_of_the_program_keeps_its_traceback(lit_align, monkeypatch):
    def broken(cfg):
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr("lit_align.cli.run.run", broken)
    code, _, err = lit_align()
    assert code == 1
    assert "in broken" in err
    assert "hydra/_internal" not in err


def test_ctrl_c_ends_with_130_and_one_word(lit_align, monkeypatch):
    def interrupted(cfg):
        raise KeyboardInterrupt

    monkeypatch.setattr("lit_align.cli.run.run", interrupted)
    code, _, err = lit_align()
    assert code == 130
    assert err.startswith("interrupted; no checkpoint had been written")


def test_an_end_by_sigterm_is_no_success(lit_align, monkeypatch):
    def terminated(cfg):
        checkpoint = Path(cfg.output_dir) / "checkpoints" / "last.ckpt"
        checkpoint.parent.mkdir()
        checkpoint.touch()
        sys.exit(TERMINATED)

    monkeypatch.setattr("lit_align.cli.run.run", terminated)
    code, _, err = lit_align()
    assert code == 143
    assert err.startswith("terminated; go on with the same settings and ckpt_path=")


@pytest.mark.parametrize("content", [b"", b"no checkpoint", b"PK\x03\x04 half a file"])
def test_what_is_no_checkpoint_is_named(lit_align, content):
    Path("some.ckpt").write_bytes(content)
    code, _, err = lit_align("ckpt_path=some.ckpt", *SHORT)
    assert code == 1
    assert err.strip() == "error: ckpt_path: some.ckpt is damaged or no checkpoint"


def test_a_run_resumed_after_its_last_step_still_leaves_its_model(lit_align):
    """As after a kill between the last checkpoint and the export."""
    assert lit_align(*SHORT, "hydra.run.dir=whole")[0] == 0
    code, out, _ = lit_align(*SHORT, "hydra.run.dir=again", "ckpt_path=whole/checkpoints/last.ckpt")
    assert code == 0
    assert "best model" not in out
    whole, again = (load_file(f"{run}/model/model.safetensors") for run in ("whole", "again"))
    assert all(torch.equal(weight, again[name]) for name, weight in whole.items())


def test_a_mistake_is_found_behind_what_others_made_of_it():
    error = RuntimeError("in a worker")
    error.__cause__ = UserError("no such file")
    assert errors.explain(error) == "error: no such file"


def test_an_optimized_metric_has_to_be_logged():
    assert optimized(None, {}) is None
    assert optimized("val/loss", {"val/loss": 0.5}) == 0.5
    with pytest.raises(UserError, match=r"no metric 'loss'; logged: val/loss"):
        optimized("loss", {"val/loss": 0.5})


# --- a run


def test_a_run_leaves_what_people_look_for(lit_align):
    code, out, _ = lit_align("train", "loss=simpo", *SHORT)
    folder = run_folder()
    assert code == 0
    assert str(folder.absolute() / "model") in out
    for name in ("model/model.safetensors", "csv/metrics.csv", ".hydra/config.yaml", "config.yaml"):
        assert (folder / name).is_file(), name
    assert list(folder.glob("checkpoints/*.ckpt"))
    outcome = Outcome.read(folder / "result.json")
    assert outcome.error is None
    assert outcome.overrides[0] == "loss=simpo"
    assert 0 <= outcome.metrics["val/rewards/accuracies"] <= 1
    # What was run can be read without Hydra: every reference is resolved.
    assert "${" not in (folder / "config.yaml").read_text()


def test_without_max_steps_a_run_is_one_epoch(lit_align):
    code, _, _ = lit_align("callbacks=none", "loss=simpo", "trainer.max_steps=-1", *SHORT[1:-1])
    steps = (run_folder() / "csv" / "metrics.csv").read_text().splitlines()
    assert code == 0
    # 20 rows by 8 make three steps.
    assert sum(",train" in line or line.startswith("0,") for line in steps[1:]) >= 3
    assert json.loads((run_folder() / "result.json").read_text())["model"] is None


# --- sweeps


def test_a_sweep_goes_on_after_a_failure_and_computes_the_reference_once(lit_align):
    jobs = ["loss=dpo,wpo", f"data.path=nowhere.jsonl,{PAIRS}", "callbacks.save_policy=null"]
    code, out, err = lit_align("-m", *jobs, *SHORT)
    assert code == 1
    assert "2 of 4 jobs failed" in err
    # Told when it happens, not only at the end.
    assert out.count("failed: ") == 2
    first, second = re.findall(r"(\d+)\s+computed", out)
    assert int(first) > 0
    assert int(second) == 0
    (sweep,) = Path("multirun").glob("*/*")
    outcomes = [Outcome.read(sweep / str(job) / "result.json") for job in range(4)]
    assert [outcome.job for outcome in outcomes] == [0, 1, 2, 3]
    assert [bool(outcome.error) for outcome in outcomes] == [True, False, True, False]
    assert not Path("outputs").exists()


def test_the_table_of_a_sweep_shows_what_differs(tmp_path, capsys):
    jobs = [
        Outcome(0, ["loss=dpo", "seed=1"], metrics={"val/loss": 0.5, "val/other": 1.0}),
        Outcome(1, ["loss=simpo", "seed=1"], error="no such file"),
    ]
    report = SweepReport(["val/loss", "val/absent"])
    for job in jobs:
        (tmp_path / str(job.job)).mkdir()
        job.write(tmp_path / str(job.job))
    config = OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}}})
    with pytest.raises(SystemExit, match=r"(?s)1 of 2 jobs failed.*loss=simpo.*no such file"):
        report.on_multirun_end(config)
    out = capsys.readouterr().out
    assert "0.5000" in out
    assert "absent" not in out
    assert varied(jobs[0], jobs) == "loss=dpo"


def test_an_older_sweep_in_the_same_folder_is_not_counted(tmp_path):
    Outcome(0, [], error="old").write(tmp_path)
    os.utime(tmp_path / "result.json", (0, 0))
    report = SweepReport([])
    report.on_multirun_start(OmegaConf.create())
    assert report.outcomes(tmp_path) == []


@pytest.mark.parametrize(
    ("devices", "accelerator", "nodes", "expected"),
    [
        (1, "auto", 1, 1),
        ("2", "cpu", 1, 2),
        ([0, 3], "gpu", 1, 2),
        (1, "gpu", 2, 2),
        ("auto", "cpu", 1, 1),
        (-1, "cpu", 1, 1),
    ],
)
def test_the_processes_of_a_job_are_counted(devices, accelerator, nodes, expected):
    trainer = {"devices": devices, "accelerator": accelerator, "num_nodes": nodes}
    assert processes(OmegaConf.create(trainer)) == expected


def test_a_run_leaves_its_process_as_it_found_it(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "1")
    with left_as_found():
        os.environ |= {"LOCAL_RANK": "1", "WORLD_SIZE": "2"}
        torch.use_deterministic_algorithms(True)
    assert "LOCAL_RANK" not in os.environ
    assert os.environ["WORLD_SIZE"] == "1"
    assert not torch.are_deterministic_algorithms_enabled()


# --- several processes, each a start of Python with torch


TWO = ["strategy=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]


@pytest.mark.slow
@pytest.mark.distributed
def test_jobs_of_two_processes_agree_and_one_failure_does_not_end_the_sweep(elsewhere):
    data = f"data.path=nowhere.jsonl,{PAIRS}"
    code, out, err = command(*TRAIN, "-m", "loss=simpo", data, *TWO, *SHORT)
    assert code == 1
    assert "1 of 2 jobs failed" in err
    (sweep,) = Path("multirun").glob("*/*")
    assert sorted(path.name for path in sweep.iterdir()) == ["0", "1", "multirun.yaml"]
    assert (sweep / "1" / "model" / "model.safetensors").is_file()
    # Each job has its own two: none is started by a second rank that runs the sweep as well.
    assert out.count("Starting with 2 processes") == 2
    assert out.count("run folder") == 1


@pytest.mark.slow
@pytest.mark.distributed
def test_only_the_first_of_two_processes_speaks(elsewhere):
    Path("bad.jsonl").write_text(BAD_PAIRS)
    code, out, err = command(*TRAIN, "data=preference", "data.path=bad.jsonl", *TWO, *SHORT)
    assert code == 1
    assert err.count("error: ") == 1
    assert "Traceback" not in out + err


@pytest.mark.slow
def test_ctrl_c_in_training_is_no_traceback(elsewhere):
    run = subprocess.Popen(
        [*TRAIN, "loss=simpo", *SHORT, "trainer.max_steps=100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    while not list(Path("outputs").glob("*/*/csv/metrics.csv")):
        assert run.poll() is None
        time.sleep(0.2)
    run.send_signal(signal.SIGINT)
    out, _ = run.communicate(timeout=60)
    assert run.returncode == 130
    assert "interrupted; " in out
    assert "Traceback" not in out
