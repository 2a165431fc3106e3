"""How a template ends an assistant turn: with a token of its own, or only by the tag of the next message.

Most templates close a turn with a token, whatever follows (`<|im_end|>`); the separator is the text between it and the
next message. Some close none: the model stops by generating the tag of the message it expects next (`<|user|>`,
`<|observation|>`), which may be another than the one that comes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from attrs import evolve, frozen

from relax_trio.data.json import JsonObject
from relax_trio.data.messages import Message, ToolCall
from relax_trio.errors import ConfigError, InvalidRequest
from relax_trio.tokens.control import ControlTokens, Found
from relax_trio.tokens.sentinel import OPENING, SENTINEL, behind, stand_ins
from relax_trio.tokens.template import ChatTemplate

_NEXT: Final = "qzRelaxNextMessage7Kqz"
_USER: Final = Message(role="user", content=_NEXT)
_CALL: Final = ToolCall(id="call00000", name="f", arguments="{}")
_RESULT: Final = Message(role="tool", content=_NEXT, tool_call_id=_CALL.id)
_TOOL: Final[JsonObject] = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
_PLAIN_TURN: Final = Message(role="assistant", content="y")
_CALLING_TURN: Final = Message(role="assistant", tool_calls=(_CALL,))


@frozen
class TurnEnd:
    """How one kind of turn ends before the message that follows it.

    Attributes:
      text: the control token that closes it; where nothing does, the tag of the next message.
      separator: text between a closing token and the next control token.
      closed: the template closes the turn itself, whatever follows.
    """

    text: str
    separator: str = ""
    closed: bool = True


@frozen(kw_only=True)
class TurnEnds:
    """How turns end under one template.

    Attributes:
      plain: a turn without calls, before a user message.
      calls: a turn with calls, before a result; None where the template takes or prints no calls.
      closers: texts of tokens behind which nothing is left to close: those the template ends turns with, and stop
        tokens that it writes elsewhere itself. Empty where it closes none.
      stops: texts of tokens that have to end generation.
    """

    plain: TurnEnd
    calls: TurnEnd | None
    closers: frozenset[str]
    stops: tuple[str, ...]

    def of(self, *, calling: bool) -> TurnEnd:
        """The end of a turn that made calls, or made none."""
        return self.calls if calling and self.calls is not None else self.plain


@frozen
class _Tails:
    """What stands behind a turn: before the message that follows, before a generation prompt, at the very end; and
    between two of its calls."""

    followed: str
    prompted: str | None
    last: str | None
    between_calls: str = ""


def find_turn_ends(template: ChatTemplate, stops: Sequence[str], controls: ControlTokens) -> TurnEnds:
    """Find how `template` ends plain turns and turns with calls.

    Args:
      stops: texts of the tokens that the checkpoint says end generation.
      controls: all control tokens, those among them.

    Raises:
      ConfigError: the template prints no assistant text, or no control token behind it.
    """
    plain = _plain_tails(template)
    if controls.find(plain.followed.partition(_NEXT)[0]) is None:
        raise ConfigError(
            "the chat template ends an assistant turn with no special token, so a turn's end cannot be told from its "
            "text; use a template whose assistant turns end with one (such as <|im_end|>)"
        )
    calling = _calling_tails(template)
    known = set(stops)
    ends: list[TurnEnd] = []
    finals: list[str] = []
    for tails in (plain, calling):
        if tails is None:
            continue
        found = _closing(tails, known, controls)
        ends.append(_turn_end(tails, found, controls))
        if found is not None:
            known.add(found.text)
        final = None if found is None else _token_there(tails.last, tails, found, controls)
        finals.append(final or ends[-1].text)  # the form at the end of a conversation is the one a model learns
    closing = {text for end, final in zip(ends, finals, strict=True) if end.closed for text in (end.text, final)}
    named = {text for text in stops if closing and text in template.source}
    return TurnEnds(
        plain=ends[0],
        calls=ends[1] if len(ends) > 1 else None,
        closers=frozenset(closing | named),
        stops=tuple(dict.fromkeys(text for text in finals if text)),
    )


def opening_tag(followed: str, alone: str, controls: ControlTokens) -> Found:
    """Where in `followed` the next message begins, given the same turn with nothing behind it.

    That is at a control token, whose text is given, or where the template prints none, at a place without one.
    """
    same = _common_len(followed, alone)
    found = next((found for found in controls.find_all(followed) if found.end > same), None)
    if found is not None and (found.at <= same or not followed[same : found.at].strip()):
        return found
    return Found(same, "", same)


def _closing(tails: _Tails, known: Collection[str], controls: ControlTokens) -> Found | None:
    """The token that closes the turn whatever follows, None where nothing does.

    It stands at one place before a message, before a generation prompt and at the end of the conversation, there maybe
    in another form. One that also stands between two calls is markup of the calls. Of several it is the first that is
    `known` to end turns, else the last: those before it are markup, too.
    """
    candidates = [
        found
        for found in controls.find_all(tails.followed)
        if found.text not in tails.between_calls
        and _token_there(tails.prompted, tails, found, controls) == found.text
        and _token_there(tails.last, tails, found, controls) is not None
    ]
    return next((found for found in candidates if found.text in known), candidates[-1] if candidates else None)


def _token_there(other: str | None, tails: _Tails, found: Found, controls: ControlTokens) -> str | None:
    """The control token that `other` has where the turn before a message has `found`, None where it reads otherwise.

    A tail that the template refuses to print says nothing against `found`.
    """
    if other is None:
        return found.text
    return controls.at(other, found.at) if other.startswith(tails.followed[: found.at]) else None


def _turn_end(tails: _Tails, closing: Found | None, controls: ControlTokens) -> TurnEnd:
    if closing is None:
        return TurnEnd(opening_tag(tails.followed, tails.last or "", controls).text, closed=False)
    rest = tails.followed[closing.end :].partition(_NEXT)[0]
    following = controls.find(rest)
    separator = rest if following is None else rest[: following.at]
    final = _token_there(tails.last, tails, closing, controls)
    if tails.last is not None and final is not None:  # what comes only with a message is that message's
        separator = separator[: _common_len(separator, tails.last[closing.at + len(final) :])]
    return TurnEnd(closing.text, separator)


def _plain_tails(template: ChatTemplate) -> _Tails:
    refusal: InvalidRequest | None = None
    for tools in ((), (_TOOL,)):
        try:
            tails = _tails(template, _PLAIN_TURN, _USER, tools)
        except InvalidRequest as exc:
            refusal = refusal or exc
            continue
        if tails is None:
            raise ConfigError(
                "the chat template does not print the assistant's text, so nothing can be trained with it"
            )
        return tails
    raise ConfigError(f"a plain conversation cannot be rendered: {refusal}") from refusal


def _calling_tails(template: ChatTemplate) -> _Tails | None:
    for tools in ((_TOOL,), ()):
        try:
            tails = _tails(template, _CALLING_TURN, _RESULT, tools)
        except InvalidRequest:
            continue
        if tails is not None:
            return evolve(tails, between_calls=_between_calls(template, tools))
    return None


def _between_calls(template: ChatTemplate, tools: Sequence[JsonObject]) -> str:
    two = Message(role="assistant", tool_calls=(_CALL, evolve(_CALL, id="call00001")))
    try:
        text = template.render((OPENING, next(stand_ins(two, SENTINEL))), tools, {}, add_generation_prompt=False)
    except InvalidRequest:
        return ""
    parts = text.split(SENTINEL)
    return parts[1] if len(parts) == 3 else ""


def _tails(template: ChatTemplate, turn: Message, new: Message, tools: Sequence[JsonObject]) -> _Tails | None:
    """Tails of a turn; None where the template prints nothing of it.

    Raises:
      InvalidRequest: the template refuses the turn with `new` behind it.
    """
    turn = next(stand_ins(turn, SENTINEL))

    def tail(following: tuple[Message, ...], prompt: bool) -> str | None:
        text = template.render((OPENING, turn, *following), tools, {}, add_generation_prompt=prompt)
        found = behind(text, SENTINEL)
        return None if found is None or (turn.tool_calls and not found.in_call) else found.text

    followed = tail((new,), True)
    if followed is None:
        return None
    others: list[str | None] = []
    for prompt in (True, False):
        try:
            others.append(tail((), prompt))
        except InvalidRequest:
            others.append(None)
    return _Tails(followed, others[0], others[1])


def _common_len(one: str, other: str) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
