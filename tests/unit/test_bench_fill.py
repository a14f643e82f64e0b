"""The large log of `make bench-store` is one that the program could have written itself."""

import importlib.util
import sys
from pathlib import Path

import sqlalchemy as sa

from lightning_rl.store.database import Database
from lightning_rl.store.doctor import check_up
from lightning_rl.store.verify import verify

FILL = Path(__file__).parents[2] / "bench" / "store" / "fill.py"


def test_a_filled_log_is_whole_and_has_what_is_looked_for(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("bench_store_fill", FILL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    database = Database.open(f"sqlite:///{tmp_path}/log.db")
    module.fill(database, 4000, lambda done, total: None)
    assert list(verify(database).faults) == []
    with database.read() as conn:
        found = check_up(conn)
        indexes = {index["name"] for index in sa.inspect(conn).get_indexes("calls")}
    assert found.counts.calls > 4000
    reasons = {exclusion.reason for exclusion in found.exclusions}
    assert reasons > {"temperature_zero", "unattributed", "error", "side_call"}
    assert found.drift is not None
    assert found.drift.extending == found.drift.pairs > 0
    assert "ix_calls_unattributed" in indexes, "made again after the rows were in"
    database.close()
