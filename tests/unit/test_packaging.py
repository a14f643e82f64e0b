"""One import package, nothing forgotten, arrows one way."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = PROJECT["tool"]["setuptools"]["packages"]
OUTSIDE_THE_PACKAGE = {"tests", "docs", "examples", "bench", "build", "dist", "configs"}


def _tree_packages() -> set[str]:
    folders = {path.parent.relative_to(ROOT) for path in ROOT.rglob("__init__.py")}
    inside = {
        folder
        for folder in folders
        if not folder.parts or not (folder.parts[0] in OUTSIDE_THE_PACKAGE or folder.parts[0][0] == ".")
    }
    return {".".join(("lightning_rl", *folder.parts)) for folder in inside}


def test_every_package_of_the_tree_is_listed():
    assert _tree_packages() == set(PACKAGES)


def _imports(path: Path, package: str) -> set[str]:
    """Absolute names of everything that a file imports, lazily or not; relative ones resolved."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{module}.{alias.name}" for alias in node.names} | {module}
    return found


def _files(package: str) -> list[tuple[Path, str]]:
    folder = ROOT.joinpath(*package.split(".")[1:])
    return [
        (path, ".".join(("lightning_rl", *path.relative_to(ROOT).parent.parts)))
        for path in folder.rglob("*.py")
    ]


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        (
            "lightning_rl.store",
            ("lightning_rl.proxy", "lightning_rl.trainer", "lightning_rl.engine", "fastapi", "torch"),
        ),
        (
            "lightning_rl.engine",
            ("lightning_rl.proxy", "lightning_rl.trainer", "lightning_rl.store", "fastapi", "vllm"),
        ),
        ("lightning_rl.trainer", ("lightning_rl.proxy", "fastapi", "aiohttp", "lightning_rl.engine.client")),
        ("lightning_rl.proxy", ("lightning_rl.trainer", "torch", "transformers", "trl", "numpy")),
    ],
)
def test_arrows_run_one_way(package, forbidden):
    for path, inside in _files(package):
        runs_in_vllm = path == ROOT / "engine" / "worker.py"
        bad = [
            name
            for name in _imports(path, inside)
            if not (runs_in_vllm and name.startswith("vllm."))
            if any(name == f or name.startswith(f + ".") for f in forbidden)
        ]
        assert not bad, f"{path.relative_to(ROOT)} imports {bad}"


def test_arrows_between_the_proxy_s_rooms_run_one_way():
    """Its folders; the way of a call (relay, exchange, …) lies above and beside them."""
    reads: dict[str, set[str]] = {}
    for path, inside in _files("lightning_rl.proxy"):
        room = inside.split(".")[2:3]
        named = [name.split(".") for name in _imports(path, inside)]
        others = {name[2] for name in named if name[:2] == ["lightning_rl", "proxy"] and len(name) > 3}
        if room:
            reads.setdefault(room[0], set()).update(others - {*room})
    assert {"attribution", "live", "transport"} <= set(reads)
    TopologicalSorter(reads).prepare()  # CycleError, with the rooms, where they read one another


def test_only_the_bridge_knows_trl():
    importers = {
        path.name
        for path, inside in _files("lightning_rl.trainer")
        if any(n.split(".")[0] == "trl" for n in _imports(path, inside))
    }
    assert importers == {"trl_bridge.py"}


def test_only_the_store_builds_sql():
    """Elsewhere sqlalchemy is at most a type (`sa.Connection`) and never a statement."""
    for package in ("lightning_rl.proxy", "lightning_rl.trainer", "lightning_rl.engine"):
        for path, inside in _files(package):
            names = {
                n
                for n in _imports(path, inside)
                if n.split(".")[0] == "sqlalchemy" or n.startswith("lightning_rl.store.schema")
            }
            assert names <= {"sqlalchemy", "sqlalchemy.Connection"}, f"{path.relative_to(ROOT)}: {names}"
            tree = ast.parse(path.read_text())
            calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
            assert not {c for c in calls if c.startswith("sa.")}, f"{path.relative_to(ROOT)} builds SQL"


def test_importing_the_command_line_is_light():
    """`lightning --help` must not wait for torch, fastapi or SQL."""
    heavy = ("torch", "transformers", "trl", "fastapi", "litellm", "aiohttp", "alembic", "vllm")
    program = f"import sys, lightning_rl.cli; print([m for m in {heavy!r} if m in sys.modules])"
    assert (
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )
