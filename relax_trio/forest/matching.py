"""Finding where a conversation stands: the longest committed prefix of a request.

States are chained, so the chain of a request names every prefix of it, and the longest committed one is the last known
name. A client that leaves reasoning out writes other names than were committed; then the messages are read from the
beginning, once as written and once for each committed response that a message may stand for. Either begins behind what
an earlier request had in common with this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from attrs import define, field, frozen

from relax_trio.data.messages import Message
from relax_trio.forest.bookmarks import Bookmark, Bookmarks, Reading, Restored
from relax_trio.forest.hashing import chain, message_hash, next_state, visible_hash
from relax_trio.forest.node import Node
from relax_trio.ids import StateHash

UnechoedReasoning: TypeAlias = Literal["restore", "fork"]


@frozen(kw_only=True)
class Recognized:
    """A request, and what of it needs no reading because an earlier one began so.

    Attributes:
      tree: state before the first message.
      mark: bookmark at the end of the common beginning, None where there is none.
      reading: how the beginning is read; the technical root where there is none.
      messages: the M messages behind it.
      digests: hash of each of them.
      states: their chain as written, M + 1: the state at the end of the beginning, then after each.
    """

    tree: StateHash
    mark: Bookmark | None
    reading: Reading
    messages: Sequence[Message]
    digests: Sequence[bytes]
    states: Sequence[StateHash]


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
      mark: bookmark behind what can be read in one way, None where it would be where the reading began.
    """

    node: Node
    n_matched: int
    response: Node
    n_answered: int
    n_restored: int = 0
    restored: tuple[Node, ...] = ()
    mark: Bookmark | None = None


@define(eq=False)
class StateIndex:
    """Committed states by hash, and what a reading needs besides."""

    nodes: dict[StateHash, Node] = field(factory=dict)
    _interior: set[StateHash] = field(factory=set)
    _visible: dict[tuple[StateHash, bytes], list[Node]] = field(factory=dict)
    _bookmarks: Bookmarks = field(factory=Bookmarks)

    def add_observation(self, node: Node, parent: Node, states: Sequence[StateHash]) -> None:
        """Register an observation committed below `parent`.

        Args:
          states: the one after each of its messages, its own last.
        """
        self.nodes.setdefault(node.state, node)
        self._interior.update(states[:-1])
        self._bookmarks.drop_read_through(parent.state, node)

    def add_response(self, node: Node, observation: Node, before: StateHash) -> None:
        """Register a response committed below `observation`, to a request of state `before`."""
        self.nodes.setdefault(node.state, node)
        self._bookmarks.drop_read_through(before, node)
        if node.messages[0].reasoning_content is not None:
            self._visible.setdefault((before, visible_hash(node.messages[0])), []).append(node)

    def recognize(self, root: Node, tree: StateHash, messages: Sequence[Message]) -> Recognized:
        """Compare `messages` with the beginnings read before, and hash what is behind the longest."""
        mark = self._bookmarks.longest(tree, tuple(messages))
        reading = Reading(tree, root, 0, root, 0) if mark is None else mark.reading
        behind = messages[reading.n_answered :]
        digests = [message_hash(message) for message in behind]
        states = chain(tree if mark is None else mark.written, digests)
        return Recognized(tree=tree, mark=mark, reading=reading, messages=behind, digests=digests, states=states)

    def longest(self, request: Recognized, unechoed: UnechoedReasoning) -> Position:
        """The longest committed prefix of a request.

        Of several readings that lead equally far, the first message in which they differ decides: as written before
        restored, a response that the client has before one that it has not, a later one before an earlier one. Changes
        nothing: what was learned for the next request is in `mark`.
        """
        if unechoed == "fork" or not self._visible:
            best, mark = self._longest_written(request)
        else:
            best, mark = self._longest_reading(request)
        return Position(
            node=best.node,
            n_matched=best.n_matched,
            response=best.response,
            n_answered=best.n_answered,
            n_restored=best.n_restored,
            restored=_in_order(best.restored, since=request.reading.restored),
            mark=mark,
        )

    def keep(self, request: Recognized, mark: Bookmark) -> None:
        """Keep the bookmark of `request`; the next one is read from there."""
        self._bookmarks.add(mark, behind=request.mark)

    def _longest_written(self, request: Recognized) -> tuple[Reading, Bookmark | None]:
        """Take each message as it is written: then the last known state of the chain is the answer."""
        start, deepest = request.reading, None
        for n_behind in range(len(request.messages), 0, -1):
            found = self.nodes.get(request.states[n_behind])
            if found is None:
                continue
            n_messages = start.n_answered + n_behind
            deepest = deepest or (found, n_messages)
            if found.kind == "response":
                answered = start.written(found, n_messages)
                mark = _mark(request, n_behind, answered, sole=True)
                return answered.observed(found.state, *deepest), mark
        return (start if deepest is None else start.observed(deepest[0].state, *deepest)), None

    def _longest_reading(self, request: Recognized) -> tuple[Reading, Bookmark | None]:
        """Follow every reading while it may lead to a committed state.

        No two of them lead to the same one, so there are never more readings than states committed at their depth.
        """
        best = request.reading
        readings, mark, sole = [best], None, request.mark is None or request.mark.sole
        for index in range(len(request.messages)):
            readings = [after for reading in readings for after in self._read(reading, request, index)]
            if not readings:
                break
            n_messages = request.reading.n_answered + index + 1
            best = next((reading for reading in readings if reading.n_matched == n_messages), best)
            sole = sole and len(readings) == 1
            if len(readings) == 1 and best.n_answered == n_messages:
                mark = _mark(request, index + 1, best, sole=sole)
        return best, mark

    def _read(self, reading: Reading, request: Recognized, index: int) -> list[Reading]:
        """The ways to read one more message, the preferred first."""
        after = []
        message, digest = request.messages[index], request.digests[index]
        n_messages = request.reading.n_answered + index + 1
        is_written = reading.state == request.states[index]
        state = request.states[index + 1] if is_written else next_state(reading.state, digest)
        node = self.nodes.get(state)
        if node is not None and node.kind == "response":
            after.append(reading.written(node, n_messages))
        elif node is not None or state in self._interior:
            after.append(reading.observed(state, node, n_messages))
        if message.role == "assistant" and message.reasoning_content is None:
            after += [reading.silent(response, n_messages) for response in self._silenced(reading.state, digest)]
        return after

    def _silenced(self, state: StateHash, digest: bytes) -> list[Node]:
        """Committed responses here that `digest` is without their reasoning, in order of preference."""
        found = self._visible.get((state, digest), [])
        return sorted(found, key=lambda node: (not node.delivered, -node.id)) if len(found) > 1 else found


def _mark(request: Recognized, n_behind: int, reading: Reading, *, sole: bool) -> Bookmark:
    """A bookmark behind the first `n_behind` of the messages that were read."""
    return Bookmark(tree=request.tree, written=request.states[n_behind], reading=reading, sole=sole)


def _in_order(restored: Restored, *, since: Restored) -> tuple[Node, ...]:
    found: list[Node] = []
    while restored is not None and restored is not since:
        node, restored = restored
        found.append(node)
    return tuple(reversed(found))
