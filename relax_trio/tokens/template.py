"""The checkpoint's chat template, rendered to text. Knows no token ids.

Rendering is the tokenizer's own (`apply_chat_template`), so that special tokens, filters and globals are those of
Hugging Face. What a template cannot take becomes the client's 400, never a crash.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final, Protocol

import jinja2
import jinja2.meta
import jinja2.nodes

from relax_trio.data.json import JsonObject
from relax_trio.data.messages import Message, Part, TextPart
from relax_trio.errors import InvalidRequest
from relax_trio.tokens.habits import Habits, find_habits
from relax_trio.tokens.pads import TEXT_ONLY
from relax_trio.tokens.placement import placements

_TEMPLATE_ERRORS: Final = (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError)
_GENERATION_TAG: Final = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
_DATE_CALL: Final = re.compile(r"""\bstrftime_now\(\s*(["'])(?P<format>[^"'\\]*)\1\s*\)""")
_GLOBALS: Final = frozenset({"raise_exception", "strftime_now"})
_TOOL: Final[JsonObject] = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}


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

    The date that a template prints is that of `now`, however long it is in use: a day that ends in the middle of a run
    must not make two prompts of one conversation differ. (Where its format is written out in the template; one that the
    template computes is left to the renderer.)

    Args:
      tokenizer: a Hugging Face tokenizer with a chat template.
      now: the date it prints; default: when it was loaded.
      takes_images: messages may hold images.
    """

    def __init__(self, tokenizer: ChatTokenizer, *, now: datetime | None = None, takes_images: bool = False) -> None:
        self.takes_images = takes_images
        self._tokenizer = tokenizer
        self._now = now or datetime.now()
        sources = [tokenizer.get_chat_template(), tokenizer.get_chat_template(tools=[_TOOL])]
        self._dated = {source: self._with_date(source) for source in sources}
        self._own_parameters = _parameters(tokenizer)
        self.source = "\n".join(dict.fromkeys(sources))
        """The template's source; the one for tools too, where there are two."""
        self.prints_date = "strftime_now(" in self.source
        """Whether the template prints the current time."""
        self.variables = frozenset().union(*map(_variables, sources)) - _GLOBALS
        """Names the template reads from outside: messages, tools, and arguments such as enable_thinking."""
        self.habits: Habits = find_habits(self.render_chat)
        """Which shapes of message it takes."""

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[JsonObject],
        chat_template_kwargs: JsonObject,
        *,
        add_generation_prompt: bool,
    ) -> str:
        """The template's text for a conversation.

        System messages that the template refuses or doesn't print where they stand are rendered as user messages, see
        `placement`.

        Raises:
          InvalidRequest: the template refuses the conversation (with its own words), or it holds images.
        """
        refusal: InvalidRequest | None = None
        habits = self.habits
        for form in placements(messages, first_system=habits.first_system, later_system=habits.later_system):
            try:
                chat = [self._chat(message) for message in form]
                return self._apply(chat, tools, chat_template_kwargs, add_generation_prompt)
            except InvalidRequest as exc:
                refusal = refusal or exc
        assert refusal is not None, "there is at least one form"
        raise refusal

    def render_chat(self, chat: Sequence[JsonObject], add_generation_prompt: bool) -> str:
        """The template's text for Chat-shaped messages as they are, without tools unless it takes no fewer.

        Raises:
          InvalidRequest: the template refuses them.
        """
        try:
            return self._apply(chat, (), {}, add_generation_prompt)
        except InvalidRequest as refusal:
            try:
                return self._apply(chat, (_TOOL,), {}, add_generation_prompt)
            except InvalidRequest:
                raise refusal from None

    def _chat(self, message: Message) -> JsonObject:
        if not isinstance(message.content, tuple):
            return self.habits.to_chat(message)
        if not self.takes_images:
            raise InvalidRequest(f"the messages hold an image, but {TEXT_ONLY}", param="messages")
        return {**self.habits.to_chat(message), "content": [_part(part) for part in message.content]}

    def _apply(self, chat: Sequence[JsonObject], tools: Sequence[JsonObject], kwargs: JsonObject, prompt: bool) -> str:
        own = sorted(self._own_parameters & kwargs.keys())
        if own:
            raise InvalidRequest(f"the template argument {own[0]} is the server's to set", param="chat_template_kwargs")
        listed = list(tools) or None
        try:
            text = self._tokenizer.apply_chat_template(
                list(chat),
                tools=listed,
                chat_template=self._dated[self._tokenizer.get_chat_template(tools=listed)],
                add_generation_prompt=prompt,
                tokenize=False,
                **kwargs,
            )
        except _TEMPLATE_ERRORS as exc:
            line = f" (line {exc.lineno} of the template)" if isinstance(exc, jinja2.TemplateSyntaxError) else ""
            raise InvalidRequest(f"the chat template refuses this conversation: {exc}{line}", param="messages") from exc
        return str(text)

    def _with_date(self, source: str) -> str:
        """The source with its calls of `strftime_now` replaced by what they give now.

        In the source, because the renderer lets no function through among the template's arguments.
        """
        return _DATE_CALL.sub(lambda call: repr(self._now.strftime(call["format"])), source)


def _part(part: Part) -> JsonObject:
    """A part as templates have it: an image is its place only."""
    return {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}


def _parameters(tokenizer: ChatTokenizer) -> frozenset[str]:
    """Names that the renderer would take for its own parameters instead of giving them to the template."""
    parameters = inspect.signature(tokenizer.apply_chat_template).parameters.values()
    return frozenset(p.name for p in parameters if p.kind != p.VAR_KEYWORD) - {"documents"}  # the template reads those


def _variables(source: str) -> frozenset[str]:
    """Undeclared names, without those that the template sets itself before it reads them.

    jinja2 counts a name as undeclared that is set in one branch only; one that is also asked whether it is defined is a
    real argument with a default.
    """
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        tree = environment.parse(_GENERATION_TAG.sub("", source))
    except jinja2.TemplateSyntaxError:
        return frozenset(re.findall(r"[A-Za-z_]\w*", source))
    written = {name.name for name in tree.find_all(jinja2.nodes.Name) if name.ctx in ("store", "param")}
    asked = {
        test.node.name
        for test in tree.find_all(jinja2.nodes.Test)
        if test.name in ("defined", "undefined") and isinstance(test.node, jinja2.nodes.Name)
    }
    return frozenset(jinja2.meta.find_undeclared_variables(tree) - (written - asked))
