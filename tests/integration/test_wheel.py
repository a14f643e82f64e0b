"""The wheel holds one top-level name and every package of the tree."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_wheel_holds_one_name_and_all_packages(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert top == {"lightning_rl"}
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    held = {str(Path(name).parent).replace("/", ".") for name in names if name.endswith("__init__.py")}
    assert held == set(packages)
    assert "lightning_rl/migrations/script.py.mako" in names
    assert any(name.startswith("lightning_rl/migrations/versions/0001") for name in names)
    assert any(name.startswith("lightning_rl/configs/") and name.endswith(".toml") for name in names)
