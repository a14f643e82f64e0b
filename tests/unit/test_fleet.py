"""Several proxies on one SQLite log; tests/integration/test_store_postgres.py runs the same on Postgres."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes.fleet_scenarios import SCENARIOS, Scenario, run


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda function: function.__name__.removeprefix("test_"))
def test_on_sqlite(scenario: Scenario, tmp_path: Path) -> None:
    run(scenario, f"sqlite:///{tmp_path}/log.db", tmp_path)
