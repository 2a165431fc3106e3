"""Why a record equals no committed state: the nearest one, and the first thing in which they differ.

Made for an error message that a person acts on; it looks at every committed message once and is on no hot path.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from attrs import frozen

from relax_trio.data.json import JsonObject, JsonValue, canonical_json
from relax_trio.data.messages import Message
from relax_trio.errors import EngineFault
from relax_trio.forest.forest import SessionForest
from relax_trio.forest.hashing import message_hash, visible_hash
from relax_trio.forest.node import Node, Tree
from relax_trio.ids import NodeId

_SHOWN_CHARS: Final = 40
_FIELDS: Final[tuple[str, ...]] = ("role", "tool_call_id", "content", "reasoning_content")


@frozen
class _Nearness:
    """What a record and a committed state have in common: their first `n_common` messages, then the state has `other`
    (None where it ends there)."""

    node: Node
    n_common: int
    other: Message | None


def explain_unknown_state(
    forest: SessionForest,
    messages: Sequence[Message],
    tools: Sequence[JsonObject],
    chat_template_kwargs: JsonObject,
) -> str:
    """One line that names the nearest committed state and the first difference from it."""
    if not forest.trees:
        return "nothing was committed in this Session"
    tree = forest.known_tree(tools, chat_template_kwargs)
    if tree is None:
        return _explain_tree(forest, messages, tools, chat_template_kwargs)
    near = _nearest(forest, messages, tree)
    name = f"the nearest committed state is node {near.node.id} ({near.node.n_messages} messages)"
    at = near.n_common
    if near.other is None:
        return f"{name}; the record goes on with messages[{at}] ({_who(messages[at])})"
    if at == len(messages):
        return f"{name}; the record ends before its messages[{at}] ({_who(near.other)}), where nothing was committed"
    field, ours, committed = _first_field(messages[at], near.other)
    return f"{name}; first difference: messages[{at}].{field}: {_two_fields(ours, committed)}"


def _explain_tree(
    forest: SessionForest, messages: Sequence[Message], tools: Sequence[JsonObject], kwargs: JsonObject
) -> str:
    """The state that the messages fit best, and how tools or template arguments differ from its own."""
    near = max((_nearest(forest, messages, tree) for tree in forest.trees), key=lambda one: one.n_common)
    tree = near.node.tree
    assert tree is not None, "only the technical root has no tree"
    listed: list[JsonValue] = list(tools)
    theirs: list[JsonValue] = list(tree.tools)
    differences = [
        f"{field}: {_two_texts(canonical_json(ours), canonical_json(committed))}"
        for field, ours, committed in (
            ("tools", listed, theirs),
            ("chat_template_kwargs", kwargs, tree.chat_template_kwargs),
        )
        if canonical_json(ours) != canonical_json(committed)
    ]
    return (
        f"the nearest committed state is node {near.node.id} ({near.node.n_messages} messages, {near.n_common} in "
        f"common); first difference: {'; '.join(differences)}"
    )


def _nearest(forest: SessionForest, messages: Sequence[Message], tree: Tree) -> _Nearness:
    """The state of `tree` with most messages in common from the start, the most similar of several."""
    all_of_tree = list(_compare(forest, messages, tree))
    n_common = max(near.n_common for near in all_of_tree)
    nearest = [near for near in all_of_tree if near.n_common == n_common]
    likeness: dict[int, tuple[int, int]] = {}
    for near in nearest:
        if near.other is not None and n_common < len(messages) and id(near.other) not in likeness:
            likeness[id(near.other)] = _likeness(messages[n_common], near.other)

    def nearness(near: _Nearness) -> tuple[tuple[int, int], int]:
        return likeness.get(id(near.other), (0, 0)), -abs(near.node.n_messages - len(messages))

    return max(nearest, key=nearness)


def _compare(forest: SessionForest, messages: Sequence[Message], tree: Tree) -> Iterator[_Nearness]:
    """Every state of `tree`, parents first: a child goes on where its parent's comparison ended."""
    found: dict[NodeId, _Nearness] = {}
    for node in forest.nodes:
        if node.tree is not tree or node.parent is None:
            continue
        n_common, other = 0, None
        if node.parent.id in found:
            n_common, other = found[node.parent.id].n_common, found[node.parent.id].other
        if n_common == node.parent.n_messages and other is None:
            n_same = _n_same(forest, messages[n_common:], node)
            n_common += n_same
            other = node.messages[n_same] if n_same < len(node.messages) else None
        found[node.id] = _Nearness(node, n_common, other)
        yield found[node.id]


