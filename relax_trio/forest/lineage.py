"""A lineage as one training sequence: deltas joined, with mask, logprobs and versions that line up."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence

from attrs import frozen

from relax_trio.data.sample import VersionSpan
from relax_trio.errors import EngineFault
from relax_trio.forest.node import Node
from relax_trio.ids import NodeId


@frozen(kw_only=True)
class Assembled:
    """One lineage joined; N tokens, R = N - prompt_len behind the initial observation.

    Attributes:
      tokens: `array('i')`, N ids, the concatenation of the deltas.
      prompt_len: tokens of the initial observation.
      loss_mask: R bytes; 1 on generated tokens that are to be trained, 0 elsewhere.
      logprobs: `array('d')`, R; the recorded value on every generated token, 0.0 on observations.
      turn_lens, turn_starts, turn_nodes: of each response: generated tokens, where they begin behind the prompt, node.
      versions: spans over the generated tokens.
    """

    tokens: array[int]
    prompt_len: int
    loss_mask: bytearray
    logprobs: array[float]
    turn_lens: tuple[int, ...]
    turn_starts: tuple[int, ...]
    turn_nodes: tuple[NodeId, ...]
    versions: tuple[VersionSpan, ...]


def assemble(lineage: Sequence[Node], *, untrained: Collection[NodeId] = ()) -> Assembled:
    """Join the deltas of `lineage` (first observation first).

    Args:
      untrained: responses whose loss mask is 0 although they were generated (trained in another context).

    Raises:
      EngineFault: the lineage does not begin with an observation, or lengths do not line up.
    """
    if not lineage or lineage[0].kind != "observation":
        raise EngineFault("a lineage begins with an observation")
    prompt = lineage[0]
    tokens = array("i", prompt.token_ids)
    loss_mask, logprobs = bytearray(), array("d")
    responses = [node for node in lineage if node.kind == "response"]
    for node in lineage[1:]:
        if node.prefix_len != len(tokens):
            raise EngineFault(f"node {node.id} was recorded at token {node.prefix_len} and joined at {len(tokens)}")
        tokens.extend(node.token_ids)
        trained = node.kind == "response" and node.id not in untrained
        loss_mask.extend((b"\1" if trained else b"\0") * len(node.token_ids))
        logprobs.extend(node.logprobs if node.kind == "response" else array("d", bytes(8 * len(node.token_ids))))
    joined = Assembled(
        tokens=tokens,
        prompt_len=len(prompt.token_ids),
        loss_mask=loss_mask,
        logprobs=logprobs,
        turn_lens=tuple(len(node.token_ids) for node in responses),
        turn_starts=tuple(node.prefix_len - len(prompt.token_ids) for node in responses),
        turn_nodes=tuple(node.id for node in responses),
        versions=tuple(span for node in responses for span in node.versions),
    )
    _check(joined, lineage[-1])
    return joined


def _check(joined: Assembled, last: Node) -> None:
    n_response = len(joined.tokens) - joined.prompt_len
    n_generated = sum(joined.turn_lens)
    if not len(joined.loss_mask) == len(joined.logprobs) == n_response:
        raise EngineFault(
            f"lineage of node {last.id}: {n_response} tokens behind the prompt, {len(joined.loss_mask)} mask bytes, "
            f"{len(joined.logprobs)} logprobs"
        )
    if sum(span.n_tokens for span in joined.versions) != n_generated or sum(joined.loss_mask) > n_generated:
        raise EngineFault(f"lineage of node {last.id}: mask or versions do not fit {n_generated} generated tokens")
