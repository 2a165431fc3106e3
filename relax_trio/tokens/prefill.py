"""The beginning of a turn that a client wrote, as the template prints it behind the generation prompt."""

from __future__ import annotations

from typing import Final

from relax_trio.data.json import JsonObject
from relax_trio.data.messages import Message
from relax_trio.errors import InvalidRequest
from relax_trio.tokens.template import ChatTemplate

_ASKED: Final = (Message(role="user", content="x"),)


def prefill_text(template: ChatTemplate, prefill: str, chat_template_kwargs: JsonObject) -> str:
    """What stands behind the generation prompt where an assistant message begins with `prefill`.

    Mostly that text itself; a template that prints reasoning in every message puts an empty one before it.

    Raises:
      InvalidRequest: the template can't go on from there: its generation prompt has opened the reasoning, or it prints
        the text otherwise than it was written.
    """
    begun = (*_ASKED, Message(role="assistant", content=prefill))
    asked = template.render(_ASKED, (), chat_template_kwargs, add_generation_prompt=False)
    prompt = template.render(_ASKED, (), chat_template_kwargs, add_generation_prompt=True)
    printed = template.render(begun, (), chat_template_kwargs, add_generation_prompt=False)
    at = printed.find(prefill, len(asked))
    if not printed.startswith(prompt) or at < len(prompt):
        raise InvalidRequest(
            "the last message is from the assistant, and this chat template can't go on from it: a turn begins inside "
            "its reasoning, or the text is printed otherwise; send the history without that message",
            param="messages",
        )
    return printed[len(prompt) : at + len(prefill)]