def _n_same(forest: SessionForest, messages: Sequence[Message], node: Node) -> int:
    """How many of the delta's messages `messages` begins with."""
    pairs = zip(messages, node.messages, strict=False)
    shorter = min(len(messages), len(node.messages))
    return next((i for i, (ours, theirs) in enumerate(pairs) if not _same(forest, ours, theirs, node)), shorter)


def _same(forest: SessionForest, ours: Message, theirs: Message, node: Node) -> bool:
    if ours == theirs or message_hash(ours) == message_hash(theirs):
        return True
    silent = ours.role == "assistant" and ours.reasoning_content is None
    restores = forest.unechoed_reasoning == "restore" and node.kind == "response" and silent
    return restores and message_hash(ours) == visible_hash(theirs)


def _likeness(ours: Message, theirs: Message) -> tuple[int, int]:
    """How many fields are equal, and how many characters of the first differing one."""
    one, other = _field_texts(ours), _field_texts(theirs)
    alike = sum(value == other.get(key) for key, value in one.items())
    _, mine, committed = _first_field(ours, theirs)
    return alike, 0 if mine is None or committed is None else _first_char(mine, committed)


def _first_field(ours: Message, theirs: Message) -> tuple[str, str | None, str | None]:
    """Path of the first differing field, and the two texts; None where one has no such field.

    Absent reasoning comes last: its absence alone rarely keeps a record from matching.
    """
    one, other = _field_texts(ours), _field_texts(theirs)
    fields = [*one, *(key for key in other if key not in one)]
    if ours.reasoning_content is None:
        fields.sort(key=lambda field: field == "reasoning_content")
    for field in fields:
        if one.get(field) != other.get(field):
            return field, one.get(field), other.get(field)
    raise EngineFault("two messages differ, but none of their fields does")


def _field_texts(message: Message) -> dict[str, str]:
    """Every field by its path inside the message, as text; in the order differences are looked for."""
    raw = message.to_chat()
    texts = {key: _text(raw[key]) for key in _FIELDS if key in raw}
    for index, call in enumerate(message.tool_calls):
        path = f"tool_calls[{index}]"
        texts[f"{path}.function.name"] = call.name
        texts[f"{path}.function.arguments"] = call.arguments
        texts[f"{path}.id"] = call.id
    return texts


def _text(value: JsonValue) -> str:
    return value if isinstance(value, str) else canonical_json(value)


def _first_char(ours: str, theirs: str) -> int:
    """Length of the longest common prefix, by halving: texts may be long."""
    low, high = 0, min(len(ours), len(theirs))
    while low < high:
        middle = (low + high + 1) // 2
        if ours[low:middle] == theirs[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _two_fields(ours: str | None, theirs: str | None) -> str:
    if ours is None or theirs is None:
        has, lacks = ("the committed state", "the record") if ours is None else ("the record", "the committed state")
        return f"{has} has {_around(ours or theirs or '', 0)}, {lacks} has none"
    return _two_texts(ours, theirs)


def _two_texts(ours: str, theirs: str) -> str:
    at = _first_char(ours, theirs)
    n_bytes = len(ours[:at].encode(errors="replace"))
    return f"the record has {_around(ours, at)}, the committed state {_around(theirs, at)} (byte {n_bytes})"


def _around(text: str, at: int) -> str:
    start = max(0, at - _SHOWN_CHARS // 2)
    end = start + _SHOWN_CHARS
    return f"{'…' if start else ''}{text[start:end]!r}{'…' if end < len(text) else ''}"


def _who(message: Message) -> str:
    """Role and beginning of a message."""
    text = _field_texts(message).get("content") or ", ".join(f"call {call.name}" for call in message.tool_calls)
    return f"{message.role} {text[:_SHOWN_CHARS]!r}" + ("…" if len(text) > _SHOWN_CHARS else "")
