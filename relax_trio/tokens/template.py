"""The checkpoint's chat template, rendered to text. Knows no token ids.

Rendering is the tokenizer's own (`apply_chat_template`), so that special tokens, filters and globals are those of
Hugging Face. What a template cannot take becomes the client's 400, never a crash.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, Protocol

import jinja2
import jinja2.meta
from attrs import evolve

from relax_trio.data.json import JsonObject
from relax_trio.data.messages import Message, ToolCall
from relax_trio.errors import InvalidRequest

_TEMPLATE_ERRORS: Final = (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError)
_GENERATION_TAG: Final = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
_PROBE_CALL: Final = ToolCall(id="call00000", name="relaxprobe", arguments='{"x":1}')


class ChatTokenizer(Protocol):
    """What of a Hugging Face tokenizer a template needs."""

    def apply_chat_template(self, conversation: Any, tools: Any = None, **kwargs: Any) -> Any:
        """Render `conversation`."""
        ...

    def get_chat_template(self, chat_template: str | None = None, tools: Any = None) -> str:
        """Source of the template in use."""
        ...


class ChatTemplate:
    """Renders canonical messages with a tokenizer's chat template.

    Args:
      tokenizer: a Hugging Face tokenizer with a chat template.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self.variables = _variables(tokenizer.get_chat_template())
        """Names the template reads from outside: messages, tools, and arguments such as enable_thinking."""
        self._no_content: str | None = ""
        self._no_content = self._probe_no_content()

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[JsonObject],
        chat_template_kwargs: JsonObject,
        *,
        add_generation_prompt: bool,
    ) -> str:
        """The template's text for a conversation.

        A system message behind the first place that the template refuses there is rendered as a user message.

        Raises:
          InvalidRequest: the template refuses the conversation (with its own words), or it holds images.
        """
        try:
            return self._render(messages, tools, chat_template_kwargs, add_generation_prompt)
        except InvalidRequest:
            softened = [
                evolve(message, role="user") if index and message.role == "system" else message
                for index, message in enumerate(messages)
            ]
            if softened == list(messages):
                raise
            return self._render(softened, tools, chat_template_kwargs, add_generation_prompt)

    def _render(self, messages: Sequence[Message], tools: Sequence[JsonObject], kwargs: JsonObject, gen: bool) -> str:
        chat = [self._chat(message) for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(
                chat, tools=list(tools) or None, add_generation_prompt=gen, tokenize=False, **kwargs
            )
        except _TEMPLATE_ERRORS as exc:
            raise InvalidRequest(f"the chat template refuses this conversation: {exc}", param="messages") from exc
        return str(text)

    def _chat(self, message: Message) -> JsonObject:
        if isinstance(message.content, tuple):
            raise InvalidRequest("this checkpoint takes no images; send text content only", param="messages")
        chat = message.to_chat(arguments_as_objects=True)
        if message.content is None:
            chat["content"] = self._no_content
        return chat

    def _probe_no_content(self) -> str | None:
        """How absent content beside tool calls is given: "" unless only None makes the template print the calls."""
        turns = [
            Message(role="user", content="x"),
            Message(role="assistant", tool_calls=(_PROBE_CALL,)),
            Message(role="tool", content="y", tool_call_id=_PROBE_CALL.id),
        ]
        for value in ("", None):
            self._no_content = value
            try:
                text = self._render(turns, (), {}, False)
            except InvalidRequest:
                continue
            if _PROBE_CALL.name in text:
                return value
        return ""


def _variables(source: str) -> frozenset[str]:
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        tree = environment.parse(_GENERATION_TAG.sub("", source))
    except jinja2.TemplateSyntaxError:
        return frozenset(re.findall(r"[A-Za-z_]\w*", source))
    return frozenset(jinja2.meta.find_undeclared_variables(tree))
