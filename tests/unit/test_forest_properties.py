"""SessionForest against a naive reference on random conversation trees.

The reference keeps every committed state by its messages, tries every prefix of every reading of a request from the
longest down, and remembers what the engine was sent and returned. It costs quadratic to exponential time and shares no
code with the package.
"""

from __future__ import annotations

import os
from array import array

import pytest
from attrs import define, evolve, field, frozen
from builders_forest import encode, spans
from builders_tokens import LOOK, assistant, result, system, user
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_trio.data.messages import Message
from relax_trio.data.record import ExportRecord, SessionOutput
from relax_trio.forest.export import export_contexts, shared_trained_tokens
from relax_trio.forest.forest import Match, SessionForest
from relax_trio.forest.lineage import assemble
from relax_trio.forest.node import Node

SOAK = int(os.environ.get("SOAK", "1"))
"""How many times the usual number of examples a property gets; `tools/nightly` raises it."""

NEW = [user("a"), user("b"), system("s"), result("1"), result("")]
REPLIES = [
    assistant("x"),
    assistant("y"),
    assistant("x", reasoning="one"),
    assistant("x", reasoning="two"),
    assistant(None, reasoning="one"),
    assistant(""),
]
TREES = [((), {}), ((LOOK,), {}), ((), {"enable_thinking": False})]


@define
class Reference:
    """What was committed, by (tree number, messages)."""

    unechoed: str
    observations: dict[tuple, Node] = field(factory=dict)
    responses: dict[tuple, Node] = field(factory=dict)
    sent: dict[int, tuple[array, int]] = field(factory=dict)  # response id → lineage tokens, generated length

    def readings(self, tree: int, messages: tuple[Message, ...]) -> list[list[tuple[Message, ...]]]:
        """All readings of the messages, as their prefixes from short to long; as written first."""
        found: list[tuple[tuple[Message, ...], int]] = [((), 0)]
        levels = [found]
        for message in messages:
            found = [
                longer
                for reading, n_restored in found
                for longer in [((*reading, message), n_restored), *self._restored(tree, reading, message, n_restored)]
            ]
            levels.append(found)
        return levels

    def _restored(self, tree, reading, message, n_restored):
        if self.unechoed == "fork" or message.role != "assistant" or message.reasoning_content is not None:
            return []
        if (tree, reading) not in self.observations:
            return []
        same = [
            (key[1][-1], node)
            for key, node in self.responses.items()
            if key[0] == tree
            and key[1][:-1] == reading
            and key[1][-1].reasoning_content is not None
            and evolve(key[1][-1], reasoning_content=None, content=key[1][-1].content or "")
            == evolve(message, content=message.content or "")
        ]
        delivered = [found for found in same if found[1].delivered]
        best = (delivered or same)[-1:]
        return [((*reading, committed), n_restored + 1) for committed, _ in best]

    def find(self, tree: int, messages: tuple[Message, ...]) -> tuple[Node | None, int, int]:
        """Deepest committed node, its depth, how many restored; None where no prefix is committed."""
        levels = self.readings(tree, messages)
        for depth in range(len(messages), 0, -1):
            for reading, n_restored in levels[depth]:
                node = self.responses.get((tree, reading)) or self.observations.get((tree, reading))
                if node is not None:
                    return node, depth, n_restored
        return None, 0, 0


def mostly(common, *rare):
    """`common` eight times as often as all of `rare` together."""
    return st.sampled_from([common] * (8 * len(rare)) + list(rare))


@frozen(kw_only=True)
class Operation:
    """One request: some committed conversation, changed, with new messages; and what comes of it."""

    back: int  # which node is continued, counted from the last one
    other_tree: int  # sent with the tools and arguments of another tree
    cut: int  # how many of its last messages are cut off
    drop: int  # which assistant messages lose their reasoning
    own: int | None  # an answer of the agent's own making, before the new messages
    new: tuple[int, ...]
    reply: int
    delay: int  # how many turns later it commits
    delivered: bool
    n_tokens: int


operations = st.lists(
    st.builds(
        Operation,
        back=st.integers(0, 5),
        other_tree=mostly(0, 1, 2),
        cut=mostly(0, 1, 2, 3, 4),
        drop=st.sampled_from([0, 0, 0, 1, 2, 3]),
        own=mostly(None, *range(len(REPLIES))),
        new=st.sampled_from([(0,), (1,), (2,), (3,), (4,), (0, 1), (3, 4)]),
        reply=st.integers(0, len(REPLIES) - 1),
        delay=mostly(0, 1, 2),
        delivered=mostly(True, False),
        n_tokens=st.integers(0, 3),
    ),
    min_size=1,
    max_size=16,
)


