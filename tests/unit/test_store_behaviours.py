"""The store's behaviours on SQLite; tests/integration/test_store_postgres.py runs the same on Postgres."""

from collections.abc import Callable
from pathlib import Path

import fakes.retry_behaviours  # noqa: F401 - registers its own
import pytest
from fakes import (  # noqa: F401 - add to the list
    policy_behaviours,
    prune_behaviours,
    reward_behaviours,
    run_behaviours,
    transfer_behaviours,
    verify_behaviours,
)
from fakes.store_behaviours import BEHAVIOURS

from lightning_rl.store.database import Database


@pytest.mark.parametrize(
    "behaviour", BEHAVIOURS, ids=lambda function: function.__name__.removeprefix("test_")
)
def test_on_sqlite(behaviour: Callable[[Database], None], tmp_path: Path) -> None:
    database = Database.open(f"sqlite:///{tmp_path}/log.db")
    try:
        behaviour(database)
    finally:
        database.close()
