"""A few kills of what `make crash-test` does by the hundred, so that neither the proxy nor that test rots."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.postgres_server import PostgresMissingError, programs

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.postgres


def test_nothing_delivered_is_lost_in_a_few_kills() -> None:
    try:
        programs()
    except PostgresMissingError as error:
        pytest.skip(str(error))
    kills = ["--sqlite-kills", "4", "--postgres-kills", "4", "--write-behind-kills", "0"]
    command = [sys.executable, str(ROOT / "bench" / "crash" / "run.py"), *kills]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["kills"], result["missing"], result["verify_failures"]) == (8, 0, 0)
    assert result["delivered"] > 0
    assert result["server_crashes"] == 1
    assert result["database"] == ["sqlite", "postgres"]
