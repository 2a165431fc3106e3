"""Builders for forests: one committed turn at a time, tokens made from what is committed."""

from __future__ import annotations

from array import array
from zlib import crc32

from builders_tokens import assistant

from relax_trio.data.json import JsonObject
from relax_trio.data.messages import Message
from relax_trio.data.sample import VersionSpan
from relax_trio.forest.forest import Match, SessionForest
from relax_trio.forest.node import Node
from relax_trio.ids import WeightVersion


def spans(n_tokens: int, version: str = "0") -> tuple[VersionSpan, ...]:
    return (VersionSpan(version=WeightVersion(version), n_tokens=n_tokens),) if n_tokens else ()


def encode(messages: tuple[Message, ...]) -> array[int]:
    """Three ids per message, a function of its text; stands for a tokenizer."""
    return array("i", [part for m in messages for part in (1, crc32(repr(m).encode()) % 1000 + 100, 2)])


def commit(
    forest: SessionForest,
    match: Match,
    message: Message,
    *,
    token_ids: tuple[int, ...] = (7, 8, 9),
    finish: str = "stop",
    delivered: bool = True,
) -> Node:
    node = forest.commit(
        match,
        array("i") if match.observation else encode(match.new_messages),
        message=message,
        token_ids=array("i", token_ids),
        logprobs=array("d", [-0.5 - i for i in range(len(token_ids))]),
        versions=spans(len(token_ids)),
        finish=finish,
    )
    if delivered:
        forest.mark_delivered(node)
    return node


def turn(
    forest: SessionForest,
    messages: list[Message],
    reply: Message | str = "hi",
    *,
    tools: tuple[JsonObject, ...] = (),
    kwargs: JsonObject | None = None,
    **how,
) -> Node:
    """Match `messages`, commit `reply` behind them."""
    message = assistant(reply) if isinstance(reply, str) else reply
    return commit(forest, forest.match(messages, tools, kwargs or {}), message, **how)
