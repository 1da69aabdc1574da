"""What a user reads when a run does not work out.

A mistake in what was given is told in one message. A fault of the program keeps its traceback:
hiding that would hide where to look. HYDRA_FULL_ERROR=1 shows the traceback of everything.
"""

import errno
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from typing import Any

from hydra.errors import HydraException, InstantiationException, MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from lit_align.errors import UserError
from lit_align.names import LOSSES, TERM_OPTIONS, elsewhere

_PLACE_ERRORS = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR),
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
}
_FULL = "HYDRA_FULL_ERROR"
_wanted = os.environ.get(_FULL)


def hydra_raises() -> None:
    """Let Hydra raise what goes wrong while it composes, for `explain` to tell."""
    os.environ[_FULL] = "1"


def restore_environment() -> None:
    """Give processes started from here on what the user had set."""
    if _wanted is None:
        os.environ.pop(_FULL, None)
    else:
        os.environ[_FULL] = _wanted


def headline(error: BaseException) -> str:
    """The error in a line or two, for a table or a log."""
    return mistake(error) or "".join(traceback.format_exception_only(error)).strip()


def explain(error: BaseException) -> str:
    """What to print: `error: ...` for a mistake, the traceback for a fault."""
    said = mistake(error)
    if said is None or _wanted == "1":
        return "".join(traceback.format_exception(error)).strip()
    return f"error: {said}"


def mistake(error: BaseException) -> str | None:
    """The message if the user can mend the error, None if only a programmer can."""
    for one in causes(error):
        for kind, tell in _TOLD.items():
            if isinstance(one, kind) and (said := tell(one)):
                return said
    if isinstance(error, InstantiationException):
        return _not_built(error)
    if isinstance(error, HydraException | OmegaConfBaseException) or _misconfigured(error):
        return str(error).strip()
    return None


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error, what caused it, what caused that."""
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _unknown_key(error: OmegaConfBaseException) -> str | None:
    """Which keys there are, and which was meant; Hydra would advise to add the unknown one."""
    node, key, full_key = error.parent_node, str(error.key), str(error.full_key)
    if not isinstance(node, DictConfig):
        return None
    parent = full_key.removesuffix(key)
    hidden = ("_", "hydra")
    known = [str(name) for name in node if not str(name).startswith(hidden)]
    ours = _of_terms(key, node, parent) or elsewhere(key)
    meant = ours or _meant(key, known, parent)
    where = f"'{parent.rstrip('.')}'" if parent else "the configuration"
    lines = [f"no key '{full_key}'{meant}", f"{where} has: {', '.join(known)}"]
    # Only what is built of options can take one that is not written down.
    if not ours and ("_target_" in node or ".terms." in full_key):
        lines.append(f"an option that is not listed there is added with a plus: +{_new(error)}=...")
    return "\n".join(lines)


def _of_terms(key: str, node: DictConfig, parent: str) -> str:
    """Where the terms of a sum of losses have the key, to end a message with."""
    terms = _terms(node)
    names = {term: TERM_OPTIONS.get((term, key), key) for term in terms}
    places = [f"{parent}terms.{term}.{ours}" for term, ours in names.items() if ours in terms[term]]
    return f"; of a sum it is said of a term: {', '.join(places)}" if places else ""


def _new(error: OmegaConfBaseException) -> str:
    """The place of a key to add: of a sum of losses, its first term."""
    full_key, key = str(error.full_key), str(error.key)
    first = next(iter(_terms(error.parent_node)), None)
    return f"{full_key.removesuffix(key)}terms.{first}.{key}" if first else full_key


def _terms(node: DictConfig) -> dict[str, DictConfig]:
    """The terms of a sum of losses, by name; none of anything else."""
    terms = node.get("terms", {})
    return {str(n): term for n, term in terms.items() if isinstance(term, DictConfig)}


def _unknown_option(error: MissingConfigException) -> str | None:
    """Which options a group has, and which was meant; Hydra would list them one below the other."""
    group, _, name = (error.missing_cfg_file or "").rpartition("/")
    if not group or not error.options:
        return None
    theirs = elsewhere(name, LOSSES) if group == "loss" else ""
    meant = theirs or _meant(name, error.options, f"{group}=")
    return f"no option '{name}' of {group}{meant}\n{group} has: {', '.join(error.options)}"


def _meant(name: str, known: Sequence[str], before: str) -> str:
    """The one of the known names that may have been meant, to end a message with."""
    close = get_close_matches(name, known, n=1)
    return f"; did you mean {before}{close[0]}?" if close else ""


def _not_built(error: InstantiationException) -> str | None:
    """Hydra's message for an argument that does not fit; None if the fault lies deeper."""
    *_, root = causes(error)
    if _misconfigured(root):
        return str(root).strip()
    if root is not error and not isinstance(root, TypeError | ValueError | ImportError):
        return None
    said = str(error).replace(f", set env var {_FULL}=1 to see chained exception", "").strip()
    told = headline(root)
    return said if root is error or repr(root) in said else f"{said}\n{told}"


def _null_group(error: ValueError) -> str | None:
    """What to write instead of GROUP=null for a group that must have an option."""
    if str(error).startswith("Config group override must be"):
        return "a group cannot be null: choose an option (scheduler=constant, logger=none)"
    return None


def _unusable_place(error: OSError) -> str | None:
    """Which file or folder cannot be written or read, if that is for the user to mend."""
    if error.errno in _PLACE_ERRORS and error.filename:
        return f"{error.strerror}: {error.filename}"
    return None


def _misconfigured(error: BaseException) -> bool:
    """Whether Lightning refused the combination of options."""
    # By name: at this point Lightning need not be there, and importing it takes seconds.
    return type(error).__name__ == "MisconfigurationException"


def _missing_value(error: OmegaConfBaseException) -> str:
    """How to give a value that has no default."""
    return f"{error.full_key} has no default: set {error.full_key}=..."


_TOLD: dict[type[BaseException], Callable[[Any], str | None]] = {
    UserError: str,
    ConfigAttributeError: _unknown_key,
    ConfigKeyError: _unknown_key,
    MissingMandatoryValue: _missing_value,
    MissingConfigException: _unknown_option,
    ValueError: _null_group,
    OSError: _unusable_place,
}
