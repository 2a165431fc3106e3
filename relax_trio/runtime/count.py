"""Counting the prompt of a request that is not made: what `/v1/messages/count_tokens` answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relax_trio.data.request import CanonicalRequest
from relax_trio.runtime.request import encode_new

if TYPE_CHECKING:
    from relax_trio.runtime.session import Session


async def count_prompt(request: CanonicalRequest, session: Session) -> int:
    """Tokens that the engine would be sent for `request`: those recorded, and those of what is new.

    A history that ends with the assistant can be counted too, though no turn is generated from it: one that was
    committed counts as it was recorded. The forest stays as it is.

    Raises:
      InvalidRequest: the chat template refuses the conversation.

    Cancellation: safe.
    """
    at = session.forest.find(request.messages, request.tools, request.chat_template_kwargs)
    node, n_known = at.node, at.n_matched
    if n_known == len(request.messages):
        return node.total_len
    if node.kind == "observation":  # new messages are never appended to one, see `Match.parent`
        assert node.parent is not None, "only the technical root has no parent"
        node, n_known = node.parent, n_known - len(node.messages)
    return node.total_len + len(await encode_new(request, node, request.messages[n_known:], session))
