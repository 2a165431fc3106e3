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
      InvalidRequest: the chat template refuses the conversation, or an image can't be served.

    Cancellation: safe.
    """
    at = session.forest.find(request.messages, request.tools, request.chat_template_kwargs)
    if at.n_matched == len(request.messages):
        return at.node.total_len
    new_messages = request.messages[at.n_answered :]
    new_ids, _ = await encode_new(request, at.response, new_messages, session)
    return at.response.total_len + len(new_ids)
