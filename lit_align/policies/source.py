"""Where a policy's files are: a folder, a GGUF file, the bundled model, or the model hub."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from safetensors import SafetensorError

from lit_align.errors import UserError, missing_extra

BUNDLED = {"tiny": Path(__file__).parents[1] / "resources" / "tiny"}


def locate(pretrained: str) -> dict[str, str]:
    """The arguments by which `from_pretrained` finds `pretrained`.

    Args:
        pretrained: a name in `BUNDLED`, a folder, a .gguf file, or an id on the model hub, looked
            for in this order.

    Raises:
        UserError: if it names a file or folder that is not there or not a model.
    """
    if pretrained in BUNDLED:
        return {"pretrained_model_name_or_path": str(BUNDLED[pretrained])}
    path = Path(pretrained).expanduser()
    if path.suffix == ".gguf":
        return _gguf(path)
    if path.is_dir():
        return _folder(path)
    if path.is_file():
        raise UserError(f"'{path}' is a file: give the folder of a model, or a .gguf file")
    if _is_local_by_its_looks(pretrained):
        raise UserError(f"there is no folder '{path}' (looked from {Path.cwd()})")
    return {"pretrained_model_name_or_path": pretrained}


@contextmanager
def readable_errors(pretrained: str) -> Iterator[None]:
    """Turns what goes wrong while loading `pretrained` into one message."""
    try:
        yield
    except UserError:
        raise
    except SafetensorError as error:
        raise UserError(f"the weights of '{pretrained}' cannot be read: {error}") from error
    except OSError as error:
        # Everything the hub refuses, and files that a folder lacks.
        if Path(pretrained).expanduser().exists() or pretrained in BUNDLED:
            raise UserError(f"'{pretrained}' is not complete: {_first_line(error)}") from error
        raise UserError(
            f"'{pretrained}' is neither a folder nor reachable on the model hub "
            f"(misspelt, private, or no connection): {_first_line(error)}"
        ) from error
    except (ValueError, ImportError) as error:
        raise UserError(f"cannot load '{pretrained}': {error}") from error


def _gguf(path: Path) -> dict[str, str]:
    """A quantised file, in the words of `from_pretrained`."""
    if not path.is_file():
        raise UserError(f"there is no file '{path}' (looked from {Path.cwd()})")
    for package in ("gguf", "accelerate"):
        if find_spec(package) is None:
            raise missing_extra(package, "gguf")
    # Absolute: a bare name would be looked for in the working directory first.
    path = path.resolve()
    return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": str(path)}


def _folder(path: Path) -> dict[str, str]:
    """A folder that holds a model."""
    if not (path / "config.json").is_file():
        raise UserError(f"the folder '{path}' holds no config.json, so it is not a model")
    return {"pretrained_model_name_or_path": str(path)}


def _is_local_by_its_looks(pretrained: str) -> bool:
    """Ids on the hub are `name` or `owner/name`; anything longer or anchored is a path."""
    return pretrained.startswith(("/", ".", "~")) or pretrained.count("/") > 1


def _first_line(error: Exception) -> str:
    """What an exception says first; the rest of it is advice for other programs."""
    return str(error).strip().partition("\n")[0]
