"""A few completions of a rollout as a table that a terminal can show, whatever they contain."""

import io
import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lit_align.rollout import Rollout, Sample

# Characters of a text that are shown; of a longer one, its beginning and its end.
PROMPT, COMPLETION = 200, 400


def telling(rollout: Rollout, rows: int) -> list[Sample]:
    """Of one prompt after another the completion that did best and the one that did worst."""
    picked: list[Sample] = []
    for group in rollout.groups():
        ranked = sorted(group, key=lambda sample: -sample.advantage)
        picked += ranked if len(ranked) == 1 else [ranked[0], ranked[-1]]
        if len(picked) >= rows:
            break
    return picked[:rows]


def rendered(rollout: Rollout, samples: Sequence[Sample]) -> str:
    """The table as text, as wide as the terminal and in characters that it has."""
    terminal = Console()
    buffer = io.BytesIO()
    file = io.TextIOWrapper(
        buffer, encoding=terminal.encoding, errors="backslashreplace", newline="\n"
    )
    Console(file=file, width=terminal.width).print(table(rollout, samples))
    file.flush()
    return buffer.getvalue().decode(terminal.encoding).rstrip("\n")


def table(rollout: Rollout, samples: Sequence[Sample]) -> Table:
    """One line per completion; a prompt stands where its first completion does."""
    found = Table(
        title=f"rollout {rollout.number}, written after {rollout.version} steps", show_lines=True
    )
    found.add_column("prompt", ratio=2, overflow="fold")
    found.add_column("completion", ratio=3, overflow="fold")
    for name in ("rewards", "advantage", "end"):
        found.add_column(name, justify="right")
    group = None
    for sample in samples:
        prompt = "" if sample.group == group else as_text(sample.prompt)
        group = sample.group
        cells = (
            shortened(prompt, PROMPT),
            shortened(sample.completion, COMPLETION),
            rewards(sample),
            f"{sample.advantage:+.3g}",
            sample.finish_reason,
        )
        # As Text: square brackets in what a model writes are no markup.
        found.add_row(*map(Text, cells))
    return found


def rewards(sample: Sample) -> str:
    """Each reward by name, and their weighted sum if there are several."""
    lines = [f"{name} {_shown(value)}" for name, value in sample.rewards.items()]
    return "\n".join([*lines, f"total {_shown(sample.reward)}"] if len(lines) > 1 else lines)


def as_text(prompt: Any) -> str:
    """A prompt for people: a text, or who says what."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {message.get('content')}" for message in prompt)


def shortened(text: str, most: int) -> str:
    """The text on one line, its middle left out if it is long; what cannot be seen is escaped."""
    visible = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    if len(visible) <= most:
        return visible
    gap = f" [... {len(visible) - most} characters ...] "
    return visible[: most // 2] + gap + visible[-(most // 2) :]


def _shown(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.3g}"
