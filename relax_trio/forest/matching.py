"""Finding where a conversation stands: the longest committed prefix of a request.

States are chained, so the chain of a request names every prefix of it, and the longest committed one is the last known
name. A client that leaves reasoning out writes other names than were committed; then the messages are read from the
beginning, once as written and once for each committed response that a message may stand for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

from attrs import define, field, frozen

from relax_trio.data.messages import Message
from relax_trio.forest.hashing import next_state, visible_hash
from relax_trio.forest.node import Node
from relax_trio.ids import StateHash

_N_BOOKMARKS: Final = 8
"""As many conversations may go on side by side without reading each other's history again."""

UnechoedReasoning: TypeAlias = Literal["restore", "fork"]

_Restored: TypeAlias = "tuple[Node, _Restored] | None"


@frozen(kw_only=True)
class Position:
    """How far the messages lead.

    Attributes:
      node: deepest committed node on the best reading; the technical root where nothing is known.
      n_matched: messages up to and with `node`.
      response: deepest response on that reading, `node` itself or above it; the technical root where there is none.
      n_answered: messages up to and with `response`.
      n_restored: responses on the reading that were recognized without their reasoning.
      restored: those of them that no earlier request with the same beginning has shown.
    """

    node: Node
    n_matched: int
    response: Node
    n_answered: int
    n_restored: int = 0
    restored: tuple[Node, ...] = ()


@define
class _Reading:
    """One way to read the messages so far: the state it leads to, and the rest as in `Position`.

    `restored` is a chain from the last to the first: readings share what they have in common.
    """

    state: StateHash
    node: Node
    n_matched: int
    response: Node
    n_answered: int
    n_restored: int = 0
    restored: _Restored = None

    def written(self, response: Node, n_messages: int) -> _Reading:
        """This reading, continued by a message that is `response` as it stands."""
        return _Reading(response.state, response, n_messages, response, n_messages, self.n_restored, self.restored)

    def silent(self, response: Node, n_messages: int) -> _Reading:
        """This reading, continued by a message that is `response` without its reasoning."""
        restored = (response, self.restored)
        return _Reading(response.state, response, n_messages, response, n_messages, self.n_restored + 1, restored)

    def observed(self, state: StateHash, node: Node | None, n_messages: int) -> _Reading:
        """This reading, continued by a message that ends the observation `node`, or none."""
        deepest, n_matched = (self.node, self.n_matched) if node is None else (node, n_messages)
        return _Reading(state, deepest, n_matched, self.response, self.n_answered, self.n_restored, self.restored)


@frozen
class _Bookmark:
    """A beginning that can be read in one way only, and ends with a response.

    The next turn's request begins with it, and is read from there. It holds until something is committed in its midst.

    Attributes:
      tree: state before the first message.
      written: state after the last one, as the client wrote them.
      reading: how they are read.
    """

    tree: StateHash
    written: StateHash
    reading: _Reading


