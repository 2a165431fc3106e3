"""SessionForest: every conversation state of one Session, token by token.

A turn has two halves. `match` finds where a request stands and what of it is new; the caller encodes that, lets the
engine generate, parses, and calls `commit`, the only place that adds nodes. Nothing here checkpoints or does I/O, so a
match and a commit are each atomic for Trio tasks; between the two other turns may commit, and `commit` looks again.

Not here: encoding (tokens/), selection for training (export.py), retries and delivery (runtime/).
"""

from __future__ import annotations

import hashlib
import math
import pickle
from array import array
from collections.abc import Sequence

from attrs import evolve, frozen

from relax_trio.data.image import EncodedImage
from relax_trio.data.json import JsonObject
from relax_trio.data.messages import Message
from relax_trio.data.request import FinishReason
from relax_trio.data.sample import VersionSpan
from relax_trio.errors import EngineFault, InvalidRequest
from relax_trio.events import emit
from relax_trio.forest.hashing import chain, message_hash, next_state, prefilled_state, root_state
from relax_trio.forest.matching import Position, Recognized, StateIndex, UnechoedReasoning
from relax_trio.forest.node import Node, Tree
from relax_trio.ids import NodeId, StateHash


@frozen(kw_only=True)
class Match:
    """Where a request stands.

    Attributes:
      parent: what the new tokens are appended to: the technical root or a response, never an observation (whose tokens
        already end with the generation prompt).
      observation: the committed observation below `parent` that equals the request, if there is one; its tokens are
        used and nothing is encoded.
      new_messages: messages behind `parent`; those of `observation` where that is set. Never empty.
      new_states: state of the conversation after each of them; of `observation` only the last.
      tree: its tools and template arguments.
      n_restored: messages of the request that were taken as a committed response with reasoning.
      prefill: text with which the client has begun the response, see `prefilled`.
    """

    parent: Node
    observation: Node | None
    new_messages: tuple[Message, ...]
    new_states: tuple[StateHash, ...]
    tree: Tree
    n_restored: int = 0
    prefill: str = ""

    def prefilled(self, prefill: str) -> Match:
        """The same request, whose response the client has begun: an observation of its own, whatever is known."""
        return evolve(self, observation=None, prefill=prefill)

    @property
    def state(self) -> StateHash:
        """Identity of the whole request."""
        return self.new_states[-1]


