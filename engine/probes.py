"""Fixed texts, and hashes of what a tokenizer and a chat template make of them.

Two programs that get the same hashes mean the same thing by the same token ids. The engine is asked through
its own /tokenize (fingerprint.py), the trainer asks its local tokenizer: both come here for the text and
the hash. Imports nothing but the standard library; knows neither HTTP nor transformers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from types import MappingProxyType

PROBE_TEXT = (
    "The quick brown fox, 1234567890 times: naïve café — déjà vu?\n"
    "\tdef area(r: float) -> float:\n\t\treturn 3.14159 * r ** 2  # πr²\n"
    "Größe 42 kg; 東京都は日本の首都です。 Привет, мир! مرحبا 👋🏽 <|im_end|> </s>\n"
    "   trailing spaces   \r\n"
)
"""Digits, indentation, six scripts, an emoji of several code points, and the spelling of special tokens."""

PROBE_MESSAGES: tuple[Mapping[str, str], ...] = (
    MappingProxyType({"role": "user", "content": "What is 17 + 4?"}),
    MappingProxyType({"role": "assistant", "content": "17 + 4 = 21."}),
    MappingProxyType({"role": "user", "content": " And twice that? "}),
)
"""No system message: a template that inserts its own shows in the hash."""

CANARY_TEXTS: tuple[str, ...] = (
    "Water boils at a lower temperature on a mountain than at the sea, because the air above it weighs less. "
    "A cook in the valley needs ten minutes for an egg; a cook in the hut at three thousand metres waits "
    "almost half as long again, and the tea never tastes quite the same. The first people who measured this "
    "carried their glass tubes on mules, wrote the numbers into small books, and argued about them for "
    "thirty years. Their tables were used by sailors, who wanted to know about storms, and by surveyors, who "
    "wanted to know how high they stood. Today a telephone does it, and few of its owners know that it can. ",
    "Question: A shop sells pencils at 3 for 2 euros. How much are 21 pencils?\n"
    "Answer: 21 / 3 = 7 packs, and 7 * 2 = 14 euros.\n"
    "Question: A train of 12 wagons has 48 seats in each. 5 are full, the others half full. How many ride?\n"
    "Answer: 5 * 48 = 240, and 7 * 24 = 168, so 240 + 168 = 408 people.\n"
    'Tool call: {"name": "calculate", "arguments": {"expression": "(1200 - 75) / 9"}}\n'
    "Tool answer: 125.0\n"
    "SELECT name, COUNT(*) AS n FROM orders WHERE year >= 2019 GROUP BY name HAVING n > 3 ORDER BY n DESC;\n",
)
"""What every model has an opinion on: sequences for the weight probe that need no recorded call."""


def _hash(ids: Iterable[int]) -> str:
    packed = b"".join(token.to_bytes(4, "little") for token in ids)
    return hashlib.blake2b(packed, digest_size=16).hexdigest()


def tokenizer_probe(ids: Iterable[int]) -> str:
    """Hash of PROBE_TEXT's ids, tokenized without special tokens (`add_special_tokens=False`)."""
    return _hash(ids)


def template_probe(ids: Iterable[int]) -> str:
    """Hash of PROBE_MESSAGES' ids through the chat template, with the generation prompt, without tools."""
    return _hash(ids)


def fingerprint_id(fields: Mapping[str, object]) -> str:
    """Hash of a fingerprint's other fields: equal engines get equal ids, whoever looks."""
    text = "\n".join(f"{name}={fields[name]!r}" for name in sorted(fields))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
