"""What computing with a model costs, and how its attention can be computed where it is: rows, or a prefix
tree in chunks or through FlexAttention.

What a configuration can't say is tried: a tree of a few tokens must give the hidden states that the model
gives its sequences alone. Knows nothing of TRL, of the loss or of the log.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from ...errors import UserError
from ...records import Transition, logprobs, token_ids
from ..batches.packing import ModelShape
from ..batches.rows import rows_batches
from ..batches.tree import TreeAttention, tree_batches
from . import flex
from .attention import model_inputs
from .models import shares_prefixes

Asked = Literal["auto", "flex", "chunked", "rows"]

CANT_SHARE = (
    "this model can't share prefixes (sliding or linear attention, sinks, soft caps): computing rows of "
    "whole sequences"
)
_APART = 0.1
"""Of a token's hidden state, computed two ways: rounding is below, another context far above."""


def shape_of(model: Any, asked: Asked = "auto") -> ModelShape:
    """`asked` is the setting `attention`. UserError where this model or machine can't do what was asked."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    text = base.config.get_text_config()
    heads = int(text.num_attention_heads)
    head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    body = base.base_model
    embeddings = sum(parameter.numel() for parameter in body.get_input_embeddings().parameters())
    shares = shares_prefixes(base.config) and _tree_gives_the_same(body)
    if not shares and asked in ("flex", "chunked"):
        raise UserError(f"attention = {asked}, but this model can't share prefixes: use auto or rows")
    attention: TreeAttention = "chunked"
    note = None if shares or asked == "rows" else CANT_SHARE
    if shares and asked in ("auto", "flex"):
        key_heads = int(getattr(text, "num_key_value_heads", None) or heads)
        attention, note = _tree_attention(base, asked, flex.Heads(heads, key_heads, head_dim))
    return ModelShape(
        per_token=float(sum(parameter.numel() for parameter in body.parameters()) - embeddings),
        per_pair=2.0 * heads * head_dim * int(text.num_hidden_layers),
        shares_prefixes=shares,
        attention=attention,
        layout="cheapest" if asked == "auto" else "rows" if asked == "rows" else "tree",
        note=note,
    )


def _tree_attention(base: Any, asked: Asked, heads: flex.Heads) -> tuple[TreeAttention, str | None]:
    device = base.device
    if asked == "auto" and device.type == "cpu":
        return "chunked", None
    why_not = flex.why_not(device, base.dtype, heads)
    if why_not is None:
        return "flex", None
    if asked == "flex":
        raise UserError(f"attention = flex, but FlexAttention can't be used here: {why_not}; use auto")
    return "chunked", f"FlexAttention can't be used here ({why_not}): attention over prefixes in chunks"


def _tree_gives_the_same(body: Any) -> bool:
    """Whether two sequences with a common beginning come out of a tree as they come out of rows.

    Sinks, biases by distance, recurrent layers, attention that is no attention interface: all differ here.
    """
    if body.device.type == "meta":  # a rank that gets its weights from another one, which has tried
        return True
    ids = [min(3 + i, int(body.config.get_text_config().vocab_size) - 1) for i in range(9)]
    asked = [
        Transition(name, 0, token_ids(prompt), token_ids([0]), logprobs([0.0]), 1.0, 0.0, 0.0)
        for name, prompt in (("a", ids[:6]), ("b", [*ids[:3], *ids[6:]]))
    ]
    (tree,), (rows,) = tree_batches(asked, 64), rows_batches(asked, 64)
    found = []
    with torch.no_grad(), _evaluating(body):
        for batch in (tree, rows):
            try:
                hidden = body(**model_inputs(batch, body.device), use_cache=False).last_hidden_state
            except (TypeError, ValueError, RuntimeError, IndexError):
                if batch is rows:
                    raise
                return False
            by_choice = dict(zip(batch.choices, batch.terms.position.tolist(), strict=True))
            flat = hidden.reshape(-1, hidden.shape[-1]).float()
            found.append(torch.stack([flat[by_choice[name, 0]] for name in ("a", "b")]))
    apart, whole = (found[0] - found[1]).norm(dim=-1), found[1].norm(dim=-1)
    return bool((apart <= _APART * whole).all())


@contextmanager
def _evaluating(body: Any) -> Iterator[None]:
    was = body.training
    body.eval()
    try:
        yield
    finally:
        body.train(was)
