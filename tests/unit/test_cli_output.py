"""What the command does where its output can't be written."""

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_rl.engine.check import Finding, render


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


def test_flags_that_the_engine_lacks_can_be_copied_from_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--logprobs-mode processed_logprobs VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 --enable-scale-out"
    render("http://x", [Finding("a", False, True, "found " * 10, "lost " * 10, flags)])
    said = capsys.readouterr().out
    assert flags in said
    assert "NO: recording is not exact without it" in said
