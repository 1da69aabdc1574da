"""Docstrings taken apart: what a function is, what it reads, where it comes from."""

import re
from dataclasses import dataclass
from inspect import cleandoc
from textwrap import dedent

_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Elsewhere|Source):\n", re.MULTILINE)
_ENTRY = re.compile(r"^(\w+): ", re.MULTILINE)
_ARXIV = re.compile(r"arXiv:(\d{4}\.\d{5})")
_DOI = re.compile(r"doi:(10\.\S+\w)")


@dataclass(frozen=True)
class Docstring:
    """The parts of a docstring in Google's convention, as Markdown.

    Attributes:
        text: what stands before the sections. Its indented blocks, the formulas, are code in
            Markdown as well.
        sections: what stands in each section, by its name.
    """

    text: str
    sections: dict[str, str]

    @classmethod
    def of(cls, documented: object) -> "Docstring":
        """The docstring of a function or a module."""
        text, *rest = _SECTION.split(cleandoc(documented.__doc__ or ""))
        sections = dict(zip(rest[::2], map(_plain, rest[1::2]), strict=True))
        return cls(linked(text.strip()), sections)

    @property
    def args(self) -> dict[str, str]:
        """The meaning of each argument, each on one line."""
        _, *rest = _ENTRY.split(self.sections.get("Args", ""))
        return dict(zip(rest[::2], map(one_line, rest[1::2]), strict=True))

    def line(self, section: str) -> str:
        """A section on one line; empty if there is none."""
        return linked(one_line(self.sections.get(section, "")))


def one_line(text: str) -> str:
    """The text without its line breaks."""
    return " ".join(text.split())


def linked(text: str) -> str:
    """Papers as links."""
    text = _ARXIV.sub(r"[arXiv:\1](https://arxiv.org/abs/\1)", text)
    return _DOI.sub(r"[doi:\1](https://doi.org/\1)", text)


def _plain(section: str) -> str:
    return dedent(section).strip()
