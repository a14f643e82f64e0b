"""What is worth a warning when the proxy starts: settings that are allowed and are hardly meant.

Pure, but for asking an engine whether it is a proxy of ours.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ..engine.client import EngineClient
from ..errors import EngineError
from ..settings.proxy import ProxySettings


def oddities(
    settings: ProxySettings, engine_models: Collection[str], policies: Collection[str], env: Mapping[str, str]
) -> list[str]:
    """A line each. `policies`: those that the log knows."""
    lines = []
    if settings.policy in engine_models:
        lines.append(
            f"policy {settings.policy!r} is also a model's name in the engine: agents that ask for it get "
            "the policy; choose another --policy, or --served-model-name"
        )
    for agent, policy in settings.agent_policies.items():
        if policy in engine_models or policy in settings.providers:
            lines.append(
                f"agent {agent!r} has policy {policy!r}, which is also a model's name in the engine or a "
                "provider's: choose another"
            )
    known = {
        settings.policy,
        *settings.agent_policies.values(),
        *engine_models,
        *policies,
        *settings.providers,
    }
    for pattern, target in settings.aliases.items():
        if target.partition("@")[0] not in known:
            lines.append(
                f"alias {pattern!r} leads to {target!r}, which is no policy, no model of the engine and no "
                "provider (yet): such calls get the engine's 404"
            )
    for name, provider in settings.providers.items():
        if provider.api_key_env is not None and not env.get(provider.api_key_env):
            lines.append(f"provider {name!r} has no key: the variable {provider.api_key_env} is not set")
    return lines


async def is_proxy(client: EngineClient) -> bool:
    """Whether that "engine" is one of ours: each call would be in both logs."""
    try:
        answer = await client.ask("GET", "/healthz", timeout_sec=5)
    except EngineError:
        return False
    return isinstance(answer.doc, dict) and {"status", "recording", "engine"} <= answer.doc.keys()
