"""Where the configuration lies, and which options it holds."""

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


def conf_dir() -> Path:
    """The folder of `train.yaml`: inside the package in a wheel, beside it in a checkout.

    Found from this file, not from the list of installed packages: an editable installation also
    leaves a copy among those, as old as the installation.
    """
    for folder in (_PACKAGE / "conf", _PACKAGE.parent / "conf"):
        if (folder / "train.yaml").is_file():
            return folder
    raise FileNotFoundError(f"lit_align was installed without its configuration in {_PACKAGE}")


def options() -> dict[str, list[str]]:
    """The options of each group that is for choosing, by group."""
    return {
        group.name: sorted(path.stem for path in group.glob("*.yaml"))
        for group in sorted(conf_dir().iterdir())
        if group.is_dir() and group.name not in {"hydra", "local"} and any(group.glob("*.yaml"))
    }