@define(eq=False)
class StateIndex:
    """Committed states by hash, and what a reading needs besides."""

    nodes: dict[StateHash, Node] = field(factory=dict)
    _interior: set[StateHash] = field(factory=set)
    _visible: dict[tuple[StateHash, bytes], list[Node]] = field(factory=dict)
    _bookmarks: deque[_Bookmark] = field(factory=lambda: deque(maxlen=_N_BOOKMARKS))

    def add_observation(self, node: Node, states: Sequence[StateHash]) -> None:
        """Register an observation; `states` are those after each of its messages, its own last."""
        self.nodes.setdefault(node.state, node)
        self._interior.update(states[:-1])
        self._drop_bookmarks(node, node.n_messages - len(states) + 1)

    def add_response(self, node: Node, observation: Node) -> None:
        """Register a response committed below `observation`."""
        self.nodes.setdefault(node.state, node)
        self._drop_bookmarks(node, node.n_messages)
        if node.messages[0].reasoning_content is not None:
            self._visible.setdefault((observation.state, visible_hash(node.messages[0])), []).append(node)

    def longest(
        self,
        root: Node,
        messages: Sequence[Message],
        digests: Sequence[bytes],
        states: Sequence[StateHash],
        unechoed: UnechoedReasoning,
    ) -> Position:
        """The longest committed prefix of `messages`.

        Of several readings that lead equally far, the first message in which they differ decides: as written before
        restored, a response that the client has before one that it has not, a later one before an earlier one.

        Args:
          digests: hash of each message, N.
          states: their chain, N + 1: the state before the first message, then after each.
        """
        if unechoed == "fork" or not self._visible:
            return self._longest_written(root, states)
        return self._longest_reading(root, messages, digests, states)

    def _longest_written(self, root: Node, states: Sequence[StateHash]) -> Position:
        node, n_matched = root, 0
        for n_messages in range(len(states) - 1, 0, -1):
            found = self.nodes.get(states[n_messages])
            if found is None:
                continue
            if node is root:
                node, n_matched = found, n_messages
            if found.kind == "response":
                return Position(node=node, n_matched=n_matched, response=found, n_answered=n_messages)
        return Position(node=node, n_matched=n_matched, response=root, n_answered=0)

    def _longest_reading(
        self,
        root: Node,
        messages: Sequence[Message],
        digests: Sequence[bytes],
        states: Sequence[StateHash],
    ) -> Position:
        """Follow every reading while it may lead to a committed state.

        No two of them lead to the same one, so there are never more readings than states committed at their depth.
        """
        start = best = self._bookmarked(states) or _Reading(states[0], root, 0, root, 0)
        readings, bookmark = [start], None
        for index in range(start.n_answered, len(messages)):
            message, digest = messages[index], digests[index]
            readings = [after for reading in readings for after in self._read(reading, message, digest, index, states)]
            if not readings:
                break
            best = next((reading for reading in readings if reading.n_matched > index), best)
            if len(readings) == 1 and best.n_answered > index:
                bookmark = _Bookmark(states[0], states[index + 1], best)
        if bookmark is not None:
            self._bookmarks.append(bookmark)
        return Position(
            node=best.node,
            n_matched=best.n_matched,
            response=best.response,
            n_answered=best.n_answered,
            n_restored=best.n_restored,
            restored=_in_order(best.restored, since=start.restored),
        )

    def _bookmarked(self, states: Sequence[StateHash]) -> _Reading | None:
        """The reading of the longest beginning that has a bookmark."""
        known = [
            mark.reading
            for mark in self._bookmarks
            if mark.reading.n_answered < len(states) and states[mark.reading.n_answered] == mark.written
        ]
        return max(known, key=lambda reading: reading.n_answered, default=None)

    def _drop_bookmarks(self, node: Node, n_messages: int) -> None:
        """States of the tree of `node` were added, the first of them that of `n_messages` messages."""
        assert node.tree is not None, "only the technical root has no tree"
        tree = node.tree.state
        for mark in [m for m in self._bookmarks if m.tree == tree and m.reading.n_answered >= n_messages]:
            self._bookmarks.remove(mark)

    def _read(
        self, reading: _Reading, message: Message, digest: bytes, index: int, states: Sequence[StateHash]
    ) -> list[_Reading]:
        """The ways to read one more message, the preferred first."""
        after = []
        is_written = reading.state == states[index]
        state = states[index + 1] if is_written else next_state(reading.state, digest)
        node = self.nodes.get(state)
        if node is not None and node.kind == "response":
            after.append(reading.written(node, index + 1))
        elif node is not None or state in self._interior:
            after.append(reading.observed(state, node, index + 1))
        if message.role == "assistant" and message.reasoning_content is None:
            after += [reading.silent(response, index + 1) for response in self._silenced(reading.state, digest)]
        return after

    def _silenced(self, state: StateHash, digest: bytes) -> list[Node]:
        """Committed responses here that `digest` is without their reasoning, in order of preference."""
        found = self._visible.get((state, digest), [])
        return sorted(found, key=lambda node: (not node.delivered, -node.id)) if len(found) > 1 else found


def _in_order(restored: _Restored, *, since: _Restored) -> tuple[Node, ...]:
    found: list[Node] = []
    while restored is not None and restored is not since:
        node, restored = restored
        found.append(node)
    return tuple(reversed(found))
