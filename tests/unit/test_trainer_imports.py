"""Who may import what in the trainer, from the source and from a fresh interpreter."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

TRAINER = Path(__file__).parents[2] / "trainer"
FILES = sorted(TRAINER.rglob("*.py"))


def imported(path: Path, *, lazily: bool) -> set[str]:
    """Top-level names of absolute imports; `lazily`: those inside functions too."""
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if lazily else [n for top in tree.body for n in _unnested(top)]
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(str(node.module).split(".")[0])
    return found


def _unnested(node: ast.stmt) -> list[ast.AST]:
    return [node, *node.body] if isinstance(node, (ast.With, ast.If, ast.Try)) else [node]


def room(path: Path) -> str:
    """A folder of the trainer, or a file beside them."""
    return path.relative_to(TRAINER).with_suffix("").parts[0]


def rooms_read(path: Path) -> set[str]:
    """The other rooms that a file of the trainer takes something from."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            target = path.parents[node.level - 1]
            named = node.module.split(".") if node.module else [alias.name for alias in node.names]
            if target == TRAINER:
                found |= {named[0]} if node.module else set(named)
    return found - {room(path)}


def test_there_is_something_to_check():
    assert {"plan.py", "trl_bridge.py", "loop.py", "commands.py", "lightning.py"} <= {f.name for f in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_nobody_imports_the_web_and_only_the_bridge_imports_trl(path):
    names = imported(path, lazily=True)
    assert not names & {"fastapi", "starlette", "uvicorn", "aiohttp", "vllm", "litellm"}
    assert ("trl" in names) == (path.name == "trl_bridge.py")


def test_arrows_between_rooms_run_one_way():
    reads: dict[str, set[str]] = {}
    for path in FILES:
        reads.setdefault(room(path), set()).update(rooms_read(path))
    assert {"credit", "reasons"} <= reads["planning"]
    TopologicalSorter(reads).prepare()  # CycleError, with the rooms, where they read one another


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_torch_is_imported_by_the_files_that_compute(path):
    heavy = imported(path, lazily=False) & {"torch", "transformers", "peft", "trl", "datasets", "accelerate"}
    assert not heavy or path.parent.name == "steps"


def test_the_command_starts_without_anything_heavy():
    program = (
        "import sys; import lightning_rl.trainer.commands;"
        "bad = {'torch', 'trl', 'transformers', 'numpy', 'sqlalchemy', 'fastapi'} & set(sys.modules);"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.slow
def test_a_run_never_imports_fastapi_and_looks_at_no_network():
    program = (
        "import sys, os; import lightning_rl.trainer.loop; from lightning_rl.trainer.steps import trl_bridge;"
        "bad = {'fastapi', 'vllm', 'lightning_rl.proxy'} & set(sys.modules); assert not bad, bad;"
        "assert os.environ['HF_HUB_OFFLINE'] == os.environ['HF_HUB_DISABLE_TELEMETRY'] == '1';"
        "import huggingface_hub.constants as c; assert c.HF_HUB_OFFLINE and c.HF_HUB_DISABLE_TELEMETRY"
    )
    clean = {"PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-c", program], check=True, env=clean)