def request(forest: SessionForest, operation: Operation) -> tuple[int, tuple[Message, ...]]:
    """Number of the tree, and the messages."""
    node = forest.nodes[-1 - operation.back % len(forest.nodes)]
    own_tree = (
        0
        if node.tree is None
        else next(
            i
            for i, (tools, kwargs) in enumerate(TREES)
            if (tools, kwargs) == (node.tree.tools, node.tree.chat_template_kwargs)
        )
    )
    history = list(forest.messages(node))
    history = history[: max(0, len(history) - operation.cut)]
    for index, message in enumerate(history):
        if message.role == "assistant" and (operation.drop >> (index // 2 % 2)) & 1:
            history[index] = evolve(message, reasoning_content=None, content=message.content or "")
    if operation.own is not None:
        history.append(REPLIES[operation.own])
    tree = (own_tree + operation.other_tree) % len(TREES)
    return tree, (*history, *(NEW[index] for index in operation.new))


def check_match(reference: Reference, tree: int, messages: tuple[Message, ...], match: Match) -> None:
    node, depth, n_restored = reference.find(tree, messages)
    if node is None:
        assert match.parent.kind == "root"
        assert match.new_messages == messages
    elif node.kind == "response":
        assert (match.parent, match.observation) == (node, None)
        assert match.new_messages == messages[depth:]
    else:
        assert match.parent is node.parent
        assert match.observation is (node if depth == len(messages) else None)
        assert match.new_messages == messages[depth - len(node.messages) :]
    assert match.n_restored == n_restored


def commit(forest: SessionForest, reference: Reference, tree: int, match: Match, operation: Operation) -> None:
    reply, n_tokens = operation.reply, operation.n_tokens
    observation_ids = array("i") if match.observation else encode(match.new_messages)
    sent = forest.tokens(match.observation or match.parent) + observation_ids
    serial = len(forest.nodes)
    generated = array("i", [5000 + 10 * serial + index for index in range(n_tokens)])
    n_before = len(forest.nodes)
    node = forest.commit(
        match,
        observation_ids,
        message=REPLIES[reply],
        token_ids=generated,
        logprobs=array("d", [-0.25 * (index + 1) for index in range(n_tokens)]),
        versions=spans(n_tokens),
        finish="stop",
    )
    before = forest.messages(match.parent) + match.new_messages
    key = (tree, (*before, REPLIES[reply]))
    known = reference.responses.get(key)
    if known is not None:
        assert node is known, "an equal response under one state is one node"
        assert len(forest.nodes) == n_before
    else:
        assert len(forest.nodes) > n_before
        assert node.parent is not None
        reference.observations.setdefault((tree, before), node.parent)
        reference.responses[key] = node
        reference.sent[node.id] = (sent + generated, n_tokens)
    if operation.delivered:
        forest.mark_delivered(node)


def play(forest: SessionForest, reference: Reference, script: list[Operation]) -> None:
    waiting: list[tuple[int, int, Match, Operation]] = []
    for clock, operation in enumerate(script):
        tree, messages = request(forest, operation)
        match = forest.match(messages, *TREES[tree])
        check_match(reference, tree, messages, match)
        waiting.append((clock + operation.delay, tree, match, operation))
        for due in [entry for entry in waiting if entry[0] <= clock]:
            waiting.remove(due)
            commit(forest, reference, *due[1:])
    for _, tree, match, operation in waiting:
        commit(forest, reference, tree, match, operation)


@pytest.mark.parametrize("unechoed", ["restore", "fork"])
@settings(max_examples=250 * SOAK, deadline=None)
@given(script=operations)
def test_random_trees_match_as_the_reference_does_and_export_what_was_sent_and_returned(unechoed, script):
    forest, reference = SessionForest(unechoed_reasoning=unechoed), Reference(unechoed)
    play(forest, reference, script)
    for (tree, messages), node in reference.responses.items():
        at = forest.find(messages, *TREES[tree])
        assert (at.node, at.n_matched) == (node, len(messages)), "every committed response is reachable"
        lineage_tokens, _ = reference.sent[node.id]
        assert forest.tokens(node) == lineage_tokens
        check_assembled(forest, reference, node)
    check_export(forest, reference)


def check_assembled(forest: SessionForest, reference: Reference, node: Node) -> None:
    joined = assemble(forest.lineage(node))
    assert joined.tokens == reference.sent[node.id][0]
    trained = [joined.tokens[joined.prompt_len + i] for i, bit in enumerate(joined.loss_mask) if bit]
    generated = [t for step in forest.lineage(node) if step.kind == "response" for t in step.token_ids]
    assert trained == generated
    assert all(token >= 5000 for token in trained)
    assert all((logprob < 0) == bool(bit) for logprob, bit in zip(joined.logprobs, joined.loss_mask, strict=True))
    assert sum(joined.turn_lens) == len(generated) == sum(span.n_tokens for span in joined.versions)


def check_export(forest: SessionForest, reference: Reference) -> None:
    records = tuple(
        ExportRecord(
            name=f"c{i}", messages=key[1], tools=TREES[key[0]][0], chat_template_kwargs=TREES[key[0]][1], metadata={}
        )
        for i, key in enumerate(reference.responses)
    )
    output = SessionOutput(records=records, metadata={})
    contexts = export_contexts(forest, output, dedup_shared_turns=False)
    assert [c.tokens for c in contexts] == [reference.sent[node.id][0] for node in reference.responses.values()]
    once = export_contexts(forest, output, dedup_shared_turns=True)
    n_distinct = sum(n_tokens for _, n_tokens in reference.sent.values())
    assert sum(sum(context.loss_mask) for context in once) == n_distinct, (
        "every generated token is trained exactly once"
    )
    assert shared_trained_tokens(once) == 0
    assert shared_trained_tokens(contexts) == sum(sum(c.loss_mask) for c in contexts) - n_distinct
    assert [c.logprobs for c in once] == [c.logprobs for c in contexts]
