"""What the command does where its output can't be written."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this machine has no /dev/full")
@pytest.mark.parametrize("arguments", [("credit", "list"), ("credit", "list", "--json")])
def test_a_full_disk_under_the_output_is_one_line(arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "lightning_rl.cli", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert result.stderr == "lightning: can't write the output: No space left on device\n"
    assert result.returncode == 2