class SessionForest:
    """The committed conversation states of one Session.

    Args:
      unechoed_reasoning: "restore" takes an assistant message without reasoning that otherwise equals one committed
        response at that place as that response; "fork" makes it a state of its own.
    """

    def __init__(self, *, unechoed_reasoning: UnechoedReasoning = "restore") -> None:
        self._unechoed: UnechoedReasoning = unechoed_reasoning
        self._root = Node(
            id=NodeId(0),
            parent=None,
            kind="root",
            tree=None,
            token_ids=array("i"),
            logprobs=array("d"),
            state=StateHash(bytes(32)),
            delivered=True,
        )
        self._nodes = [self._root]
        self._index = StateIndex()
        self._trees: dict[StateHash, Tree] = {}
        self._root_states: dict[bytes, StateHash] = {}
        self._n_restored = 0

    @property
    def unechoed_reasoning(self) -> UnechoedReasoning:
        """How a message without its reasoning is read."""
        return self._unechoed

    @property
    def root(self) -> Node:
        """The technical root: no tokens, parent of all trees."""
        return self._root

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes in order of commit; `nodes[i].id == i`, the technical root first."""
        return tuple(self._nodes)

    @property
    def trees(self) -> tuple[Tree, ...]:
        """Every (tools, template arguments) that has a committed state, in order of first commit."""
        return tuple(self._trees.values())

    def known_tree(self, tools: Sequence[JsonObject], chat_template_kwargs: JsonObject) -> Tree | None:
        """The committed tree with these tools and template arguments, if there is one."""
        return self._trees.get(root_state(tools, chat_template_kwargs))

    @property
    def n_restored(self) -> int:
        """Responses that some client sent back without their reasoning, each counted once."""
        return self._n_restored

    # --- a turn ------------------------------------------------------------------------------------------------

    def match(
        self, messages: Sequence[Message], tools: Sequence[JsonObject], chat_template_kwargs: JsonObject
    ) -> Match:
        """Find the longest committed prefix of a request; adds no node.

        Costs a comparison for each message of a beginning that an earlier request had, a hash for each one behind.

        Marks the responses the request builds on as delivered: the client could not know them otherwise.

        Raises:
          InvalidRequest: no message, or the last one is the assistant's. The beginning of a turn is no message: see
            `Match.prefilled`.
        """
        if not messages or messages[-1].role == "assistant":
            raise InvalidRequest(
                "the last message is from the assistant; only plain text of it at the end of a /v1/messages request is "
                "continued: append a user or tool message, or send the history without it to have that turn generated "
                "again",
                param=f"messages[{len(messages) - 1}]" if messages else "messages",
            )
        tree = self._tree(tools, chat_template_kwargs)
        at, request = self._longest(tree, messages)
        self._count_restored(at.restored)
        if at.mark is not None:
            self._index.keep(request, at.mark)
        _deliver(at.response)
        if at.n_matched == len(messages):
            return Match(
                parent=_parent(at.node),
                observation=at.node,
                new_messages=at.node.messages,
                new_states=(at.node.state,),
                tree=tree,
                n_restored=at.n_restored,
            )
        n_read = at.n_answered - request.reading.n_answered
        new_states = request.states[n_read:]
        if at.n_restored:
            new_states = chain(at.response.state, request.digests[n_read:])
        return Match(
            parent=at.response,
            observation=None,
            new_messages=tuple(messages[at.n_answered :]),
            new_states=tuple(new_states[1:]),
            tree=tree,
            n_restored=at.n_restored,
        )

    def commit(
        self,
        match: Match,
        observation_ids: array[int],
        *,
        message: Message,
        token_ids: array[int],
        logprobs: array[float],
        versions: tuple[VersionSpan, ...],
        finish: FinishReason,
        stop_string: str | None = None,
        images: tuple[EncodedImage, ...] = (),
    ) -> Node:
        """Record one turn: the observation that was sent (unless it is known) and the response that came back.

        A response whose canonical message equals one committed at the same state is counted on that one, which is
        returned: its tokens stand. Never checkpoints.

        Args:
          observation_ids: `array('i')` encoding of `match.new_messages` and of the prefill; ignored where
            `match.observation` is set.
          message: the canonical assistant message parsed from `token_ids`.
          token_ids, logprobs: `array('i')`, `array('d')`, what the engine returned, C each.
          versions: spans over the C tokens.
          images: of `match.new_messages`, in order; ignored where `match.observation` is set.

        Raises:
          EngineFault: lengths disagree, a logprob is not finite, or `message` is not the assistant's.
        """
        _check_turn(message, token_ids, logprobs, versions)
        state = next_state(match.state, message_hash(message))
        known = self._index.nodes.get(state)
        if known is not None and known.kind == "response":
            known.n_equal += 1
            return known
        observation = self._observation(match, observation_ids, images)
        node = self._add(
            Node(
                id=NodeId(len(self._nodes)),
                parent=observation,
                kind="response",
                tree=observation.tree,
                messages=(message,),
                token_ids=array("i", token_ids),
                logprobs=array("d", logprobs),
                versions=versions,
                state=state,
                finish=finish,
                stop_string=stop_string,
                prefix_len=observation.total_len,
                n_messages=observation.n_messages + 1,
            )
        )
        self._index.add_response(node, observation, match.state)
        return node

    def mark_delivered(self, node: Node) -> None:
        """The client has `node`'s reply."""
        _deliver(node)

    # --- reading -----------------------------------------------------------------------------------------------

    def find(
        self, messages: Sequence[Message], tools: Sequence[JsonObject], chat_template_kwargs: JsonObject
    ) -> Position:
        """The longest committed prefix, by the rule `match` uses; nothing is marked or counted."""
        return self._longest(self._tree(tools, chat_template_kwargs), messages)[0]

    def lineage(self, node: Node) -> tuple[Node, ...]:
        """Nodes from the first observation to `node`; empty for the technical root."""
        found: list[Node] = []
        at: Node | None = node
        while at is not None and at.kind != "root":
            found.append(at)
            at = at.parent
        return tuple(reversed(found))

    def tokens(self, node: Node) -> array[int]:
        """A new `array('i')` with the lineage's tokens, exactly as the engine saw them."""
        ids = array("i")
        ids.frombytes(b"".join([step.token_ids for step in self.lineage(node)]))
        return ids

    def images(self, node: Node) -> tuple[EncodedImage, ...]:
        """Images of the lineage: what stands for the placeholders among its tokens, in order."""
        return tuple(image for step in self.lineage(node) for image in step.images)

    def messages(self, node: Node) -> tuple[Message, ...]:
        """Canonical messages of the lineage."""
        return tuple(message for step in self.lineage(node) for message in step.messages)

    def leaves(self) -> tuple[Node, ...]:
        """Responses with nothing below them, in order of commit."""
        return tuple(node for node in self._nodes if node.kind == "response" and not node.children)

    def exportable_leaves(self) -> tuple[Node, ...]:
        """Delivered responses with no delivered response below them, in order of commit.

        What a client never received counts for nothing: its parent response stays a leaf.
        """
        built_on = {
            parent.id
            for node in self._nodes
            if node.kind == "response" and node.delivered and (parent := _parent(_parent(node))).kind == "response"
        }
        return tuple(n for n in self._nodes if n.kind == "response" and n.delivered and n.id not in built_on)

    # --- inside ------------------------------------------------------------------------------------------------

    def _tree(self, tools: Sequence[JsonObject], chat_template_kwargs: JsonObject) -> Tree:
        # a Session sends the same tools again and again; their pickle is only a key, and cheaper than sorted JSON
        key = hashlib.sha256(pickle.dumps((tuple(tools), chat_template_kwargs))).digest()
        state = self._root_states.get(key)
        if state is None:
            state = self._root_states[key] = root_state(tools, chat_template_kwargs)
        known = self._trees.get(state)
        return known or Tree(state=state, tools=tuple(tools), chat_template_kwargs=chat_template_kwargs)

    def _longest(self, tree: Tree, messages: Sequence[Message]) -> tuple[Position, Recognized]:
        """Where `messages` stand, and what had to be read of them."""
        request = self._index.recognize(self._root, tree.state, messages)
        return self._index.longest(request, self._unechoed), request

    def _observation(self, match: Match, observation_ids: array[int], images: tuple[EncodedImage, ...]) -> Node:
        if match.observation is not None:
            return match.observation
        state, states = match.state, match.new_states
        if match.prefill:
            state = prefilled_state(match.state, match.prefill)
            states = (*states, state)
        for child in match.parent.children:
            # a concurrent turn may have committed it; equal messages with other tokens (a template that prints the
            # time) are a delta of their own, because recorded tokens are what the engine was sent
            if child.state == state and child.token_ids == observation_ids:
                return child
        tree = match.parent.tree or self._trees.setdefault(match.tree.state, match.tree)
        node = self._add(
            Node(
                id=NodeId(len(self._nodes)),
                parent=match.parent,
                kind="observation",
                tree=tree,
                messages=match.new_messages,
                token_ids=array("i", observation_ids),
                logprobs=array("d"),
                state=state,
                prefill=match.prefill,
                images=images,
                prefix_len=match.parent.total_len,
                n_messages=match.parent.n_messages + len(match.new_messages),
                delivered=True,
            )
        )
        self._index.add_observation(node, match.parent, states)
        return node

    def _add(self, node: Node) -> Node:
        self._nodes.append(node)
        _parent(node).children.append(node)
        return node

    def _count_restored(self, restored: Sequence[Node]) -> None:
        fresh = [node for node in restored if not node.restored]
        if fresh and not self._n_restored:
            emit("reasoning.restored", node=fresh[0].id, state=fresh[0].state.hex()[:16])
        for node in fresh:
            node.restored = True
            self._n_restored += 1


def _parent(node: Node) -> Node:
    if node.parent is None:
        raise EngineFault("the technical root has no parent")
    return node.parent


def _deliver(node: Node) -> None:
    """Mark `node` and what it builds on; ancestors of a delivered response are delivered already."""
    at: Node | None = node
    while at is not None and not (at.kind == "response" and at.delivered):
        at.delivered = True
        at = at.parent


def _check_turn(
    message: Message, token_ids: array[int], logprobs: array[float], versions: tuple[VersionSpan, ...]
) -> None:
    if message.role != "assistant":
        raise EngineFault(f"a turn was parsed into a {message.role} message")
    n_spanned = sum(span.n_tokens for span in versions)
    if not len(token_ids) == len(logprobs) == n_spanned:
        raise EngineFault(
            f"{len(token_ids)} tokens, {len(logprobs)} logprobs, {n_spanned} versioned tokens in one turn"
        )
    if not all(math.isfinite(value) for value in logprobs):
        raise EngineFault("a logprob of a turn is not finite")
