"""Finding where a conversation stands: the longest committed prefix, in one walk over the messages.

The index knows every committed state and every state inside an observation, so that a walk can tell a prefix that may
still lead to a committed state from one that cannot. With restored reasoning two readings of one message can both be
alive (as written, as the committed response); the walk follows both. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from attrs import define, field, frozen

from relax_trio.data.messages import Message
from relax_trio.forest.hashing import message_hash, next_state, visible_hash
from relax_trio.forest.node import Node
from relax_trio.ids import StateHash

UnechoedReasoning: TypeAlias = Literal["restore", "fork"]


@frozen(kw_only=True)
class Position:
    """How far a reading of the messages got.

    Attributes:
      node: deepest committed node on the reading.
      n_matched: messages up to and with `node`.
      restored: responses up to `node` that were recognized without their reasoning.
    """

    node: Node
    n_matched: int
    restored: tuple[Node, ...] = ()


@frozen
class _Reading:
    state: StateHash
    at: Position


@define(eq=False)
class StateIndex:
    """Committed states by hash, and what a walk needs besides."""

    nodes: dict[StateHash, Node] = field(factory=dict)
    _interior: set[StateHash] = field(factory=set)
    _visible: dict[tuple[StateHash, bytes], list[Node]] = field(factory=dict)

    def add_observation(self, node: Node, states: Sequence[StateHash]) -> None:
        """Register an observation; `states` are those after each of its messages, its own last."""
        self.nodes.setdefault(node.state, node)
        self._interior.update(states[:-1])

    def add_response(self, node: Node, observation: Node) -> None:
        """Register a response committed below `observation`."""
        self.nodes.setdefault(node.state, node)
        if node.messages[0].reasoning_content is not None:
            self._visible.setdefault((observation.state, visible_hash(node.messages[0])), []).append(node)

    def walk(
        self, root: Node, state: StateHash, messages: Sequence[Message], unechoed: UnechoedReasoning
    ) -> tuple[Position, list[bytes]]:
        """Follow `messages` from `state` as far as they lead to committed states.

        Returns:
          The longest committed prefix (as written before restored where both are equally long), and the hash of every
          message.
        """
        digests = [message_hash(message) for message in messages]
        best = Position(node=root, n_matched=0)
        readings = [_Reading(state, best)]
        for index, (message, digest) in enumerate(zip(messages, digests, strict=True)):
            alive: list[_Reading] = []
            for reading in readings:
                alive += self._step(reading, message, digest, index + 1, unechoed)
            for reading in alive:
                if reading.at.n_matched > best.n_matched:
                    best = reading.at
            if not alive:
                break
            readings = alive
        return best, digests

    def _step(
        self, reading: _Reading, message: Message, digest: bytes, n_messages: int, unechoed: UnechoedReasoning
    ) -> list[_Reading]:
        after: list[_Reading] = []
        written = next_state(reading.state, digest)
        node = self.nodes.get(written)
        if node is not None:
            at = Position(node=node, n_matched=n_messages, restored=reading.at.restored)
            after.append(_Reading(written, at))
        elif written in self._interior:
            after.append(_Reading(written, reading.at))
        if unechoed == "restore" and message.role == "assistant" and message.reasoning_content is None:
            silent = self._unechoed(reading, digest)
            if silent is not None:
                restored = (*reading.at.restored, silent)
                after.append(_Reading(silent.state, Position(node=silent, n_matched=n_messages, restored=restored)))
        return after

    def _unechoed(self, reading: _Reading, digest: bytes) -> Node | None:
        """The committed response here that `digest` is without its reasoning; of several the last the client got."""
        found = self._visible.get((reading.state, digest))
        if not found:
            return None
        return next((node for node in reversed(found) if node.delivered), found[-1])
