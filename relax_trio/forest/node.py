"""Nodes of a SessionForest: what was sent to the engine and what it returned, as deltas.

Invariants: the children of the technical root are observations; observations and responses alternate below it; an
observation always has a response (both are committed together); `token_ids` of a lineage joined are exactly the tokens
the engine saw.
"""

from __future__ import annotations

from array import array
from typing import Literal, TypeAlias

from attrs import define, field, frozen

from relax_trio.data.image import EncodedImage
from relax_trio.data.json import JsonObject
from relax_trio.data.messages import Message
from relax_trio.data.request import FinishReason
from relax_trio.data.sample import VersionSpan
from relax_trio.ids import NodeId, StateHash

NodeKind: TypeAlias = Literal["root", "observation", "response"]


@frozen(kw_only=True)
class Tree:
    """What all states below one top observation share.

    Attributes:
      state: hash before the first message.
      tools, chat_template_kwargs: as the first request wrote them (key order kept).
    """

    state: StateHash
    tools: tuple[JsonObject, ...]
    chat_template_kwargs: JsonObject


@define(eq=False, kw_only=True)
class Node:
    """One committed delta.

    Attributes:
      id: index in its forest, in order of commit.
      parent: None for the technical root only.
      kind: "observation" (loss mask 0) or "response" (generated); "root" has no tokens.
      tree: tools and template arguments of the lineage; None for the technical root, which has many trees.
      messages: the delta's canonical messages; exactly one assistant message for a response.
      token_ids: `array('i')`, the delta's ids.
      logprobs: `array('d')`, one per generated token; empty for an observation.
      versions: spans over the generated tokens; empty for an observation.
      state: identity of the conversation up to and with this node.
      finish: why the turn ended, responses only.
      stop_string: the stop string that ended it, if one did.
      prefix_len: tokens of the lineage before this node.
      n_messages: messages of the lineage with this node.
      delivered: responses: the client has it (its last byte went out, or a later request built on it).
      n_equal: responses: later generations that came out equal and were counted instead of stored.
      restored: responses: some client sent it back without its reasoning.
      images: observations: what stands for its placeholders, in order.
      prefill: observations: text behind the generation prompt with which the client began the response.
    """

    id: NodeId
    parent: Node | None
    kind: NodeKind
    tree: Tree | None
    messages: tuple[Message, ...] = ()
    token_ids: array[int]
    logprobs: array[float]
    versions: tuple[VersionSpan, ...] = ()
    state: StateHash
    finish: FinishReason | None = None
    stop_string: str | None = None
    prefix_len: int = 0
    n_messages: int = 0
    delivered: bool = False
    n_equal: int = 0
    restored: bool = False
    prefill: str = ""
    images: tuple[EncodedImage, ...] = ()
    children: list[Node] = field(factory=list, repr=False)

    @property
    def total_len(self) -> int:
        """Tokens of the lineage with this node."""
        return self.prefix_len + len(self.token_ids)

    def __repr__(self) -> str:
        return f"<Node {self.id} {self.kind} {self.n_messages} messages {self.total_len} tokens>"
