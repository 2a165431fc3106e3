"""A forest as JSON, for `/debug_state?forest=1` and `--forest-out`. The runtime adds the requests."""

from __future__ import annotations

from relax_trio.data.json import JsonObject, JsonValue
from relax_trio.forest.forest import SessionForest
from relax_trio.forest.node import Node


def forest_json(forest: SessionForest) -> JsonObject:
    """All nodes but the technical root, and the leaves.

    Per node: `id`; `parent` (null below the technical root); `kind`; `messages` of the delta in Chat shape;
    `token_ids`, `loss_mask` (0 or 1) and `logprobs` (0.0 on observations), one entry per token of the delta;
    `delivered`; `state` (hex). Responses add `finish`, `n_equal` and `versions`, top observations `tools` and
    `chat_template_kwargs`. `leaves` holds the ids of responses with nothing below them, `exportable_leaves` those that
    an implicit export may choose.
    """
    nodes: list[JsonValue] = [_node(node) for node in forest.nodes if node.kind != "root"]
    return {
        "nodes": nodes,
        "leaves": [node.id for node in forest.leaves()],
        "exportable_leaves": [node.id for node in forest.exportable_leaves()],
    }


def _node(node: Node) -> JsonObject:
    n_tokens = len(node.token_ids)
    top = node.parent is None or node.parent.kind == "root"
    response = node.kind == "response"
    out: JsonObject = {
        "id": node.id,
        "parent": None if node.parent is None or top else node.parent.id,
        "kind": node.kind,
        "messages": [message.to_chat() for message in node.messages],
        "token_ids": list(node.token_ids),
        "loss_mask": [int(response)] * n_tokens,
        "logprobs": list(node.logprobs) if response else [0.0] * n_tokens,
        "delivered": node.delivered,
        "state": node.state.hex(),
    }
    if response:
        out["finish"] = node.finish
        out["n_equal"] = node.n_equal
        out["versions"] = [{"version": span.version, "n_tokens": span.n_tokens} for span in node.versions]
    if top and node.tree is not None:
        out["tools"] = list(node.tree.tools)
        out["chat_template_kwargs"] = node.tree.chat_template_kwargs
    return out
