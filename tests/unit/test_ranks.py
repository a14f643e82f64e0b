"""Several ranks on a CPU, over gloo: they compute what one process computes, and end together."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import tiny_models
from fakes.recorded_log import play_group
from safetensors.torch import load_file

from lightning_rl.store.database import Database

REPOSITORY = Path(__file__).parents[2]
PROGRAM = REPOSITORY / "tests" / "fakes" / "rank_step.py"
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}
KINDS: dict[str, dict[str, str]] = {"DDP": {}, "FSDP2": FSDP2}
STEPS: dict[str, dict[str, Any]] = {
    "full": {"weights": "full"},
    "LoRA": {"weights": "lora"},
    "full, reference, checkpointing": {"weights": "full", "kl": 0.5, "checkpointing": True, "max_tokens": 40},
    "LoRA, reference, checkpointing": {"weights": "lora", "kl": 0.5, "checkpointing": True, "max_tokens": 40},
    "LoRA, one micro-batch for two": {"weights": "lora", "num_calls": 1, "max_tokens": 4096},
    "LoRA, corrected, gspo": {"weights": "lora", "correction": "truncate", "objective": "gspo"},
    "LoRA, reference, sapo": {"weights": "lora", "kl": 0.5, "objective": "sapo"},
}


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(REPOSITORY / "tests"), *sys.path])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | more


def run(arguments: list[str], **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments, env=environment(**more), capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Every step, by kind and name: "one" process, or two ranks of a kind."""
    known: dict[str, Any] = {}

    def find(kind: str) -> Any:
        if kind not in known:
            out = tmp_path_factory.mktemp("steps") / "steps.pt"
            program = [str(PROGRAM), str(out), json.dumps(STEPS)]
            more: dict[str, str] = {}
            if kind != "one":
                program = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *program]
                more = {"ACCELERATE_USE_CPU": "true"} | KINDS[kind]
            done = run([sys.executable, *program], **more)
            assert done.returncode == 0, done.stderr[-3000:]
            known[kind] = torch.load(out, weights_only=True)
        return known[kind]

    return find


