"""Beginnings of requests that were read before: the next turn's request is compared with one instead of hashed again.

A bookmark names nodes of the forest and keeps no text of its own. It is as good as reading anew, because only such
beginnings get one as can be read in one way, and what may give them a second way takes it from them.
"""

from __future__ import annotations

from collections import deque
from typing import Final, TypeAlias

from attrs import define, field, frozen

from relax_trio.data.messages import Message
from relax_trio.forest.node import Node
from relax_trio.ids import StateHash

_N_BOOKMARKS: Final = 8
"""As many conversations may go on side by side without reading each other's history again."""

Restored: TypeAlias = "tuple[Node, Restored] | None"


@define
class Reading:
    """One way to read the messages so far: the state it leads to, and how far that is known.

    Attributes:
      state: of the messages so read.
      node: deepest committed node on it; the technical root where nothing is known.
      n_matched: messages up to and with `node`.
      response: deepest response on it, `node` itself or above it; the technical root where there is none.
      n_answered: messages up to and with `response`.
      n_restored: responses on it that were recognized without their reasoning.
      restored: those, chained from the last to the first: readings share what they have in common.
    """

    state: StateHash
    node: Node
    n_matched: int
    response: Node
    n_answered: int
    n_restored: int = 0
    restored: Restored = None

    def written(self, response: Node, n_messages: int) -> Reading:
        """This reading, continued by a message that is `response` as it stands."""
        return Reading(response.state, response, n_messages, response, n_messages, self.n_restored, self.restored)

    def silent(self, response: Node, n_messages: int) -> Reading:
        """This reading, continued by a message that is `response` without its reasoning."""
        restored = (response, self.restored)
        return Reading(response.state, response, n_messages, response, n_messages, self.n_restored + 1, restored)

    def observed(self, state: StateHash, node: Node | None, n_messages: int) -> Reading:
        """This reading, continued by a message that ends the observation `node`, or none."""
        deepest, n_matched = (self.node, self.n_matched) if node is None else (node, n_messages)
        return Reading(state, deepest, n_matched, self.response, self.n_answered, self.n_restored, self.restored)


@frozen(kw_only=True)
class Bookmark:
    """A beginning that ends with a response.

    Attributes:
      tree: state before the first message.
      written: state after the last one, as the client wrote them.
      reading: how they are read.
      sole: no part of it could be read in two ways, however the rest went.
    """

    tree: StateHash
    written: StateHash
    reading: Reading
    sole: bool


@define(eq=False)
class Bookmarks:
    """The latest bookmarks of a forest, one for each conversation that goes on."""

    _marks: deque[Bookmark] = field(factory=lambda: deque(maxlen=_N_BOOKMARKS))

    def add(self, mark: Bookmark, *, behind: Bookmark | None) -> None:
        """Keep `mark`; the one that it was read behind makes room for it."""
        if behind is not None and behind in self._marks:
            self._marks.remove(behind)
        self._marks.append(mark)

    def longest(self, tree: StateHash, messages: tuple[Message, ...]) -> Bookmark | None:
        """The longest bookmarked beginning of `messages`, by comparing them."""
        marks = sorted(self._marks, key=lambda mark: mark.reading.n_answered, reverse=True)
        return next((mark for mark in marks if mark.tree == tree and _begins(mark.reading, messages)), None)

    def drop_read_through(self, behind: StateHash, added: Node) -> None:
        """`added` was committed behind the conversation of state `behind`: drop what may now be read in a second way.

        What was read in one way gets a second one only below a state that it passes through: by a response with
        reasoning that a silent message may stand for, or, where a message was silent, by what it is as written.
        """
        assert added.tree is not None, "only the technical root has no tree"
        n_behind = added.n_messages - len(added.messages)
        answers = [message for message in added.messages if message.role == "assistant"]
        thought = added.kind == "response" and answers[0].reasoning_content is not None
        for mark in [m for m in self._marks if m.tree == added.tree.state and m.reading.n_answered > n_behind]:
            may_branch = thought or (answers and mark.reading.n_restored > 0)
            if not mark.sole or (may_branch and _passes(mark.reading, behind, n_behind)):
                self._marks.remove(mark)


def _begins(reading: Reading, messages: tuple[Message, ...]) -> bool:
    """Whether `messages` begin as the client wrote what is read so. From the end: there conversations differ first."""
    at, restored, end = reading.response, reading.restored, reading.n_answered
    if end >= len(messages):
        return False
    while at.parent is not None:
        start = end - len(at.messages)
        if restored is not None and restored[0] is at:
            restored = restored[1]
            if not _is_silent(messages[start], at.messages[0]):
                return False
        elif messages[start:end] != at.messages:
            return False
        at, end = at.parent, start
    # one is left over where what a turn restored stands in a client's observation, too: those are other messages
    return restored is None


def _is_silent(sent: Message, known: Message) -> bool:
    """Whether `sent` is `known` without its reasoning."""
    return (
        sent.role == "assistant"
        and sent.reasoning_content is None
        and (sent.content or "") == (known.content or "")
        and sent.tool_calls == known.tool_calls
    )


def _passes(reading: Reading, state: StateHash, n_messages: int) -> bool:
    """Whether a reading passes through a state of `n_messages`, or may do so in the midst of an observation."""
    at = reading.response
    while at.n_messages > n_messages and at.parent is not None:
        at = at.parent
    return at.n_messages < n_messages or at.state == state
