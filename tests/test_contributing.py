"""The loss that CONTRIBUTING.md adds does train and does pass, put where it says."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lit_align.losses import PREFERENCE_LOSSES

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
INSIDE, OUTSIDE = TEXT.split("## Adding a loss")[1].split("## A loss outside")
COPIED = ["lit_align", "conf", "train.py", "pyproject.toml"]
COPIED += ["tests/conftest.py", "tests/closing_summary.py", "tests/losses/small_pairs.py"]


def blocks(text, language):
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def lay(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def run(command, cwd):
    program, *arguments = command if isinstance(command, list) else shlex.split(command)
    words = {"python": [sys.executable], "lit-align": [sys.executable, "-m", "lit_align"]}[program]
    done = subprocess.run(
        [*words, *arguments],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The repository with the example in it."""
    folder = tmp_path_factory.mktemp("repository")
    for name in COPIED:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        of = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        of(ROOT / name, folder / name)
    function, test = blocks(INSIDE, "python")
    (yaml,) = blocks(INSIDE, "yaml")
    path = "lit_align/losses/margins.py"
    lay(
        folder,
        {
            path: (folder / path).read_text() + "\n\n" + function,
            "conf/loss/brier.yaml": yaml,
            "tests/losses/test_brier.py": test,
        },
    )
    return folder


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """One for all runs, so that there is one reference pass."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIT_ALIGN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def commands():
    (block,) = blocks(INSIDE, "bash")
    return block.splitlines()


def test_the_example_is_no_loss_that_there_is():
    assert "brier" not in PREFERENCE_LOSSES


def test_the_example_is_in_this_style(copy):
    paths = ["lit_align/losses/margins.py", "tests/losses/test_brier.py"]
    run(["python", "-m", "ruff", "check", *paths], copy)
    run(["python", "-m", "ruff", "format", "--check", *paths], copy)


def test_the_example_trains(copy, commands):
    run(commands[0], copy)
    (result,) = copy.glob("outputs/*/*-brier/result.json")
    assert '"error": null' in result.read_text()


def test_the_example_trains_outside_of_the_repository_alone_and_in_a_sum(tmp_path):
    for command in outside(tmp_path):
        run(command.strip(), tmp_path)
    for name in ("brier", "brier_sft"):
        (result,) = tmp_path.glob(f"outputs/*/*-{name}/result.json")
        assert '"error": null' in result.read_text()


def outside(folder):
    """A folder that is no repository, and what is typed there."""
    (head,), (yaml, of_sum) = blocks(OUTSIDE, "python"), blocks(OUTSIDE, "yaml")
    (written,) = blocks(INSIDE, "yaml")
    changed = re.sub(r"^_target_: .*\n", yaml, written, flags=re.MULTILINE)
    assert changed != written
    files = {
        "my_losses.py": head + "\n\n" + blocks(INSIDE, "python")[0],
        "my_conf/loss/brier.yaml": changed,
        "my_conf/loss/brier_sft.yaml": of_sum,
    }
    lay(folder, files)
    return blocks(OUTSIDE, "bash")


def test_the_tests_of_the_example_pass_and_see_what_is_wrong(copy, commands):
    _, test = commands
    assert re.search(r"6 passed", run(test, copy))
    path = copy / "lit_align/losses/margins.py"
    right = path.read_text()
    path.write_text(right.replace(".sigmoid().square()", ".sigmoid()"))
    with pytest.raises(AssertionError, match="test_brier_by_hand"):
        run(test, copy)
    path.write_text(right)
