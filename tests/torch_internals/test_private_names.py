"""No file but torch_internals uses private names of torch."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
INTERNALS = "zoo/torch_internals"


#: Attributes that are no more private in practice than the documented ones, and that a function around them would only
#: hide or slow down; tests above state what the package relies on.
SEMI_PUBLIC = {
    "_version": "the version counter of a tensor, which error messages of torch name",
    "_parameters": "torch.nn.Module's own dictionary: None where a parameter is missing",
    "_buffers": "torch.nn.Module's own dictionary: None where a buffer is missing",
    "_modules": "torch.nn.Module's own dictionary: a module may be in it under several names",
}

#: Private names of other packages.
NOT_OF_TORCH = {
    "_SubParsersAction": "argparse, whose classes of parsers and groups have no public names",
    "_current_indent": "argparse, whose formatter of help has no public attributes",
    "_indent_increment": "argparse, whose formatter of help has no public attributes",
    "_replace": "typing.NamedTuple, documented",
    "_fields": "collections.namedtuple, documented",
    "_init_handles": "triton, which loads compiled code with it",
}


def _names_of_its_own(tree: ast.AST) -> set[str]:
    """Return the names that a file defines: functions, classes, variables and attributes."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return names


def _is_private(name: object) -> bool:
    return isinstance(name, str) and name.isidentifier() and name.startswith("_") and name.strip("_") != ""


def _private_names(tree: ast.AST) -> list[tuple[int, str, str]]:
    """Return (line, owner, name) of the private names that a file reads from modules and objects."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            paths = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            paths = [(node.module or "", alias.name) for alias in node.names]
        elif isinstance(node, ast.Attribute):
            if _is_private(node.attr):  # most are not, and to unparse takes time
                found.append((node.lineno, ast.unparse(node.value), node.attr))
            continue
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            found.append((node.lineno, ast.unparse(node.args[0]), name))
            continue
        else:
            continue
        for module, name in paths:
            if module.split(".")[0] == "torch":
                found += [(node.lineno, module, part) for part in [*module.split("."), name]]
    return [each for each in found if _is_private(each[2]) and not each[2].startswith("__")]


@cache
def _trees() -> dict[str, ast.AST]:
    paths = {str(path.relative_to(ROOT)): path for path in sorted((ROOT / "zoo").rglob("*.py"))}
    return {name: ast.parse(path.read_text()) for name, path in paths.items() if not name.startswith(INTERNALS)}


def test_no_other_file_uses_private_name_of_torch():
    trees = _trees()
    of_package = set().union(*map(_names_of_its_own, trees.values()))
    found = []
    for file, tree in trees.items():
        own = _names_of_its_own(tree)
        for line, owner, name in _private_names(tree):
            known = of_package if owner in ("self", "cls", "super()") else own
            is_torch = owner.split(".")[0] == "torch"
            if is_torch or name not in known | SEMI_PUBLIC.keys() | NOT_OF_TORCH.keys():
                found.append(f"{file}:{line}: {owner}.{name}")
    assert found == [], f"give these names a place in {INTERNALS}"


def test_every_listed_exception_is_used():
    used = {name for tree in _trees().values() for _, _, name in _private_names(tree)}
    assert used >= SEMI_PUBLIC.keys() | NOT_OF_TORCH.keys()