def apart(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> float:
    """Norm of the difference over the norm."""
    assert one.keys() == two.keys()
    a, b = (torch.cat([found[name].reshape(-1) for name in one]) for found in (one, two))
    return float((a - b).norm() / a.norm())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", STEPS)
def test_two_ranks_take_the_step_of_one(name: str, kind: str, taken: Any) -> None:
    one, two = taken("one")[name], taken(kind)[name]
    assert two["sharded"] == (kind == "FSDP2")
    assert apart(one["gradient"], two["gradient"]) <= 1e-4
    assert apart(one["weights"], two["weights"]) <= 1e-6
    assert two["after"][0] == pytest.approx(one["after"][0], abs=1e-4)
    ours, theirs = two["metrics"], one["metrics"]
    assert (ours["num_tokens"], ours["call_tokens"]) == (theirs["num_tokens"], theirs["call_tokens"])
    for figure in ("loss", "grad_norm", "gap_sum", "gap_max", "kl_sum", "entropy_sum", "learning_rate"):
        assert ours[figure] == pytest.approx(theirs[figure], rel=1e-4, abs=1e-6)
    assert two["num_own"] == -(-two["num_batches"] // 2)
    if STEPS[name].get("max_tokens") == 40:
        assert two["num_own"] > 1  # gradients were accumulated
    if "num_calls" in STEPS[name]:
        assert two["num_batches"] == 1  # the follower's has no weight


# --- whole runs ---


@pytest.fixture
def log(tmp_path: Path) -> Path:
    model = tiny_models.qwen3()
    tiny_models.save(tmp_path / "model", model)
    database = Database.open(f"sqlite:///{tmp_path / 'log.db'}")
    for i in range(3):
        play_group(database, model, f"t{i}", [1.0, 0.0, 0.0, 1.0])
    database.close()
    return tmp_path


def command(log: Path, output: str, *more: str) -> list[str]:
    settings = {
        "--model": log / "model",
        "--db": f"sqlite:///{log / 'log.db'}",
        "--output": log / output,
        "--learning-rate": 1e-3,
        "--groups-per-step": 2,
        "--device": "cpu",
    }
    flags = [str(part) for pair in settings.items() for part in pair]
    program = [sys.executable, "-m", "lightning_rl.cli", "train"]
    return [*program, *flags, "--no-publish", "--no-progress", "--from-base", *more]


def last_version(output: Path) -> Path:
    return sorted(output.glob("*/versions/*"))[-1]


def files(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


CONFIGS = REPOSITORY / "configs" / "accelerate"


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["full", "lora"])
def test_whole_runs_write_the_version_of_one_process(weights: str, log: Path) -> None:
    one, two, sharded = (str(CONFIGS / f"{name}.yaml") for name in ("one_gpu", "ddp", "fsdp2"))
    by_flag = weights == "full"
    alone: list[str] = [] if by_flag else ["--accelerate", one]
    said = run(command(log, "one", "--weights", weights, *alone))
    assert said.returncode == 0, said.stderr
    expected = last_version(log / "one")
    for name, flags in {
        "ddp": ["--processes", "2"] if by_flag else ["--accelerate", two],
        "fsdp": ["--accelerate", sharded],
    }.items():
        done = run(command(log, name, "--weights", weights, *flags))
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("finished: 2 steps, version 2") == 1  # one rank reports
        found = last_version(log / name)
        assert files(found) == files(expected)
        (file,) = found.glob("*.safetensors")
        assert apart(load_file(expected / file.name), load_file(file)) <= 1e-4
        if weights == "full":
            assert (found / "config.json").read_text() == (expected / "config.json").read_text()


def children(pid: int) -> dict[int, int]:
    """By rank, the processes that the launcher has started."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            parent = (place / "stat").read_text().rpartition(")")[2].split()[1]
            said = (place / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if parent == str(pid):
            found |= {int(word[5:]): int(place.name) for word in said if word.startswith(b"RANK=")}
    return found


class Watching:
    """A run of two ranks that has trained what there is and waits for more."""

    def __init__(self, log: Path, *more: str) -> None:
        self._log = log
        arguments = command(log, "runs", "--processes", "2", "--watch", *more)
        self.process = subprocess.Popen(
            arguments, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        until = time.monotonic() + 300
        while self._num_trained() < 1:
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < until, "the first step is not trained"
            time.sleep(0.1)
        self.ranks = children(self.process.pid)
        assert self.ranks.keys() == {0, 1}

    def _num_trained(self) -> int:
        with sqlite3.connect(self._log / "log.db") as raw:
            found = raw.execute("select count(*) from step_manifests where trained_at_ms > 0").fetchone()[0]
        raw.close()
        return int(found)

    def ended(self) -> tuple[int, str, str]:
        """Exit code, what was said on stderr, and the run's status in the log. No rank is left."""
        _, said = self.process.communicate(timeout=300)
        for pid in self.ranks.values():
            assert not Path(f"/proc/{pid}").exists()
        with sqlite3.connect(self._log / "log.db") as raw:
            ((status,),) = raw.execute("select status from runs").fetchall()
        raw.close()
        return self.process.returncode, said, status


@pytest.mark.slow
def test_a_follower_that_dies_ends_the_run_with_a_line(log: Path) -> None:
    watching = Watching(log)
    os.kill(watching.ranks[1], signal.SIGKILL)
    code, said, status = watching.ended()
    assert (code, status) == (2, "failed")
    assert "lightning: rank 1 of 2 was ended by SIGKILL (is the memory full?), so the run has ended" in said
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all(number: signal.Signals, log: Path) -> None:
    watching = Watching(log)
    watching.process.send_signal(number)
    code, said, status = watching.ended()
    assert (code, status) == (130, "stopped")
    assert "stopped after" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_follower_that_hangs_is_not_waited_for(log: Path) -> None:
    watching = Watching(log, "--rank-timeout-sec", "5")
    os.kill(watching.ranks[1], signal.SIGSTOP)
    database = Database.open(f"sqlite:///{log / 'log.db'}")
    for name in ("late", "later"):
        play_group(database, tiny_models.qwen3(), name, [1.0, 0.0])
    database.close()
    code, said, status = watching.ended()
    assert (code, status) == (2, "failed")
    assert "has not answered for rank_timeout_sec" in said
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_in_as_many_ranks_as_it_had(kind: str, log: Path) -> None:
    """Weights, optimizer and schedule of every rank: two steps with an end in between are two steps."""
    sharded = ["--accelerate", str(CONFIGS / "fsdp2.yaml")] if kind == "FSDP2" else []
    watching = Watching(log, "--weights", "lora", *sharded)
    watching.process.send_signal(signal.SIGTERM)
    assert watching.ended()[0] == 130
    database = Database.open(f"sqlite:///{log / 'log.db'}")
    play_group(database, tiny_models.qwen3(), "t3", [1.0, 0.0, 0.0, 1.0])
    database.close()
    given = ["--db", f"sqlite:///{log / 'log.db'}", "--once"]
    gone_on = run([sys.executable, "-m", "lightning_rl.cli", "train", "--resume", "latest", *given])
    assert gone_on.returncode == 0, gone_on.stderr
    assert "goes on after 1 step" in gone_on.stderr
    assert "not to the last digit" not in gone_on.stderr  # processes 2 is still 2
    alone = run(command(log, "one", "--weights", "lora"))
    assert alone.returncode == 0, alone.stderr
    one, two = (last_version(log / name) for name in ("one", "runs"))
    assert one.name == two.name == "00002"
    name = "adapter_model.safetensors"
    assert apart(load_file(one / name), load_file(two / name)) <= 1e-4
