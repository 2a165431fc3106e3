"""The text that a template puts behind a generated turn, from a conversation of constant size.

The small conversation holds a stand-in for the turn (`sentinel`), the leading system message, which some templates
print again later, and what the template remembers of the rest (`memory`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from attrs import evolve, field, frozen

from relax_trio.data.json import JsonObject
from relax_trio.data.messages import ImagePart, Message, TextPart, ToolCall
from relax_trio.errors import InvalidRequest
from relax_trio.tokens.control import ControlTokens, Found
from relax_trio.tokens.memory import Memory, Past, find_memory, remembered
from relax_trio.tokens.pads import image_urls
from relax_trio.tokens.sentinel import Behind, behind, mark_for, moved, stand_ins
from relax_trio.tokens.template import ChatTemplate
from relax_trio.tokens.turn_end import TurnEnds, opening_tag

_CALL = ToolCall(id="call00000", name="f", arguments="{}")
_TOOL: JsonObject = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
_ANSWER = Message(role="assistant", content="y")
_RESULT = Message(role="tool", content="w", tool_call_id=_CALL.id)
_FOLLOWED = (
    (_ANSWER, Message(role="user", content="w")),
    (Message(role="assistant", tool_calls=(_CALL,)), _RESULT),
    (_ANSWER, _RESULT),
)
_SYSTEM = Message(role="system", content="v")


NUMBERS_IMAGES = "add_vision_id"
"""The template argument under which Qwen's templates number the images of a whole conversation."""


@frozen
class Tail:
    """Text behind a generated turn.

    Attributes:
      text: from the end of the turn to the generation prompt.
      end: the control token with which `text` begins: it closes the turn or opens the next message. "" where it begins
        with neither.
    """

    text: str
    end: str


def _showing(first: Message, earlier: Sequence[Message]) -> Message:
    """A user message with as many images before its text as stand in `earlier`."""
    images = tuple(ImagePart(url) for url in image_urls(earlier))
    return evolve(first, content=(*images, *map(TextPart, first.texts))) if images else first


@frozen
class _Base:
    """A small conversation that ends in a stand-in with this mark."""

    messages: tuple[Message, ...]
    tools: Sequence[JsonObject]
    kwargs: JsonObject
    mark: str

    def behind(self, template: ChatTemplate, following: Sequence[Message] | None) -> Behind | None:
        """What stands behind the stand-in when these messages and a generation prompt follow, or nothing at all."""
        messages = (*self.messages, *(following or ()))
        text = template.render(messages, self.tools, self.kwargs, add_generation_prompt=following is not None)
        return behind(text, self.mark)


@frozen(kw_only=True, eq=False)
class ObservationRenderer:
    """Renders what follows generated turns.

    Attributes:
      template: renders the small conversations.
      ends: how the template ends turns.
      controls: control tokens of the tokenizer.
      memory: what the template remembers of a conversation's beginning.
    """

    template: ChatTemplate
    ends: TurnEnds
    controls: ControlTokens
    memory: Memory = field(init=False)
    _closers: ControlTokens = field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "_closers", ControlTokens(self.ends.closers))
        object.__setattr__(self, "memory", find_memory(self._probe_tail))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[JsonObject],
        chat_template_kwargs: JsonObject,
        *,
        turn: Message,
        earlier: Sequence[Message] = (),
    ) -> Tail:
        """Text from the end of `turn` to the generation prompt behind `messages`.

        Costs the same however long the conversation is, unless the template counts its calls.

        Args:
          messages: the new messages, at least one.
          turn: the generated turn; of its calls ids and names matter, of its other texts only whether there are any.
          earlier: messages before the turn.

        Raises:
          InvalidRequest: the template refuses the messages at this place.
        """
        past = remembered(self.memory, earlier)
        if chat_template_kwargs.get(NUMBERS_IMAGES):
            past = (_showing(past[0], earlier), *past[1:])
        system = tuple(earlier[:1]) if earlier and earlier[0].role == "system" else ()
        mark = mark_for((*system, *messages))
        refusal: InvalidRequest | None = None
        reordered: Tail | None = None
        for stand_in in stand_ins(turn, mark):
            try:
                base = _Base((*system, *past, stand_in), tools, chat_template_kwargs, mark)
                found = base.behind(self.template, messages)
                tail = None if found is None else self._cut(found, messages, base)
            except InvalidRequest as exc:
                refusal = refusal or exc
                continue
            if found is not None and tail is not None and not moved(found.within, tail.text, messages):
                return tail
            reordered = reordered or tail  # the turn's text stands behind the messages; another stand-in may have none
        if reordered is not None:
            return reordered
        raise refusal or InvalidRequest(
            "the chat template prints nothing of the assistant message that these messages follow", param="messages"
        )

    def find_closer(self, text: str, at: int = 0) -> Found | None:
        """The first token in `text`, from `at` on, that closes turns."""
        return self._closers.find(text, at)

    def _cut(self, found: Behind, messages: Sequence[Message], base: _Base) -> Tail:
        """Cut off what belongs to the turn itself: the markup that closes its calls."""
        tail = found.text
        if self.ends.of(calling=found.in_call).closed:
            end = self.find_closer(tail)
            if end is not None and not moved(tail[: end.at], tail[end.at :], messages):
                return Tail(tail[end.at :], end.text)
        alone = base.behind(self.template, None)
        end = opening_tag(tail, "" if alone is None else alone.text, self.controls)
        return Tail(tail[end.at :], end.text)

    def _probe_tail(self, past: Past) -> str | None:
        """Texts behind turns that follow `past`, with and without a system message before it, joined."""
        texts: list[str] = []
        for (turn, new), system in product(_FOLLOWED, ((), (_SYSTEM,))):
            mark = mark_for((new,))
            base = _Base((*system, *past, next(stand_ins(turn, mark))), (_TOOL,), {}, mark)
            try:
                found = base.behind(self.template, (new,))
            except InvalidRequest:
                continue
            texts += [] if found is None else [found.text]
        return "\x00".join(texts) if texts else None
