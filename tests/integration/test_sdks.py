"""Official SDKs, unmodified, against real vLLM through the proxy: they get on with every answer, each call is
in the log, exact, and its prompt is the one that the engine renders for the very same request."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from lightning_rl.engine.client import EngineClient
from lightning_rl.records import Call, Quarantine, token_ids
from lightning_rl.store.bodies import load_bodies
from lightning_rl.store.database import Database
from lightning_rl.store.read import load_episodes

pytestmark = [
    pytest.mark.engine,
    # The SDKs' own affairs: unclosed transports of theirs, deprecations between them.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

RESCORED_WITHIN = 0.01  # nats; float32 on both sides, other batch shapes
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
ASK = "In one short sentence: what is a mule?"


class City(BaseModel):
    name: str
    is_large: bool


@dataclass(frozen=True)
class Recording:
    """A running proxy with a log of its own, and one episode's view of it."""

    root: str
    db: str
    engine_url: str
    episode: str

    @property
    def openai_url(self) -> str:
        return f"{self.root}/episodes/{self.episode}/tasks/t/v1"

    @property
    def anthropic_url(self) -> str:
        return f"{self.root}/episodes/{self.episode}/tasks/t"

    def calls(self) -> list[tuple[Call, str, dict[str, Any]]]:
        """The episode's calls, each with its route and the body that the SDK sent."""
        with urllib.request.urlopen(f"{self.root}/lightning/api/status"):
            pass  # answered when everything before it is in the log
        database = Database.open(self.db, migrate=False)
        try:
            with database.read() as conn:
                (episode,) = load_episodes(conn, [self.episode])
                rows = conn.exec_driver_sql("SELECT id, route, request_body FROM calls").all()
                sent = {row[0]: (row[1], json.loads(load_bodies(conn, [row[2]])[0])) for row in rows}
        finally:
            database.close()
        return [(call, *sent[call.id]) for call in episode.calls]

    def rendered(self, route: str, body: dict[str, Any]) -> list[int]:
        """What the engine itself makes of the same request."""
        request = urllib.request.Request(
            f"{self.engine_url}{route}/render",
            json.dumps(body | {"model": "base"}).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            ids: list[int] = json.load(answer)["token_ids"]
        return ids

    def check(self, num_calls: int, *expected: Quarantine | None) -> list[Call]:
        """Every call is there, delivered and exact; `expected`: the judgement on each (None: trainable)."""
        found = self.calls()
        assert len(found) == num_calls
        judged = expected or (None,) * num_calls
        for (call, route, body), wanted in zip(found, judged, strict=True):
            (choice,) = call.choices
            assert (call.status, call.delivered, choice.quarantine) == ("complete", True, wanted)
            assert call.prompt_ids == token_ids(self.rendered(route, body)), route
            assert len(choice.completion_ids) == len(choice.behavior_logprobs) > 0
            if wanted is None:
                gap = asyncio.run(self._rescored_gap(call))
                assert gap < RESCORED_WITHIN
        return [call for call, _, _ in found]

    async def _rescored_gap(self, call: Call) -> float:
        (choice,) = call.choices
        async with EngineClient(self.engine_url) as engine:
            scored = await engine.score("base", token_ids([*call.prompt_ids, *choice.completion_ids]))
        again = list(scored[len(call.prompt_ids) - 1 :])
        return max(abs(a - b) for a, b in zip(choice.behavior_logprobs, again, strict=True))


@pytest.fixture(scope="module")
def proxy(engine_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    folder = tmp_path_factory.mktemp("sdks")
    db = f"sqlite:///{folder / 'log.db'}"
    command = [sys.executable, "-m", "lightning_rl.cli", "proxy", "serve", "--db", db]
    command += ["--engine-url", engine_url, "--port", "0"]
    with (folder / "proxy.log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        ready = re.search(r"OPENAI_BASE_URL=(\S+)/v1", said)
        assert ready, said + (folder / "proxy.log").read_text()
        yield ready[1], db
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()
    assert process.returncode == 0, (folder / "proxy.log").read_text()


@pytest.fixture
def recording(proxy: tuple[str, str], engine_url: str, request: pytest.FixtureRequest) -> Recording:
    return Recording(proxy[0], proxy[1], engine_url, request.node.name)


def run(make: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(make())


# --- openai: chat ---


def test_openai_chat(recording: Recording) -> None:
    from openai import OpenAI

    messages: Any = [{"role": "user", "content": ASK}]
    with OpenAI(base_url=recording.openai_url, api_key="any", max_retries=0) as client:
        answer = client.chat.completions.create(model="gpt-4o", messages=messages, max_tokens=24)
        assert (answer.model, answer.choices[0].finish_reason in ("stop", "length")) == ("gpt-4o", True)
        raw = client.chat.completions.with_raw_response.create(
            model="gpt-4o", messages=messages, max_tokens=8
        )
        assert raw.headers["content-type"] == "application/json"
        assert raw.parse().usage is not None
        with client.chat.completions.stream(model="gpt-4o", messages=messages, max_tokens=24) as stream:
            kinds = [event.type for event in stream]
        assert "content.delta" in kinds
    calls = recording.check(3)
    assert [len(call.choices[0].completion_ids) for call in calls][1] == raw.parse().usage.completion_tokens


def test_openai_chat_async_and_structured(recording: Recording) -> None:
    from openai import AsyncOpenAI

    async def ask() -> None:
        async with AsyncOpenAI(base_url=recording.openai_url, api_key="any", max_retries=0) as client:
            stream = await client.chat.completions.create(
                model="gpt-4o",
                messages=[{"role": "user", "content": ASK}],
                max_tokens=24,
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [chunk async for chunk in stream]
            assert chunks[-1].usage is not None
            parsed = await client.chat.completions.parse(
                model="gpt-4o",
                messages=[{"role": "user", "content": "Describe Rome as JSON."}],
                response_format=City,
                max_tokens=200,
            )
            assert isinstance(parsed.choices[0].message.parsed, City)

    run(ask)
    recording.check(2, None, Quarantine.CONSTRAINED)


# --- openai: responses ---


def test_openai_responses(recording: Recording) -> None:
    from openai import OpenAI

    with OpenAI(base_url=recording.openai_url, api_key="any", max_retries=0) as client:
        answer = client.responses.create(
            model="gpt-4o", input=ASK, instructions="You know animals.", max_output_tokens=24
        )
        assert (answer.model, answer.instructions) == ("gpt-4o", "You know animals.")
        assert answer.output_text
        assert answer.usage is not None
        assert answer.usage.input_tokens_details.cached_tokens == 0
        raw = client.responses.with_raw_response.create(model="gpt-4o", input=ASK, max_output_tokens=8)
        assert raw.parse().id.startswith("resp_")
        with client.responses.stream(model="gpt-4o", input=ASK, max_output_tokens=24) as stream:
            events = list(stream)
            final = stream.get_final_response()
        assert events[0].type == "response.created"
        assert events[-1].type in ("response.completed", "response.incomplete")
        assert [event.sequence_number for event in events] == list(range(len(events)))
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert final.output_text == text
        history: Any = [
            {"role": "user", "content": ASK},
            *[item.model_dump(exclude_none=True) for item in final.output],
            {"role": "user", "content": [{"type": "input_text", "text": "And a hinny?"}]},
        ]
        client.responses.create(model="gpt-4o", input=history, max_output_tokens=16)
    calls = recording.check(4)
    assert calls[0].id != calls[1].id
    assert answer.usage.input_tokens == len(calls[0].prompt_ids)
    assert answer.usage.output_tokens == len(calls[0].choices[0].completion_ids)


def test_openai_responses_structured_and_tools(recording: Recording) -> None:
    from openai import OpenAI

    tool: Any = {"type": "function", "name": "weather", "description": "of a city", "parameters": WEATHER}
    with OpenAI(base_url=recording.openai_url, api_key="any", max_retries=0) as client:
        parsed = client.responses.parse(
            model="gpt-4o", input="Describe Rome as JSON.", text_format=City, max_output_tokens=200
        )
        assert isinstance(parsed.output_parsed, City)
        forced = client.responses.create(
            model="gpt-4o",
            input="Weather in Rome?",
            tools=[tool | {"strict": True}],
            tool_choice="required",
            parallel_tool_calls=False,
            max_output_tokens=100,
        )
        (call,) = forced.output
        assert call.type == "function_call"
        assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
        history: Any = [
            {"role": "user", "content": "Weather in Rome?"},
            call.model_dump(exclude_none=True),
            {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
        ]
        with client.responses.stream(
            model="gpt-4o", input=history, tools=[tool], max_output_tokens=24
        ) as stream:
            kinds = {event.type for event in stream}
        assert "response.output_item.done" in kinds
        with client.responses.stream(
            model="gpt-4o",
            input="Weather in Oslo?",
            tools=[tool],
            tool_choice={"type": "function", "name": "weather"},
            parallel_tool_calls=False,
            max_output_tokens=100,
        ) as stream:
            kinds = {event.type for event in stream}
            (said,) = stream.get_final_response().output
        assert said.type == "function_call"
        assert {"response.function_call_arguments.delta", "response.function_call_arguments.done"} <= kinds
    recording.check(4, Quarantine.CONSTRAINED, Quarantine.CONSTRAINED, None, Quarantine.CONSTRAINED)


def test_openai_responses_async(recording: Recording) -> None:
    from openai import AsyncOpenAI, NotFoundError

    async def ask() -> None:
        async with AsyncOpenAI(base_url=recording.openai_url, api_key="any", max_retries=0) as client:
            stream = await client.responses.create(
                model="gpt-4o", input=ASK, max_output_tokens=16, stream=True
            )
            async for event in stream:
                assert event.type.startswith("response.")
            with pytest.raises(NotFoundError, match="`nobody` does not exist"):
                await client.responses.create(model="nobody", input=ASK)

    run(ask)
    found = recording.calls()
    assert [call.status for call, _, _ in found] == ["complete", "error"]


# --- anthropic ---


def test_anthropic_messages(recording: Recording) -> None:
    from anthropic import Anthropic, NotFoundError

    with Anthropic(base_url=recording.anthropic_url, api_key="any", max_retries=0) as client:
        answer = client.messages.create(
            model="claude-sonnet-4-5",
            max_tokens=24,
            system=[
                {"type": "text", "text": "You know animals. "},
                {"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}},
            ],
            messages=[{"role": "user", "content": [{"type": "text", "text": ASK}]}],
        )
        assert (answer.model, answer.role) == ("claude-sonnet-4-5", "assistant")
        assert answer.content[0].type == "text"
        with client.messages.stream(
            model="claude-sonnet-4-5",
            max_tokens=24,
            messages=[
                {"role": "user", "content": ASK},
                {"role": "assistant", "content": answer.content[0].text},
                {"role": "user", "content": "And a hinny?"},
            ],
        ) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert final.content[0].type == "text"
        assert final.content[0].text == text
        assert final.stop_reason in ("end_turn", "max_tokens")
        with pytest.raises(NotFoundError, match="`nobody` does not exist"):
            client.messages.create(model="nobody", max_tokens=5, messages=[{"role": "user", "content": ASK}])
    (failed,) = [call for call, _, _ in recording.calls() if call.status == "error"]
    calls = [call for call in recording.calls() if call[0].id != failed.id]
    assert len(calls) == 2
    for call, route, body in calls:
        assert (call.status, call.choices[0].quarantine) == ("complete", None)
        assert call.prompt_ids == token_ids(recording.rendered(route, body))
    first = calls[0][0]
    assert answer.usage.input_tokens == len(first.prompt_ids)
    assert answer.usage.output_tokens == len(first.choices[0].completion_ids)


def test_anthropic_tools(recording: Recording) -> None:
    from anthropic import AsyncAnthropic

    tool: Any = {"name": "weather", "description": "of a city", "input_schema": WEATHER, "strict": True}
    question: Any = {"role": "user", "content": "Weather in Rome?"}

    async def ask() -> None:
        async with AsyncAnthropic(base_url=recording.anthropic_url, api_key="any", max_retries=0) as client:
            async with client.messages.stream(
                model="claude-sonnet-4-5",
                max_tokens=100,
                tools=[tool],
                tool_choice={"type": "any", "disable_parallel_tool_use": True},
                messages=[question],
            ) as stream:
                kinds = {event.type async for event in stream}
                forced = await stream.get_final_message()
            assert {"message_start", "input_json", "content_block_stop", "message_stop"} <= kinds
            (use,) = forced.content
            assert use.type == "tool_use"
            assert forced.stop_reason == "tool_use"
            assert use.input["city"] in ("Rome", "Oslo")  # type: ignore[index]
            answer: Any = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
            await client.messages.create(
                model="claude-sonnet-4-5",
                max_tokens=24,
                tools=[{name: value for name, value in tool.items() if name != "strict"}],
                messages=[
                    question,
                    {"role": "assistant", "content": [use.model_dump(exclude_none=True)]},
                    {"role": "user", "content": [answer, {"type": "text", "text": "So?"}]},
                ],
            )

    run(ask)
    recording.check(2, Quarantine.CONSTRAINED, None)


# --- the OpenAI Agents SDK ---


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
def test_openai_agents_with_a_tool(recording: Recording, streamed: bool) -> None:
    from agents import ModelSettings, function_tool

    asked: list[str] = []

    @function_tool
    def weather(city: Literal["Rome", "Oslo"]) -> str:
        """The weather of a city."""
        asked.append(city)
        return "sunny"

    settings = ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=60)
    assert run(lambda: run_agent(recording, streamed, [weather], settings))
    assert asked
    # Forced first, free afterwards, but a strict tool is a grammar wherever it is offered.
    calls = recording.calls()
    assert len(calls) >= 2
    recording.check(len(calls), *[Quarantine.CONSTRAINED] * len(calls))


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
def test_openai_agents_free(recording: Recording, streamed: bool) -> None:
    from agents import ModelSettings, function_tool

    @function_tool(strict_mode=False)
    def weather(city: str) -> str:
        """The weather of a city."""
        return "sunny"

    run(lambda: run_agent(recording, streamed, [weather], ModelSettings(max_tokens=40)))
    recording.check(len(recording.calls()))


async def run_agent(recording: Recording, streamed: bool, tools: list[Any], settings: Any) -> str:
    from agents import Agent, Runner, set_tracing_disabled
    from agents.exceptions import ModelBehaviorError
    from agents.models.openai_responses import OpenAIResponsesModel
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    async with AsyncOpenAI(base_url=recording.openai_url, api_key="any", max_retries=0) as client:
        agent = Agent(
            name="weather agent",
            instructions="You tell the weather.",
            model=OpenAIResponsesModel(model="gpt-4o", openai_client=client),
            tools=tools,
            model_settings=settings,
        )
        if not streamed:
            try:
                return str((await Runner.run(agent, "Weather in Rome?", max_turns=4)).final_output)
            except ModelBehaviorError as error:  # what this SDK makes of any answer that ends at its limit
                if "max_output_tokens" not in str(error):
                    raise
                return "cut"
        result = Runner.run_streamed(agent, "Weather in Rome?", max_turns=4)
        kinds = {event.type async for event in result.stream_events()}
        assert {"raw_response_event", "run_item_stream_event"} <= kinds
        return str(result.final_output)
