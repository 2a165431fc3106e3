"""Where system messages go in a template that doesn't take them as they are.

A system message keeps its place. Where the template refuses it there, or doesn't print it there, it is rendered as a
user message; where the template then refuses two user messages in a row, it becomes one with its neighbours, a blank
line between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from attrs import evolve

from relax_trio.data.messages import Message


def placements(messages: Sequence[Message], *, first_system: bool, later_system: bool) -> Iterator[tuple[Message, ...]]:
    """Forms of a conversation to try, the most faithful first; each once.

    Args:
      first_system: the template prints a leading system message.
      later_system: it prints a later one where it stands.
    """
    whole = tuple(messages)
    if not any(message.role == "system" for message in whole):
        yield whole
        return
    form = _as_users(whole, first=not first_system, later=not later_system)
    yield form
    n_first = int(form[0].role == "system")
    further = (
        _as_users(form, later=True),
        (*form[:n_first], *_merged(whole[n_first:])),
        _as_users(form, first=True, later=True),
        _merged(whole),
    )
    for other in further:
        if other != form:
            form = other
            yield form


def _as_users(messages: tuple[Message, ...], *, first: bool = False, later: bool) -> tuple[Message, ...]:
    return tuple(
        evolve(message, role="user") if message.role == "system" and (later if index else first) else message
        for index, message in enumerate(messages)
    )


def _merged(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Each run of system and user messages that holds a system message becomes one user message."""
    merged: list[Message] = []
    for is_input, group in groupby(messages, key=lambda message: message.role in ("system", "user")):
        run = tuple(group)
        texts = [message.content for message in run if isinstance(message.content, str)]
        joins = is_input and len(texts) == len(run) and any(message.role == "system" for message in run)
        merged += [Message(role="user", content="\n\n".join(texts))] if joins else run
    return tuple(merged)
