"""What must never reach the engine: its admin and development routes, however they are spelled."""

from __future__ import annotations

from lightning_rl.tests.conformance.replay import Asked, Reply
from lightning_rl.tests.conformance.running import Running
from lightning_rl.tests.conformance.substitutions import MARK
from lightning_rl.tests.conformance.wire import Connection, Question

ADMIN = (
    "/pause",
    "/resume",
    "/is_paused",
    "/sleep",
    "/wake_up",
    "/is_sleeping",
    "/collective_rpc",
    "/update_weights",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/finish_weight_update",
    "/update_weight_version",
    "/weight_info",
    "/weight_checker",
    "/reset_prefix_cache",
    "/reset_mm_cache",
    "/reset_encoder_cache",
    "/server_info",
    "/start_profile",
    "/stop_profile",
    "/scale_elastic_ep",
    "/is_scaling_elastic_ep",
    "/abort_requests",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/admin",
    "/",
)


def spellings(path: str) -> list[str]:
    name = path.lstrip("/")
    last = name.rpartition("/")[2]
    return [
        path,
        f"/{path}",
        f"{path}/",
        f"{path}//",
        f"{path}?x=1",
        f"{path};x=1",
        f"{path}%00",
        f"{path}%20",
        f"{path}/.",
        f"/.{path}",
        f"/v1/..{path}",
        f"/v1/chat/completions/../../..{path}",
        f"/v1/models/..;{path}",
        f"/v1/models%2f..%2f..{path.replace('/', '%2f')}",
        f"/v1/%2e%2e{path}",
        f"/%2e{path}",
        path.replace("/", "%2F"),
        path.replace("/", "%2f"),
        f"/%5c{name}",
        path.upper(),
        path.replace("a", "%61").replace("s", "%73"),
        f"/%{ord(name[0]):02x}{name[1:]}" if name else "/%2f",
        path.replace("e", "%2565"),
        f"/episodes/e{path}",
        f"/episodes/e/v1/..{path}",
        f"/episodes/..{path}",
        f"/episodes/e/tasks/t/agents/a{path}",
        f"/lightning/..{path}",
        f"/v1{path}" if not path.startswith("/v1") else f"/v1/{last}/../{last}",
        f"/metrics{path}",
    ]


def blocked(running: Running) -> tuple[int, list[str]]:
    """How many spellings were tried, and which of them passed or were answered as if there were something."""
    reached: list[Asked] = []

    def note(asked: Asked) -> Reply:
        reached.append(asked)
        return Reply(blocks=(b"{}",))

    running.answers[b"blocked"] = note
    targets = sorted({target for path in ADMIN for target in spellings(path)})
    faults = []
    for target in targets:
        for method in ("POST", "GET"):
            connection = Connection(running.address)
            question = Question(method, target, ((b"Content-Type", b"application/json"),), (b"{}",))
            try:
                answer = connection.ask(question, more=((MARK, b"blocked"),))
            finally:
                connection.close()
            status = answer.status_line.split(b" ")[1:2]
            if reached or status not in ([b"404"], [b"400"]):
                faults.append(f"{method} {target}: {answer.status_line!r}, {len(reached)} reached the engine")
                reached.clear()
    return 2 * len(targets), faults
