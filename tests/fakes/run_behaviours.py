"""How runs are listed and shown, which has to be the same on both databases."""

from __future__ import annotations

from fakes.log_rows import end, intent
from fakes.store_behaviours import behaviour, write

from lightning_rl.records import ManifestChoice, StepManifest
from lightning_rl.store.database import Database
from lightning_rl.store.run_view import find_run, list_runs, load_run, load_step
from lightning_rl.store.runs import add_manifest, create_run, end_run, finish_step


@behaviour
def test_runs_are_listed_and_a_step_is_counted(database: Database) -> None:
    write(database, intent("c1", "e"), end("c1"))
    rows = (
        ManifestChoice("c1", 0, "e", "g", "a", 0.5, 1.0, None),
        ManifestChoice("gone", 0, "e", "g", "a", -1.5, 1.0, None),
        ManifestChoice("c3", 0, "e", "g", None, None, 0.0, "side_call"),
    )
    with database.write() as conn:
        create_run(conn, "r_1", "policy", {"seed": 1}, {})
        create_run(conn, "r%1", "policy", {}, {})
        for step in (0, 1):
            add_manifest(conn, StepManifest("r_1", step, "policy", step, rows, {}, {"e": 0.5, "f": 1.0}))
        finish_step(conn, "r_1", 0, to_version=1, metrics={"reward_mean": 0.75})
        end_run(conn, "r_1", "stopped")
    with database.read() as conn:
        lines = {line.id: line for line in list_runs(conn, policy="policy")}
        assert (find_run(conn, "r_"), find_run(conn, "r%")) == ("r_1", "r%1")
        run = load_run(conn, "r_1")
        step = load_step(conn, "r_1", 1)
    line = lines["r_1"]
    assert (line.num_steps, line.num_steps_trained, line.from_version, line.to_version) == (1, 1, 0, 1)
    assert (line.first_reward, line.last_reward, lines["r%1"].num_steps) == (0.75, 0.75, 0)
    assert [found.trained_at_ms is None for found in run.steps] == [False, True]
    trained, side = step.agents
    assert (trained.num_choices, trained.num_trained, trained.trained_tokens) == (2, 2, 2)
    assert (trained.advantage_mean, side.reasons) == (-0.5, {"side_call": 1})
    assert [(row.id, row.num_choices) for row in step.episodes] == [("f", 0), ("e", 3)]
    assert step.document()["reasons"] == {"side_call": 1}
