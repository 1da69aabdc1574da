"""Imports point down the layers, and each layer knows only its own libraries."""

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "lit_align"
# Lowest first; those on one line may know each other.
LAYERS = [
    {"errors", "lean", "matmul", "names", "ops", "resources"},
    {"losses"},
    {"logprobs"},
    {"policies"},
    {"data", "rewards", "rollout"},
    {"modules"},
    {"callbacks"},
    {"cli", "__main__"},
]
# Where a layer is not listed, it may import what it likes, except for Hydra.
LIBRARIES = {
    "errors": set(),
    "lean": {"torch"},
    "matmul": {"torch"},
    "names": set(),
    "ops": {"torch"},
    "losses": {"torch"},
    "logprobs": {"torch", "transformers"},
}
FORBIDDEN = {"policies": {"lightning"}, "resources": {"lightning"}}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def layer(path):
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def rank(name):
    return next(i for i, names in enumerate(LAYERS) if name in names)


def imports(source):
    """Dotted names of all imports, also of those inside functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute, so that this test can read them"
            yield node.module


def points_up(own, part):
    # `from lit_align import X` would hide which layer X is of.
    return part is None or rank(part) > rank(own)


def is_foreign(own, library):
    """Whether a library is not for this layer."""
    if library in {"hydra", "omegaconf"}:
        return own != "cli"
    known = sys.stdlib_module_names | LIBRARIES.get(own, {library})
    return library in FORBIDDEN.get(own, ()) or library not in known


def violations(path, source):
    own = layer(path)
    for name in imports(source):
        root, part, *_ = [*name.split("."), None]
        if points_up(own, part) if root == "lit_align" else is_foreign(own, root):
            yield name


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    assert list(violations(path, path.read_text())) == []


def test_every_file_belongs_to_a_layer():
    assert {layer(path) for path in FILES} <= set.union(*LAYERS)


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("losses/preference.py", "import lightning"),
        ("losses/preference.py", "def f():\n    from transformers import AutoModel"),
        ("ops.py", "from lit_align.losses import DPOConfig"),
        ("data/rows.py", "from lit_align.callbacks import ReferenceCache"),
        ("modules/dpo.py", "from omegaconf import DictConfig"),
        ("callbacks/save_policy.py", "from lit_align import DPOModule"),
        ("policies/recipe.py", "import lightning.pytorch"),
    ],
)
def test_an_import_that_points_up_is_found(file, line):
    assert list(violations(PACKAGE / file, line))
