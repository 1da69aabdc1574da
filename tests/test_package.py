"""The wheel, installed outside the checkout, does what the checkout does."""

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


def output(*command, cwd):
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, check=False, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder]
    output(*pip, ROOT, cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The scripts of an environment that has the wheel, and everything else from this one."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False)
    purelib = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install"]
    output(*pip, "--quiet", "--no-deps", wheel, cwd=folder)
    # After the wheel on the path, and without the .pth files in it: those lead to the checkout.
    (purelib / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def test_the_wheel_holds_configuration_and_bundled_files(wheel):
    held = set(zipfile.ZipFile(wheel).namelist())
    conf = {f"lit_align/{path.relative_to(ROOT)}" for path in ROOT.glob("conf/**/*.yaml")}
    assert conf <= held
    assert {
        "lit_align/py.typed",
        "lit_align/resources/tiny/model.safetensors",
        "lit_align/resources/arithmetic/train.jsonl",
    } <= held


def test_the_installed_command_equals_the_script(installed, tmp_path):
    arguments = ["loss=simpo", "--cfg", "job"]
    here = output(sys.executable, ROOT / "train.py", *arguments, cwd=tmp_path)
    assert output(installed / "lit-align", "train", *arguments, cwd=tmp_path) == here
    assert output(installed / "lit-align", *arguments, cwd=tmp_path) == here
    assert output(installed / "python", "-m", "lit_align", *arguments, cwd=tmp_path) == here


def test_the_installed_command_uses_its_own_configuration(installed, tmp_path):
    searched = output(installed / "lit-align", "--info", "searchpath", cwd=tmp_path)
    assert "site-packages/lit_align/conf" in searched
    assert str(ROOT) not in searched


def test_the_installed_command_trains(installed, tmp_path):
    short = ["trainer.max_steps=2", "data.max_rows=64", "data.val_max_rows=8"]
    output(installed / "lit-align", "train", "loss=simpo", *short, cwd=tmp_path)
    assert list(tmp_path.glob("outputs/*/*/model/model.safetensors"))
