"""The command line: `lit-align VERB ...`, `python train.py ...` and `python -m lit_align ...`.

Only this package knows Hydra. What needs torch is imported when a job runs, so that completing an
option or printing a configuration takes under a second.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from lit_align.cli.conf import conf_dir, options

__all__ = ["main"]


class Verb(NamedTuple):
    """One thing the command line can do.

    Attributes:
        module: its `main()` reads what is left of `sys.argv`; imported only when called.
        summary: one line for the help.
    """

    module: str
    summary: str


VERBS = {"train": Verb("lit_align.cli.train", "train a policy; the verb if none is named")}


def main() -> None:
    """Run the verb that the first argument names, `train` if it names none."""
    # A reward or callback of one's own, in a file beside which one works, can be named in a config.
    sys.path.append(str(Path.cwd()))
    first = sys.argv[1] if len(sys.argv) > 1 else ""
    if first in {"-h", "--help"}:
        sys.stdout.write(help_text())
        return
    verb = first if first in VERBS else "train"
    if first == verb:
        # Lightning starts further ranks with the arguments that are left, and Hydra reads them.
        del sys.argv[1]
    elif first and "=" not in first and first[0] not in "-+~":
        sys.exit(f"error: unknown verb '{first}'; known: {', '.join(VERBS)}")
    import_module(VERBS[verb].module).main()


def help_text() -> str:
    """The verbs, and the options of every group."""
    verbs = "\n".join(f"  {name:12}{verb.summary}" for name, verb in VERBS.items())
    groups = "\n".join(f"  {name:16}{' '.join(names)}" for name, names in options().items())
    return f"""\
lit-align: aligns language models.

  lit-align [VERB] [GROUP=OPTION ...] [KEY=VALUE ...]

Verbs:
{verbs}

Groups and their options (choose with loss=simpo, compare with -m loss=dpo,simpo):
{groups}

Every key of the configuration can be set: loss.beta=1 trainer.max_steps=100.
  --cfg job       print the configuration that would run, and stop
  -m, --multirun  run every combination of comma-separated values
  --config-dir D  look for options in D as well: D/loss/mine.yaml is loss=mine
  --hydra-help    all flags

The options are files in {conf_dir()}
"""
