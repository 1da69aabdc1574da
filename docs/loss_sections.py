"""One section of the page: of a loss, of a combination, of a preset, of a choice on an axis."""

import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from loss_docstrings import Docstring, linked
from loss_files import LossFile

from lit_align.losses import Variant, Variants

ROOT = Path(__file__).parents[1]
# What a choice is called, by the option of a policy loss that makes it.
AXES = {
    "loss_fn": "Surrogate",
    "ratio_level": "Ratio level",
    "aggregation": "Aggregation",
    "advantage": "Advantage",
    "correction": "Correction",
    "token_filter": "Token filter",
    "kl_estimator": "KL estimator",
    "entropy_control": "Entropy control",
}
# What a loss may need, by the property that says so.
NEEDS = {
    "reads_reference": "a reference",
    "reads_lengths": "the responses' lengths",
    "reads_alignment": "terms of alignment of each token, unless `alignment` is none",
    "reads_heads": "log-probs of the length that both responses have in common",
    "reads_prompt": "log-probs of the prompt",
    "reads_mismatched": "log-probs of completions of other prompts",
    "whole_window": "all rows of an optimizer step",
}


def loss_section(variant: Variant, table: Variants, config: Any) -> str:
    """A loss."""
    doc, file = Docstring.of(variant.fn), LossFile.read(variant.name)
    return joined(
        f"### `{variant.name}`",
        doc.text,
        bullets(
            {
                "Also called": also_called(variant, table),
                "Log-probs": "means per token" if variant.average_logps else "sums",
                "Needs": needs(config),
                **said(doc),
                "Code": links(variant, variant.name if file.body else ""),
            }
        ),
        symbols(doc.args, variant, file),
        picture(variant.name),
    )


def combination_section(name: str, config: Any) -> str:
    """What a file makes of losses."""
    file = LossFile.read(name)
    terms = ", ".join(f"[`{term}`](#{term})" for term in config.terms)
    return joined(
        f"### `{name}`",
        linked(file.title),
        f"```yaml\n{file.body}\n```",
        *(_added(group, option) for group, option in file.added),
        bullets({"Terms": terms, "Needs": needs(config), "File": file_link(name)}),
        picture(name),
    )


def _added(group: str, option: str) -> str:
    """What an option of another group adds."""
    file = LossFile.read(option, group)
    return joined(
        f"And with it [`{group}/{option}`](../conf/{group}/{option}.yaml): {linked(file.title)}",
        f"```yaml\n{file.body}\n```",
    )


def preset_section(name: str, axes: Mapping[str, Variants], group: str = "loss") -> str:
    """Choices on the axes of a policy loss, and hyperparameters."""
    file = LossFile.read(name, group)
    heading = f"### `{name}`" if group == "loss" else f"### `{group}={name}`"
    rows = [
        (f"`{key}`", chosen(key, setting.value, axes), linked(setting.origin))
        for key, setting in file.settings.items()
    ]
    link = bullets({"File": file_link(name, group)})
    return joined(heading, linked(file.title), link, as_table(("option", "value", "why"), rows))


def axis_section(option: str, variant: Variant, table: Variants) -> str:
    """A choice on an axis of policy losses."""
    doc = Docstring.of(variant.fn)
    return joined(
        f"### {AXES[option]} `{variant.name}`",
        doc.text,
        bullets(
            {
                "Also called": also_called(variant, table),
                "Needs": NEEDS["whole_window"] if variant.whole_window else "",
                **said(doc),
                "Code": links(variant),
            }
        ),
        symbols(doc.args, variant),
        picture(f"surrogate-{variant.name}") if option == "loss_fn" else "",
    )


def needs(config: Any) -> str:
    """What a config of pairs or completions says that it needs."""
    needed = [text for name, text in NEEDS.items() if getattr(config, name, False)]
    needed += [f"the column `{name}` of the data" for name in getattr(config, "columns", ())]
    return ", ".join(needed) or "nothing besides"


def chosen(key: str, value: str, axes: Mapping[str, Variants]) -> str:
    """A value of a preset; a choice on an axis leads to what it is."""
    if key not in axes:
        return f"`{value}`"
    variant = axes[key][value]
    return f"[`{value}`](#{slug(f'{AXES[key]} {variant.name}')})"


def symbols(meanings: Mapping[str, str], variant: Variant, file: LossFile | None = None) -> str:
    """What the function reads: tensors, then hyperparameters with their defaults."""
    tensors = [name for name in (*variant.tensors, *variant.optional_tensors) if name in meanings]
    rows = [(f"`{name}`", meanings[name], "") for name in tensors]
    for name, hyperparameter in variant.hyperparameters.items():
        default = f"`{shown(hyperparameter.default)}`"
        if file and name in file.settings:
            value, origin = file.settings[name]
            default = ": ".join(filter(None, (f"`{value}`", origin)))
        rows.append((f"`{name}`", meanings.get(name, ""), default))
    return as_table(("symbol", "meaning", "default"), rows) if rows else ""


def shown(default: Any) -> str:
    """A default of a signature."""
    if default is inspect.Parameter.empty:
        return "none: to be given"
    is_number = isinstance(default, int | float)
    return f"{default:g}" if is_number else str(default)


def said(doc: Docstring) -> dict[str, str]:
    """What a docstring says of others and of where it has things from."""
    return {
        "What others do": doc.line("Elsewhere"),
        "Returns": doc.line("Returns"),
        "Source": doc.line("Source"),
    }


def also_called(variant: Variant, table: Variants) -> str:
    """The other names under which a table finds it."""
    return ", ".join(f"`{alias}`" for alias, own in table.aliases.items() if own == variant.name)


def links(variant: Variant, file: str = "") -> str:
    """Where the function and its file lie."""
    path = Path(inspect.getsourcefile(variant.fn) or "").resolve().relative_to(ROOT.resolve())
    code = f"[`{variant.fn.__name__}`](../{path.as_posix()})"
    return f"{code}, {file_link(file)}" if file else code


def file_link(name: str, group: str = "loss") -> str:
    """The file of an option."""
    return f"[`conf/{group}/{name}.yaml`](../conf/{group}/{name}.yaml)"


def picture(name: str) -> str:
    """The plot of that name."""
    return f"![loss and slope of {name}](plots/{name}.svg)"


def bullets(parts: Mapping[str, str]) -> str:
    """What there is to say, under its names."""
    return "\n".join(f"- **{name}**: {text}" for name, text in parts.items() if text)


def as_table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    lines = [head, ("---",) * len(head), *rows]
    cells = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def joined(*paragraphs: str) -> str:
    """Paragraphs one below the other, without the empty ones."""
    return "\n\n".join(filter(None, paragraphs))


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    kept = (letter for letter in heading.lower() if letter.isalnum() or letter in " -_")
    return "".join(kept).replace(" ", "-")
