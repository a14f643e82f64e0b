"""Whether the log holds every call that was made, exactly: without that a measured cost is void."""

from __future__ import annotations

from array import array
from collections.abc import Collection

import answers
import sqlalchemy as sa

from lightning_rl.store.blocks import load_prompts, unpack_floats, unpack_ids
from lightning_rl.store.bodies import load_bodies
from lightning_rl.store.database import Database
from lightning_rl.store.schema import calls, choices

ROWS_AT_ONCE = 1000
BODY_EVERY = 50  # bodies are looked at by sample: they are what takes longest to read


def faults(url: str, expected: Collection[int], huge: Collection[int]) -> list[str]:
    """What is wrong, in words. Empty: the `expected` calls, each once, trainable, delivered, tokens exact."""
    database = Database.open(url, migrate=False)
    missing = set(expected)
    found: list[str] = []
    query = (
        sa.select(calls, choices)
        .join(choices, choices.c.call_id == calls.c.id)
        .order_by(calls.c.id)
        .with_only_columns(
            calls.c.id,
            calls.c.prompt_block,
            calls.c.status,
            calls.c.delivered,
            calls.c.episode_id,
            calls.c.ordinal,
            calls.c.request_body,
            choices.c.completion_ids,
            choices.c.behavior_logprobs,
            choices.c.quarantine,
        )
    )
    with database.read() as conn:
        num_rows = conn.execute(sa.select(sa.func.count()).select_from(calls)).scalar_one()
        result = conn.execution_options(stream_results=True).execute(query)
        for rows in result.partitions(ROWS_AT_ONCE):
            prompts = load_prompts(conn, {row.prompt_block for row in rows if row.prompt_block})
            sample = rows[::BODY_EVERY]
            bodies = dict(zip(sample, load_bodies(conn, [row.request_body for row in sample]), strict=True))
            for row in rows:
                prompt = prompts.get(row.prompt_block, array("I"))
                call = answers.call_of(prompt) if len(prompt) == answers.NUM_PROMPT_TOKENS else -1
                fault = _fault(row, call, prompt, call in huge)
                if row in bodies and b"#%08d" % call not in bodies[row]:
                    fault = fault or "the request body is another call's"
                if call not in missing:
                    fault = fault or "it was not made, or is there twice"
                missing.discard(call)
                if fault is not None:
                    found.append(f"call {call} ({row.id}): {fault}")
    database.close()
    if missing:
        found.append(f"{len(missing)} calls are not in the log, e.g. {min(missing)}")
    if num_rows != len(expected):
        found.append(f"{num_rows} calls in the log, {len(expected)} were made")
    return found


def _fault(row: sa.Row[tuple[object, ...]], call: int, prompt: array[int], is_huge: bool) -> str | None:
    num = answers.HUGE_TOKENS if is_huge else answers.NUM_TOKENS
    if call < 0 or prompt.tolist() != answers.prompt_ids(call):
        return f"another prompt, of {len(prompt)} tokens"
    if row.completion_ids is None or unpack_ids(row.completion_ids).tolist() != answers.completion_ids(
        call, num
    ):
        return "other completion ids"
    if row.behavior_logprobs is None or unpack_floats(row.behavior_logprobs) != answers.logprobs(call, num):
        return "other logprobs"
    if (row.status, row.delivered, row.quarantine) != ("complete", True, None):
        return f"not trainable: {row.status}, delivered {row.delivered}, quarantine {row.quarantine}"
    if row.episode_id is None or row.ordinal is None:
        return "no episode"
    return None
