"""A calculator agent in two calls, written against the plain `openai` SDK.

It is the calculator agent of the Agent Lightning paper (arXiv 2508.03680) in miniature: the model writes the
expression, the tool computes it, the model states the answer. It imports nothing of lightning-rl and knows
`OPENAI_BASE_URL` and nothing else:

    OPENAI_BASE_URL=http://127.0.0.1:8400/v1 OPENAI_API_KEY=any python agent.py "What is 12 + 30?"
"""

from __future__ import annotations

import argparse
import asyncio
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI

MODEL = "gpt-4o"
SYSTEM = "You have a calculator. Reply with the expression to compute, for example 12 + 5, and nothing else."
FOLLOW_UP = "The calculator says {result}. What is the answer? Reply with the number only."

_EXPRESSION = re.compile(r"(-?\d+(?:\.\d+)?)\s*([-+*/])\s*(-?\d+(?:\.\d+)?)")
_OPERATIONS: dict[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer of the model, as the client received it."""

    id: str
    text: str


def calculate(text: str) -> str:
    """The tool: compute the first `number operation number` in `text`, or say what is wrong."""
    found = _EXPRESSION.search(text.replace(",", ""))
    if not found:
        return "error: no expression"
    left, sign, right = found.groups()
    try:
        result = _OPERATIONS[sign](float(left), float(right))
    except ZeroDivisionError:
        return "error: division by zero"
    return str(int(result)) if result.is_integer() else f"{result:.4f}"


async def _ask(client: AsyncOpenAI, messages: list[Any], max_tokens: int, stream: bool) -> Reply:
    if not stream:
        completion = await client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=max_tokens, temperature=1.0
        )
        return Reply(completion.id, completion.choices[0].message.content or "")
    identifier, text = "", ""
    async with await client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=max_tokens, temperature=1.0, stream=True
    ) as chunks:
        async for chunk in chunks:
            identifier = chunk.id
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
    return Reply(identifier, text)


async def solve(client: AsyncOpenAI, question: str, *, stream: bool = False) -> tuple[Reply, Reply]:
    """Both replies of one attempt; the second one states the answer."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    first = await _ask(client, messages, 32, stream)
    messages += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": FOLLOW_UP.format(result=calculate(first.text))},
    ]
    return first, await _ask(client, messages, 24, stream)


async def _main() -> None:
    parser = argparse.ArgumentParser(description="Ask the calculator agent one question.")
    parser.add_argument("question")
    parser.add_argument("--stream", action="store_true", help="stream both answers")
    arguments = parser.parse_args()
    async with AsyncOpenAI() as client:
        for reply in await solve(client, arguments.question, stream=arguments.stream):
            print(reply.text)


if __name__ == "__main__":
    asyncio.run(_main())
