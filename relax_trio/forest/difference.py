"""Why a record equals no committed state: the nearest one, and the first thing in which they differ.

Made for an error message that a person acts on; it may compare against many states and is not on any hot path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from relax_trio.data.json import JsonObject, JsonValue, canonical_json
from relax_trio.data.messages import Message
from relax_trio.forest.forest import SessionForest
from relax_trio.forest.hashing import visible_hash
from relax_trio.forest.node import Node, Tree

_SHOWN_CHARS: Final = 40
_FIELDS: Final[tuple[str, ...]] = ("role", "tool_call_id", "content", "reasoning_content")


def explain_unknown_state(
    forest: SessionForest,
    messages: Sequence[Message],
    tools: Sequence[JsonObject],
    chat_template_kwargs: JsonObject,
) -> str:
    """One line that names the nearest committed state and the first difference from it."""
    if not forest.trees:
        return "nothing was committed in this Session"
    tree, elsewhere = _nearest_tree(forest, messages, tools, chat_template_kwargs)
    if elsewhere is not None:
        return elsewhere
    node, n_common = _nearest_node(forest, messages, tree)
    theirs = forest.messages(node)
    name = f"the nearest committed state is node {node.id} ({len(theirs)} messages)"
    if n_common == len(messages):
        return (
            f"{name}; the record ends before its messages[{n_common}] ({theirs[n_common].role} "
            f"{_shown(theirs[n_common].content)}), and no state was committed there"
        )
    if n_common == len(theirs):
        extra = messages[n_common]
        return f"{name}; the record goes on with messages[{n_common}] ({extra.role} {_shown(extra.content)})"
    field, ours, committed = _first_field(forest, messages[n_common], theirs[n_common])
    return f"{name}; first difference: messages[{n_common}].{field}: {_two_texts(ours, committed)}"


def _nearest_tree(
    forest: SessionForest, messages: Sequence[Message], tools: Sequence[JsonObject], kwargs: JsonObject
) -> tuple[Tree, str | None]:
    """The record's own tree, or the one its messages fit best with what differs in tools or arguments."""
    own = forest.known_tree(tools, kwargs)
    if own is not None:
        return own, None
    tree = max(forest.trees, key=lambda t: _nearest_node(forest, messages, t)[1])
    node, n_common = _nearest_node(forest, messages, tree)
    lines = []
    listed: list[JsonValue] = list(tools)
    theirs: list[JsonValue] = list(tree.tools)
    for field, ours, committed in (
        ("tools", listed, theirs),
        ("chat_template_kwargs", kwargs, tree.chat_template_kwargs),
    ):
        if canonical_json(ours) != canonical_json(committed):
            lines.append(f"{field}: {_two_texts(canonical_json(ours), canonical_json(committed))}")
    return tree, (
        f"the nearest committed state is node {node.id} ({node.n_messages} messages, {n_common} in common); first "
        f"difference: {'; '.join(lines)}"
    )


def _nearest_node(forest: SessionForest, messages: Sequence[Message], tree: Tree) -> tuple[Node, int]:
    """The state of `tree` with most messages in common from the start, the most similar of several."""

    def nearness(node: Node) -> tuple[int, int, int, int]:
        theirs = forest.messages(node)
        n_common = _n_common(forest, messages, theirs)
        alike = chars = 0
        if n_common < min(len(messages), len(theirs)):
            alike, chars = _likeness(forest, messages[n_common], theirs[n_common])
        return n_common, alike, chars, -abs(len(theirs) - len(messages))

    node = max((node for node in forest.nodes if node.tree is tree), key=nearness)
    return node, _n_common(forest, messages, forest.messages(node))


def _n_common(forest: SessionForest, ours: Sequence[Message], theirs: Sequence[Message]) -> int:
    pairs = zip(ours, theirs, strict=False)
    shorter = min(len(ours), len(theirs))
    return next((i for i, (one, other) in enumerate(pairs) if not _same(forest, one, other)), shorter)


def _same(forest: SessionForest, ours: Message, theirs: Message) -> bool:
    if ours == theirs:
        return True
    silent = forest.unechoed_reasoning == "restore" and ours.role == "assistant" and ours.reasoning_content is None
    return silent and visible_hash(ours) == visible_hash(theirs)


def _likeness(forest: SessionForest, ours: Message, theirs: Message) -> tuple[int, int]:
    """How many fields are equal, and how many characters of the first differing one."""
    one, other = _field_texts(ours), _field_texts(theirs)
    alike = sum(value == other.get(key) for key, value in one.items())
    _, mine, committed = _first_field(forest, ours, theirs)
    return alike, _first_char(mine, committed)


def _first_field(forest: SessionForest, ours: Message, theirs: Message) -> tuple[str, str, str]:
    one, other = _field_texts(ours), _field_texts(theirs)
    if forest.unechoed_reasoning == "restore" and ours.reasoning_content is None:
        other.pop("reasoning_content", None)  # its absence alone would not have kept the record from matching
    for key in [*one, *(key for key in other if key not in one)]:
        if one.get(key) != other.get(key):
            return key, one.get(key, "absent"), other.get(key, "absent")
    return "role", ours.role, theirs.role


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
    pairs = zip(ours, theirs, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))


def _two_texts(ours: str, theirs: str) -> str:
    at = _first_char(ours, theirs)
    n_bytes = len(ours[:at].encode(errors="replace"))
    return f"the record has {_around(ours, at)}, the committed state {_around(theirs, at)} (byte {n_bytes})"


def _around(text: str, at: int) -> str:
    start = max(0, at - _SHOWN_CHARS // 2)
    end = start + _SHOWN_CHARS
    return f"{'…' if start else ''}{text[start:end]!r}{'…' if end < len(text) else ''}"


def _shown(value: object) -> str:
    text = "" if value is None else str(value)
    return repr(text[:_SHOWN_CHARS]) + ("…" if len(text) > _SHOWN_CHARS else "")
