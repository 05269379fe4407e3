"""The house's one rule of imports: a room imports itself and the rooms to its right, and no module imports in a circle.

Read from the source, so that a wrong import inside a function or under TYPE_CHECKING counts too; only the circle test
leaves those out, since they do not run at import time.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("tui", "node", "backends", "partitioner", "discovery")
TEST_ONLY = {"tests", "pytest", "hypothesis", "torch", "transformers", "gguf", "safetensors"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources() -> dict[str, Path]:
    return {module_name(path): path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))}


def is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def statements(tree: ast.AST, *, at_import: bool) -> Iterator[ast.stmt]:
    """Import statements; with `at_import` those alone that run when the module is imported."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif at_import and (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or is_type_checking(node)
        ):
            continue
        else:
            yield from statements(node, at_import=at_import)


def imported(path: Path, modules: dict[str, Path], *, at_import: bool = False) -> Iterator[str]:
    """Full names of the modules that a file imports. `from a import b` is a.b if that is a module of ours."""
    for node in statements(ast.parse(path.read_text("utf-8")), at_import=at_import):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute here"
            base = node.module or ""
            for alias in node.names:
                yield full if (full := f"{base}.{alias.name}") in modules else base


def wrong_way(modules: dict[str, Path]) -> list[str]:
    found = []
    for name, path in modules.items():
        room = ROOMS.index(name.split(".")[0])
        for target in imported(path, modules):
            top = target.split(".")[0]
            if top in ROOMS and ROOMS.index(top) < room:
                found.append(f"{name} imports {target}")
    return found


def test_imports_point_right() -> None:
    assert wrong_way(sources()) == []


def test_an_import_to_the_left_is_seen(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text("def late():\n    from node.errors import UsageError\n")
    assert wrong_way({"backends.wrong": wrong}) == ["backends.wrong imports node.errors"]


def test_no_module_imports_in_a_circle() -> None:
    modules = sources()
    graph = {
        name: {t for t in imported(path, modules, at_import=True) if t in modules} for name, path in modules.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as exc:
        pytest.fail(f"a circle of imports: {' -> '.join(exc.args[1])}")


def test_the_base_install_never_imports_test_or_extra_packages_at_import_time() -> None:
    modules = sources()
    found = [
        f"{name} imports {target}"
        for name, path in modules.items()
        for target in imported(path, modules, at_import=True)
        if target.split(".")[0] in TEST_ONLY | {"llama_cpp", "mlx"}
    ]
    assert found == []
