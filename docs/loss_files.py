"""Files of `conf`: the values, and what their comments say of where they come from."""

import re
from pathlib import Path
from typing import NamedTuple

CONF = Path(__file__).parents[1] / "conf"
_SETTING = re.compile(r"^ *(\w+): +([^#\s][^#]*?)? *(?:# (.*))?$")
_HIDDEN = ("# @package", "defaults:", "  - ")
_ADDED = re.compile(r"^  - /(\w+)/(\w+)\b", re.MULTILINE)


class Setting(NamedTuple):
    """One value as it is written, and the comment behind it."""

    value: str
    origin: str


class LossFile(NamedTuple):
    """What a file says.

    Attributes:
        title: the comment at its head: full name and source.
        settings: by name.
        body: what is below the title, as it stands.
        added: the files of other groups that it brings with it, group and name.
    """

    title: str
    settings: dict[str, Setting]
    body: str
    added: list[tuple[str, str]]

    @classmethod
    def read(cls, name: str, group: str = "loss") -> "LossFile":
        """The file of an option; without one, as of what is only a term of others, nothing."""
        path = CONF / group / f"{name}.yaml"
        if not path.exists():
            return cls("", {}, "", [])
        text = path.read_text()
        lines = text.splitlines()
        lines = [line for line in lines if not line.startswith(_HIDDEN)]
        head = next(i for i, line in enumerate(lines) if not line.startswith("#"))
        title = " ".join(line.removeprefix("#").strip() for line in lines[:head])
        settings = {
            found[1]: Setting(found[2], found[3] or "")
            for found in map(_SETTING.match, lines[head:])
            if found and found[2] and not found[1].startswith("_")
        }
        return cls(title, settings, "\n".join(lines[head:]).strip(), _ADDED.findall(text))


def names(group: str = "loss") -> list[str]:
    """The options of a group."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))
