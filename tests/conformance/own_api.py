"""Our own API under schemathesis: whatever is sent to it, it never fails with a 5xx."""

from __future__ import annotations

import re
import subprocess
import sys

from lightning_rl.tests.conformance.running import Running

_GENERATED = re.compile(r"(\d+) generated")


def fuzz_own_api(running: Running, max_examples: int = 40) -> tuple[int, list[str]]:
    """How many requests were made up, and what came of those that failed."""
    url = "http://{}:{}/lightning/api/openapi.json".format(*running.address)
    command = [sys.executable, "-m", "schemathesis.cli", "run", url, "--checks", "not_a_server_error"]
    command += ["--max-examples", str(max_examples), "--seed", "1", "--no-color", "--warnings", "off"]
    command += ["--generation-database", "none"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = _GENERATED.search(done.stdout)
    faults = [] if done.returncode == 0 else [f"schemathesis: {(done.stdout + done.stderr)[-3000:]}"]
    return int(found.group(1)) if found else 0, faults
