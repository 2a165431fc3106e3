"""From what an agent asked to export to the contexts that are trained.

Implicit: the one exportable leaf. Explicit: each record names a committed state by its messages, tools and template
arguments. The choice of leaves and their tokens is here; rewards and credit are not.
"""

from __future__ import annotations

from collections.abc import Sequence

from relax_trio.data.json import JsonObject
from relax_trio.data.record import ExportRecord, Reward, SessionOutput
from relax_trio.data.sample import Context, SampleStatus
from relax_trio.errors import AmbiguousLeaf, NoCommittedResponse, UnknownState
from relax_trio.forest.difference import explain_unknown_state
from relax_trio.forest.forest import SessionForest
from relax_trio.forest.lineage import assemble
from relax_trio.forest.node import Node
from relax_trio.ids import NodeId

_NAMED_LEAVES = 8


def export_contexts(forest: SessionForest, output: SessionOutput, *, dedup_shared_turns: bool) -> tuple[Context, ...]:
    """Select and join the contexts of one Session, in the order of its records.

    Args:
      dedup_shared_turns: a response that several contexts hold is trained in the first of them only.

    Raises:
      NoCommittedResponse: nothing was generated on the exported lineage (or nothing reached the client).
      AmbiguousLeaf: implicit export of a forest with more than one exportable leaf; names them.
      UnknownState: a record equals no committed state; shows the nearest one and the first difference.
    """
    trained: set[NodeId] = set()
    if not output.records:
        leaf = _only_leaf(forest)
        return (_context(forest, leaf, None, output.metadata, output.reward, trained),)
    contexts = []
    for record in output.records:
        node = _recorded_state(forest, record)
        context = _context(forest, node, record.name, record.metadata, record.reward, trained)
        contexts.append(context)
        if dedup_shared_turns:
            trained.update(context.turn_nodes)
    return tuple(contexts)


def shared_trained_tokens(contexts: Sequence[Context]) -> int:
    """Tokens of one Session's contexts that are trained more than once (each repetition counts)."""
    n_trained = sum(sum(context.loss_mask) for context in contexts)
    turns = {
        node: n_tokens
        for context in contexts
        for node, n_tokens in zip(context.turn_nodes, context.turn_lens, strict=True)
    }
    return n_trained - sum(turns.values())


def _only_leaf(forest: SessionForest) -> Node:
    leaves = forest.exportable_leaves()
    if len(leaves) == 1:
        return leaves[0]
    if leaves:
        named = "; ".join(_leaf_name(forest, leaf) for leaf in leaves[:_NAMED_LEAVES])
        more = f"; and {len(leaves) - _NAMED_LEAVES} more" if len(leaves) > _NAMED_LEAVES else ""
        raise AmbiguousLeaf(
            f"the Session has {len(leaves)} conversations that could be exported: {named}{more}. Write one named "
            "record with its messages for each context to train"
        )
    if forest.leaves():
        raise NoCommittedResponse(
            "no response reached the agent: every model call was given up by its client before it was answered"
        )
    raise NoCommittedResponse("the agent made no model call that was answered, so there is nothing to train on")


def _recorded_state(forest: SessionForest, record: ExportRecord) -> Node:
    at = forest.find(record.messages, record.tools, record.chat_template_kwargs)
    if at.n_matched != len(record.messages) or at.node.kind == "root":
        why = explain_unknown_state(forest, record.messages, record.tools, record.chat_template_kwargs)
        raise UnknownState(f"record {record.name!r} equals no committed state: {why}")
    return at.node


def _context(
    forest: SessionForest, node: Node, name: str | None, metadata: JsonObject, reward: Reward, trained: set[NodeId]
) -> Context:
    joined = assemble(forest.lineage(node), untrained=trained)
    if not joined.turn_nodes:
        raise NoCommittedResponse(f"record {name!r} ends before the first response, so it holds nothing to train on")
    cut = node.kind == "observation" or node.finish == "length"
    return Context(
        name=name,
        node_id=node.id,
        messages=forest.messages(node),
        images=forest.images(node),
        tokens=joined.tokens,
        prompt_len=joined.prompt_len,
        loss_mask=joined.loss_mask,
        logprobs=joined.logprobs,
        turn_lens=joined.turn_lens,
        turn_starts=joined.turn_starts,
        turn_nodes=joined.turn_nodes,
        versions=joined.versions,
        status=SampleStatus.TRUNCATED if cut else SampleStatus.COMPLETED,
        metadata=metadata,
        reward=reward,
    )


def _leaf_name(forest: SessionForest, leaf: Node) -> str:
    first = next((" ".join(m.texts) for m in forest.messages(leaf) if m.role == "user"), None)
    last = leaf.messages[0]
    said = str(last.content or ", ".join(f"call {call.name}" for call in last.tool_calls) or "")
    return f"node {leaf.id} ({leaf.n_messages} messages, from {str(first)[:30]!r} to {said[:30]!r})"
