"""What a run may be started as, and what its launcher makes of how ranks have ended."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from typer.testing import CliRunner

from lightning_rl.cli import app
from lightning_rl.errors import SettingsError, UserError
from lightning_rl.trainer.launch import (
    _exit_code,
    is_follower,
    num_ranks,
    require_supported,
)

CONFIGS = Path(__file__).parents[2] / "configs" / "accelerate"


def launched(rank: int, count: int) -> dict[str, str]:
    return {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(count)}


def test_who_leads() -> None:
    assert (num_ranks({}), is_follower({})) == (1, False)
    assert (num_ranks({"WORLD_SIZE": "4"}), is_follower({"WORLD_SIZE": "4"})) == (1, False)  # a cluster's own
    assert (num_ranks(launched(0, 2)), is_follower(launched(0, 2))) == (2, False)
    assert (num_ranks(launched(1, 2)), is_follower(launched(1, 2))) == (2, True)


FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


@pytest.mark.parametrize(
    ("environment", "has_critic", "why"),
    [
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, False, "DeepSpeed steps its optimizer in every backward"),
        ({"ACCELERATE_USE_FSDP": "true"}, False, "fsdp_version: 2"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, False, "Megatron-LM is not supported"),
        (FSDP2 | {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, False, "parallelism_config"),
        (FSDP2, True, "a critic can't be trained beside a sharded policy"),
    ],
)
def test_what_is_refused(environment: dict[str, str], has_critic: bool, why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        require_supported(has_critic=has_critic, environment=environment)


@pytest.mark.parametrize(("environment", "has_critic"), [({}, True), (FSDP2, False)])
def test_what_is_not(environment: dict[str, str], has_critic: bool) -> None:
    require_supported(has_critic=has_critic, environment=environment)


def failures(*codes: int) -> dict[int, SimpleNamespace]:
    return {rank: SimpleNamespace(exitcode=code) for rank, code in enumerate(codes)}


def test_the_exit_code_is_that_of_the_rank_that_ended_the_run() -> None:
    assert _exit_code(failures(2, 3), 2) == 2  # the leader's mistake, which a follower met
    assert _exit_code(failures(3, 2), 2) == 2
    assert _exit_code(failures(130, 3), 2) == 130
    assert _exit_code(failures(1), 2) == 1
    with pytest.raises(UserError, match="rank 1 of 2 was ended by SIGKILL"):
        _exit_code(failures(3, -signal.SIGKILL), 2)


def train(log: Path, *more: str) -> str:
    db = f"sqlite:///{log / 'log.db'}"
    told = CliRunner().invoke(app, ["train", "--model", str(log), "--db", db, "--device", "cpu", *more])
    assert told.exit_code == 2
    assert len(told.stderr.strip().splitlines()) == 1
    return told.stderr


def test_configurations_that_can_not_be_used(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    assert "no such accelerate configuration" in train(tmp_path, "--accelerate", str(file))
    file.write_text("{")
    assert "mine.yaml is no configuration of accelerate" in train(tmp_path, "--accelerate", str(file))
    base = {"compute_environment": "LOCAL_MACHINE", "num_processes": 2, "num_machines": 1, "use_cpu": False}
    file.write_text(yaml.safe_dump(base | {"distributed_type": "DEEPSPEED", "deepspeed_config": {}}))
    assert "lightning: DeepSpeed steps its optimizer" in train(tmp_path, "--accelerate", str(file))
    fsdp1 = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 1}}
    file.write_text(yaml.safe_dump(base | fsdp1))
    assert "FSDP 1 is not supported" in train(tmp_path, "--accelerate", str(file))
    told = train(tmp_path, "--accelerate", str(CONFIGS / "fsdp2.yaml"), "--credit", "step_gae")
    assert "a critic can't be trained beside a sharded policy" in told
