"""Write `losses.md` and its plots: `make docs`.

Everything it says is said elsewhere: docstrings have formulas, symbols and sources, signatures what
is read, the files of `conf/loss` the defaults and where they come from.
"""

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from textwrap import fill
from typing import Any

from hydra.utils import instantiate
from loss_curves import Curves, held, of_combination, of_completions, of_pairs, of_surrogate
from loss_docstrings import Docstring
from loss_files import CONF, LossFile, names
from loss_sections import (
    AXES,
    axis_section,
    bullets,
    combination_section,
    joined,
    loss_section,
    preset_section,
    said,
    slug,
)
from omegaconf import OmegaConf

from lit_align import losses
from lit_align.losses import PREFERENCE_LOSSES, DPOConfig, Variants
from lit_align.losses.unpaired import UNPAIRED_LOSSES
from lit_align.losses.unpaired_dispatch import UnpairedConfig

HERE = Path(__file__).parent
PLOTS = HERE / "plots"
EVERY = 8  # of the points, one is kept to compare with
TABLES = {
    "loss_fn": losses.SURROGATES,
    "ratio_level": losses.RATIOS,
    "aggregation": losses.AGGREGATIONS,
    "advantage": losses.ADVANTAGES,
    "correction": losses.CORRECTIONS,
    "token_filter": losses.FILTERS,
    "kl_estimator": losses.KL_ESTIMATORS,
    "entropy_control": losses.ENTROPY_CONTROLS,
}
HEAD = """\
<!-- Made by `make docs` from docstrings, signatures and the files of conf/loss: change those. -->

# Losses

All that `loss=NAME` can be, and what policy losses are put together from. An option is set by its
name: `loss=dpo loss.beta=0.5`. [CONTRIBUTING.md](../CONTRIBUTING.md) tells how to add a loss."""
PAIRS = """\
Of two responses to a prompt one is preferred, which formulas call w; l is the other. Any of these
losses can be a term of a combination."""
COMPLETIONS = "Of each completion it is known whether it is desirable."
COMBINATIONS = "Weighted sums of losses of pairs, and losses that bring something with them."
PRESETS = """\
One choice on each axis, and the hyperparameters of what was chosen. The axes are below; any value
can be changed, and what does not go together is refused. `null` leaves a value to what was chosen.
All of them share what [`shared/policy`](#sharedpolicy) says."""
CORRECTED = """\
Choices for the mismatch of sampler and trainer that go with any policy loss, after it on the
command line."""


def page() -> str:
    """The text of `losses.md`."""
    parts = {
        "Losses of pairs": [PAIRS, *losses_of(PREFERENCE_LOSSES, DPOConfig)],
        "Losses of single completions": [COMPLETIONS, *losses_of(UNPAIRED_LOSSES, UnpairedConfig)],
        "Combinations": [COMBINATIONS, *(combination_section(n, built(n)) for n in combinations())],
        "Policy losses": [
            PRESETS,
            *(preset_section(n, TABLES) for n in (*presets(), "shared/policy")),
        ],
        "Presets of corrections": [
            CORRECTED,
            *(preset_section(name, TABLES, "correction") for name in names("correction")),
        ],
        **{f"{AXES[option]}s: `{option}`": axis(option) for option in AXES},
    }
    contents = [f"- [{name}](#{slug(name)}): {listed(texts)}" for name, texts in parts.items()]
    texts = [joined(f"## {name}", *texts) for name, texts in parts.items()]
    return joined(HEAD, "\n".join(contents), fill(held(), 100), *texts) + "\n"


def losses_of(table: Variants, config: Callable[[str], Any]) -> list[str]:
    """The sections of a table."""
    return [loss_section(v, table, built(n) or config(n)) for n, v in ordered(table)]


def axis(option: str) -> list[str]:
    """What the module says of all choices, and each of them."""
    table = TABLES[option]
    first = next(iter(table.values()))
    about = Docstring.of(sys.modules[first.fn.__module__])
    opening = joined(about.text, bullets(said(about)))
    return [opening, *(axis_section(option, v, table) for _, v in ordered(table))]


def ordered(table: Variants) -> Iterable[tuple[str, losses.Variant]]:
    """By name."""
    return sorted(table.items())


def listed(texts: list[str]) -> str:
    """The sections of a part, as links."""
    heads = [text.split("\n", 1)[0].removeprefix("### ") for text in texts[1:]]
    return ", ".join(f"[{head.split()[-1]}](#{slug(head)})" for head in heads)


def presets() -> list[str]:
    """The files that choose a surrogate."""
    return [name for name in names() if "loss_fn" in LossFile.read(name).settings]


def combinations() -> list[str]:
    """The files that are neither a loss nor a preset."""
    return [n for n in names() if n not in {*PREFERENCE_LOSSES, *UNPAIRED_LOSSES, *presets()}]


def pictures() -> dict[str, Curves]:
    """What is plotted, by the file's name."""
    return {
        **{name: of_pairs(variant) for name, variant in ordered(PREFERENCE_LOSSES)},
        **{name: of_completions(variant) for name, variant in ordered(UNPAIRED_LOSSES)},
        **{name: of_combination(name, built(name)) for name in combinations()},
        **{f"surrogate-{n}": of_surrogate(variant) for n, variant in ordered(losses.SURROGATES)},
    }


def built(name: str) -> Any:
    """The config that a file describes; None without a file."""
    path = CONF / "loss" / f"{name}.yaml"
    if not path.exists():
        return None
    node = OmegaConf.load(path)
    return instantiate(node.get("loss", node), _convert_="all")


def points(curves: Curves) -> dict[str, list[float]]:
    """A few of the numbers of a plot, to tell whether it is still the right one."""
    slopes = {f"slope {legend}": line for legend, line in curves.slopes.items()}
    lines = {"at": curves.at, **curves.losses, **slopes}
    return {name: [float(f"{x:.9g}") for x in line[::EVERY]] for name, line in lines.items()}


def main() -> None:
    """Write everything, and leave nothing of what is no longer there."""
    from loss_plots import draw

    PLOTS.mkdir(exist_ok=True)
    for old in PLOTS.iterdir():
        old.unlink()
    drawn = pictures()
    for name, curves in drawn.items():
        draw(curves, PLOTS / f"{name}.svg")
    kept = {name: points(curves) for name, curves in drawn.items()}
    lines = ",\n".join(f'"{name}": {json.dumps(numbers)}' for name, numbers in kept.items())
    (PLOTS / "points.json").write_text(f"{{\n{lines}\n}}\n")
    (HERE / "losses.md").write_text(page())


if __name__ == "__main__":
    main()
