"""Pictures of curves: small, the same bytes for the same numbers, legible on white and on black."""

from pathlib import Path

import matplotlib as mpl

mpl.use("svg")

from loss_curves import Curves
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

GREY = "#808080"
COLOURS = ("#3b8ed0", "#e07b28")
STYLE = {
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "axes.labelcolor": GREY,
    "axes.prop_cycle": mpl.cycler(color=COLOURS, linestyle=("-", "--")),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": GREY,
    "axes.titlesize": "medium",
    "font.sans-serif": "DejaVu Sans",  # one name: it stands at every number
    "font.size": 9,
    "grid.alpha": 0.25,
    "grid.color": GREY,
    "legend.frameon": False,
    "legend.labelcolor": GREY,
    "svg.fonttype": "none",  # letters stay letters: small files
    "xtick.color": GREY,
    "ytick.color": GREY,
}


def draw(curves: Curves, path: Path) -> None:
    """The values on the left, the slopes on the right."""
    with mpl.rc_context({**STYLE, "svg.hashsalt": path.stem}):
        figure, axes = plt.subplots(1, 2, figsize=(7.2, 2.8), layout="constrained")
        panels = zip(axes, ("loss", "slope by the log-prob, per nat"), curves[2:], strict=True)
        for panel, title, lines in panels:
            fill(panel, curves, title, lines)
        figure.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=2)
        figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
        plt.close(figure)


def fill(panel: Axes, curves: Curves, title: str, lines: dict[str, list[float]]) -> None:
    """One panel: a line for each legend."""
    for legend, values in lines.items():
        panel.plot(curves.at, values, label=legend)
    panel.set(title=title, xlabel=curves.axis)
    panel.xaxis.set_major_locator(MaxNLocator(5, steps=(1, 2, 5, 10)))
