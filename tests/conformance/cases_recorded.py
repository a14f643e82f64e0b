"""Streams of real APIs, from ../shared/data/sse where that is there: played as they are, whatever is asked.

Their engines know nothing of our additions, so nothing comes of them: what passes must pass unchanged, and
the log holds the message that was put together and no tokens.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from lightning_rl.tests.conformance.case import (
    ADDS_CHAT,
    ADDS_COMPLETION,
    CHAT,
    COMPLETIONS,
    Case,
    body_of,
    fixed,
    prompt_of,
)
from lightning_rl.tests.conformance.replay import Reply
from lightning_rl.tests.conformance.wire import Question

PLACES = [parent / "shared" / "data" / "sse" for parent in Path(__file__).resolve().parents]
FOLDER = next((place for place in PLACES if place.is_dir()), PLACES[-2])

CUT = {"53_cut_off"}  # the connection broke there
WITH_IDS = {"56_vllm_token_ids_in_stream"}  # the client had asked for them


def recorded_cases(folder: Path = FOLDER) -> tuple[list[Case], str | None]:
    """The cases, and why there are none."""
    if not folder.is_dir():
        return [], f"no recorded streams in {folder}"
    cases = [_case(path) for path in sorted(folder.glob("*.meta.json"))]
    return cases + [_split_utf8(path) for path in sorted(folder.glob("*.chunks.json"))], None


def _case(meta_path: Path) -> Case:
    name = meta_path.name.removesuffix(".meta.json")
    meta = json.loads(meta_path.read_text())
    answer = next(meta_path.parent.glob(f"{name}.response.*")).read_bytes()
    is_stream = meta["content_type"].startswith("text/event-stream")
    is_chat = b'"text_completion"' not in answer
    request = meta_path.parent / f"{name}.request.json"
    if request.is_file():
        body = request.read_bytes()
    else:
        own = {"return_token_ids": True} if name in WITH_IDS else {}
        body = body_of(stream=True, **own) if is_chat else prompt_of(stream=True)
    status_line = f"HTTP/1.1 {meta['status']} {'OK' if meta['status'] == 200 else 'Too Many Requests'}"
    reply = Reply(
        status_line.encode(),
        ((b"content-type", meta["content_type"].encode()),),
        (answer,),
        "chunked" if is_stream else "length",
        breaks=name in CUT,
    )
    return _replayed(name, body, CHAT if is_chat else COMPLETIONS, reply)


def _split_utf8(path: Path) -> Case:
    doc: Any = json.loads(path.read_text())
    chunks = (
        doc["chunks_base64"]
        if "chunks_base64" in doc
        else next(v for v in doc.values() if isinstance(v, list))
    )
    reply = Reply(
        headers=((b"content-type", b"text/event-stream"),),
        blocks=tuple(base64.b64decode(chunk) for chunk in chunks),
        framing="chunked",
    )
    return _replayed(path.name.removesuffix(".chunks.json"), body_of(stream=True), CHAT, reply)


def _replayed(name: str, body: bytes, target: str, reply: Reply) -> Case:
    # The model of another vendor is not ours: asked by the name that our engine has.
    doc = json.loads(body)
    engine = body.replace(json.dumps(doc["model"]).encode(), b'"base"', 1)
    adds = ADDS_CHAT if target == CHAT else ADDS_COMPLETION
    return Case(
        "recorded-" + name.replace("_", "-"),
        (Question(target=target, pieces=(engine,)),),
        fixed(reply),
        adds=tuple(pair for pair in adds if pair[0] not in doc),
    )
