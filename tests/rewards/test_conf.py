"""Every reward file builds a suite that tells a right completion from a wrong one."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

import lit_align.rewards
from lit_align.rewards import RewardSuite

CONF = Path(__file__).parents[2] / "conf"
FILES = sorted(path.stem for path in (CONF / "reward").glob("*.yaml"))
LEGS = {"answer": "4", "metadata": {"source_dataset": "leg_counting"}}
# Right and wrong completion, the columns, and what the right one gets.
ROWS = {
    "arithmetic": ("46", "47", {"answer": "46"}, 1.0),
    "gsm8k": ("6 * 12\n#### 72", "6 * 12\n#### 71.", {"answer": "so\n#### 72"}, 1.1),
    "gym": ("<answer>4</answer>", "4", {"answer": "4", "entry": LEGS}, 1.0),
    "math": (r"\boxed{\frac{2}{4}}", "2", {"answer": r"\frac{1}{2}"}, 1.0),
    "soft_overlong": ("46", "47", {"answer": "46"}, 1.0),
}


def suite_of(name):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return instantiate(compose(f"reward/{name}").reward, _convert_="all")


@pytest.mark.parametrize("name", FILES)
def test_the_suite_of_a_file_scores(name):
    right, wrong, row, total = ROWS[name]
    suite = suite_of(name)
    assert isinstance(suite, RewardSuite)
    columns = {key: [value] * 2 for key, value in row.items()}
    scores = suite.score(["?"] * 2, [right, wrong], [[1], [1]], columns)
    assert scores.total == [total, 0.0]


def test_an_answer_that_is_too_long_loses():
    suite = suite_of("soft_overlong")
    scores = suite.score(["?"] * 2, ["46"] * 2, [[1] * 224, [1] * 300], {"answer": ["46"] * 2})
    # By hand: 32 of the last 64 tokens are used; then all.
    assert scores.total == [0.5, 0.0]


def test_every_verifier_is_public():
    for name in lit_align.rewards.__all__:
        assert getattr(lit_align.rewards, name).__doc__
