"""Options under the names that other projects give them."""

import re
from collections.abc import Sequence
from pathlib import Path

from lit_align.names import LOSS_ALIASES

_CHOICE = re.compile(r"loss=(?P<names>.+)")
_FOLDER = re.compile(r"(?:--config-dir|-cd)(?:=(?P<folder>.+))?")


def with_our_names(arguments: Sequence[str]) -> list[str]:
    """The command line with each loss of the option `loss` by our name.

    Files, recipes and run folders then are those of that name. A file of the user's own, under
    `--config-dir`, that has an alias for its name is what that name means.
    """
    taken = {path.stem for folder in _folders(arguments) for path in folder.glob("loss/*.yaml")}
    aliases = {alias: name for alias, name in LOSS_ALIASES.items() if alias not in taken}

    def ours(argument: str) -> str:
        if not (choice := _CHOICE.fullmatch(argument)):
            return argument
        names = re.sub(r"[\w-]+", lambda word: aliases.get(word[0], word[0]), choice["names"])
        return f"loss={names}"

    return [ours(argument) for argument in arguments]


def _folders(arguments: Sequence[str]) -> list[Path]:
    """Where options are looked for as well."""
    pairs = zip(arguments, [*arguments[1:], ""], strict=False)
    found = ((_FOLDER.fullmatch(argument), after) for argument, after in pairs)
    return [Path(match["folder"] or after) for match, after in found if match]
