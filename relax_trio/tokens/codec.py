"""ChatCodec: messages → token ids on the way in, token ids → a canonical assistant message on the way out.

Generated tokens are never encoded again: a turn's history is its recorded ids, and only what the template puts behind
them is encoded here, from a conversation of constant size. All methods may be called from worker threads; none is
async.
"""

from __future__ import annotations

import functools
import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from attrs import field, frozen

from relax_trio.data.image import EncodedImage
from relax_trio.data.json import JsonObject, canonical_json
from relax_trio.data.messages import Message, ToolCall
from relax_trio.data.normalize import assistant_message
from relax_trio.data.request import FinishReason
from relax_trio.errors import ConfigError, EngineFault
from relax_trio.ids import StateHash
from relax_trio.tokens.control import ControlTokens
from relax_trio.tokens.hf import generation_eos, load_tokenizer, tokenizer_parts
from relax_trio.tokens.observation import ObservationRenderer
from relax_trio.tokens.parsers.base import ParsedCall, ReasoningParser, ToolCallParser
from relax_trio.tokens.parsers.registry import reasoning_parser as named_reasoning_parser
from relax_trio.tokens.parsers.registry import tool_call_parser as named_tool_call_parser
from relax_trio.tokens.parsers.turn import read_turn_text
from relax_trio.tokens.prefill import prefill_text
from relax_trio.tokens.template import ChatTemplate
from relax_trio.tokens.turn_end import TurnEnds, find_turn_ends
from relax_trio.tokens.vision import NoVision, Vision, load_vision

NO_VISION: Final = NoVision()


@frozen(kw_only=True)
class ParsedTurn:
    """One generated turn, read.

    Attributes:
      message: the canonical assistant message, equal to what normalizing its own JSON gives.
      finish: "tool_calls" when there are calls, else "stop" or "length".
      flags: what was unusual: "unparsed_tool_call", "unknown_tool", "scalar_arguments", "call_in_reasoning".
    """

    message: Message
    finish: FinishReason
    flags: tuple[str, ...] = ()


@frozen(kw_only=True, eq=False)
class ChatCodec:
    """A checkpoint's tokenizer, chat template and parsers.

    Attributes:
      observations: renders what follows generated turns.
      stop_token_ids: ids that end generation: the checkpoint's, the tokenizer's, the template's end of turn.
      vocab_len: ids the tokenizer knows, added tokens included.
      vision: what the checkpoint does with images.
    """

    observations: ObservationRenderer
    stop_token_ids: tuple[int, ...]
    vocab_len: int
    vision: Vision
    _encode: Callable[[str], list[int]] = field(repr=False)
    _decode: Callable[[list[int]], str] = field(repr=False)
    _control_ids: Mapping[str, int] = field(repr=False)
    _closer_ids: frozenset[int] = field(repr=False)
    _reasoning: ReasoningParser | None
    _calls: ToolCallParser | None
    _opens: Callable[[str], bool] = field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "_opens", functools.lru_cache(maxsize=64)(self._prompt_opens_reasoning))

    @classmethod
    def load(cls, checkpoint: Path, *, reasoning_parser: str | None, tool_call_parser: str | None) -> ChatCodec:
        """Read the tokenizer, chat template and generation config of a checkpoint directory.

        Raises:
          ConfigError: no readable tokenizer, no chat template, a template that cannot be trained with, an unknown
            parser name.
        """
        tokenizer = load_tokenizer(checkpoint)
        return cls.from_tokenizer(
            tokenizer,
            vision=load_vision(checkpoint, tokenizer),
            name=str(checkpoint),
            eos_ids=generation_eos(checkpoint),
            reasoning_parser=reasoning_parser,
            tool_call_parser=tool_call_parser,
        )

    @classmethod
    def from_tokenizer(
        cls,
        tokenizer: Any,
        *,
        name: str = "the tokenizer",
        eos_ids: Iterable[int] = (),
        reasoning_parser: str | None = None,
        tool_call_parser: str | None = None,
        vision: Vision = NO_VISION,
    ) -> ChatCodec:
        """Make a codec of a Hugging Face tokenizer with a chat template; `eos_ids` as in its generation config.

        Raises:
          ConfigError: as `load`.
        """
        if not tokenizer.chat_template:
            raise ConfigError(f"{name} has no chat template; add one (chat_template.jinja) to the checkpoint")
        parts = tokenizer_parts(tokenizer, eos_ids=eos_ids, name=name)
        template = ChatTemplate(tokenizer, takes_images=vision.pads is not None)
        controls = ControlTokens(parts.control_ids)
        ends = find_turn_ends(template, parts.stops, controls)
        stops = dict.fromkeys(parts.control_ids[text] for text in (*parts.stops, *ends.stops))
        return cls(
            observations=ObservationRenderer(template=template, ends=ends, controls=controls),
            stop_token_ids=tuple(stops),
            vocab_len=parts.vocab_len,
            encode=parts.encode,
            decode=parts.decode,
            control_ids=parts.control_ids,
            closer_ids=frozenset(parts.control_ids[text] for text in ends.closers),
            reasoning=named_reasoning_parser(reasoning_parser),
            calls=named_tool_call_parser(tool_call_parser),
            vision=vision,
        )

    @property
    def template(self) -> ChatTemplate:
        """Renders to text."""
        return self.observations.template

    @property
    def turn_ends(self) -> TurnEnds:
        """How the template ends turns."""
        return self.observations.ends

    # --- messages → ids ----------------------------------------------------------------------------------------

    def encode_opening(
        self,
        messages: Sequence[Message],
        tools: Sequence[JsonObject],
        chat_template_kwargs: JsonObject,
        *,
        images: Sequence[EncodedImage] = (),
    ) -> array[int]:
        """`array('i')` of a whole conversation with the generation prompt: the first observation of a tree.

        Args:
          images: those of `messages`, in order; each stands there as its placeholders.

        Raises:
          InvalidRequest: the template refuses the conversation or prints no place for an image, or a text holds a
            placeholder.
        """
        self._refuse_written(messages, tools, chat_template_kwargs)
        text = self.template.render(messages, tools, chat_template_kwargs, add_generation_prompt=True)
        return self._expanded(self._encode(text), images)

    def encode_observation(
        self,
        messages: Sequence[Message],
        tools: Sequence[JsonObject],
        chat_template_kwargs: JsonObject,
        *,
        turn: Message,
        turn_ids: Sequence[int],
        earlier: Sequence[Message] = (),
        images: Sequence[EncodedImage] = (),
    ) -> array[int]:
        """`array('i')` of what the template puts behind a generated turn: its end, `messages`, the generation prompt.

        The turn's recorded tokens stand; only what is missing behind them is supplied. The end is missing where the
        turn was cut by its limit or ended by a stop string; where the model stopped with a token that ends turns in
        this template it is not, even if the template prints another one in a history. The tag of the next message is
        there where the model stopped by generating that very tag. Costs the same however long the history is.

        Args:
          messages: the new messages, at least one.
          turn: the generated turn, read.
          turn_ids: its recorded tokens.
          earlier: messages before the turn; the leading system message and what the template remembers are looked up.
          images: those of `messages`, in order; each stands there as its placeholders.

        Raises:
          InvalidRequest: the template refuses the messages at this place or prints no place for an image, or a text
            holds a placeholder.
        """
        self._refuse_written(messages, (), {})
        tail = self.observations.render(messages, tools, chat_template_kwargs, turn=turn, earlier=earlier)
        ids = self._encode(tail.text)
        if not tail.end:
            return self._expanded(ids, images)
        end_id = self._control_ids[tail.end]
        if ids[:1] != [end_id]:
            raise EngineFault(f"the tokenizer does not keep {tail.end!r} apart from the text behind it")
        last = turn_ids[-1] if turn_ids else None
        return self._expanded(ids[1:] if last == end_id or last in self._closer_ids else ids, images)

    def _refuse_written(
        self, messages: Sequence[Message], tools: Sequence[JsonObject], chat_template_kwargs: JsonObject
    ) -> None:
        if self.vision.pads is not None:
            self.vision.pads.refuse_written(messages, tools, chat_template_kwargs)

    def _expanded(self, ids: Sequence[int], images: Sequence[EncodedImage]) -> array[int]:
        """`ids` with as many placeholders as each image has."""
        return array("i", ids) if self.vision.pads is None else self.vision.pads.expand(ids, images)

    # --- ids → message -----------------------------------------------------------------------------------------

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of ids, special tokens kept. Bytes that are no UTF-8 become U+FFFD."""
        return self._decode(list(token_ids))

    def encode_text(self, text: str) -> list[int]:
        """Ids of a plain text; special tokens in it become their ids."""
        return self._encode(text)

    def token_text(self, token_id: int) -> str:
        """Text of one id; parts of a character become U+FFFD."""
        return self._decode([token_id])

    def encode_prefill(self, prefill: str, chat_template_kwargs: JsonObject) -> array[int]:
        """`array('i')` of the text with which a client begins a turn, behind the generation prompt.

        Where that prompt has opened the reasoning, it is closed, empty.

        Raises:
          InvalidRequest: the template can't go on from there.
        """
        self._refuse_written([Message(role="assistant", content=prefill)], (), {})
        if self._reasoning is not None and self._opens(canonical_json(chat_template_kwargs)):
            return self._expanded(self._encode(f"\n{self._reasoning.end}\n\n{prefill}"), ())
        return self._expanded(self._encode(prefill_text(self.template, prefill, chat_template_kwargs)), ())

    def read_turn(
        self,
        token_ids: Sequence[int],
        *,
        prefill: str = "",
        stopped: bool,
        tools: Sequence[JsonObject],
        state: StateHash,
        stop_string: str | None,
        chat_template_kwargs: JsonObject | None = None,
    ) -> ParsedTurn:
        """Read one generated turn. Never raises for what a model wrote.

        Args:
          token_ids: all that was generated of the turn, stop token included.
          prefill: the text before it with which the client began the turn.
          stopped: a stop token or string ended it (else the limit did).
          tools: the lineage's tools; calls are looked for only where there are some.
          state: identity of the request; call ids are made from it.
          stop_string: the stop string that ended it: it and what follows are not part of the message.
          chat_template_kwargs: the lineage's template arguments, which decide whether the prompt opened the reasoning.
        """
        ids = list(token_ids)
        if ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        text = self._decode(ids)
        if stop_string:
            text = text.partition(stop_string)[0]
        text = prefill + text
        kwargs = chat_template_kwargs or {}
        read = read_turn_text(
            text,
            reasoning_parser=self._reasoning,
            tool_call_parser=self._calls if tools else None,
            tools=tools,
            opened=not prefill and self._opens(canonical_json(kwargs)),
            chat_template_kwargs=kwargs,
        )
        calls = self._tool_calls(read.calls, state, token_ids)
        finish: FinishReason = "tool_calls" if calls else "stop" if stopped else "length"
        message = assistant_message(read.content, read.reasoning, calls)
        return ParsedTurn(message=message, finish=finish, flags=read.flags)

    def _tool_calls(
        self, calls: Sequence[ParsedCall], state: StateHash, token_ids: Sequence[int]
    ) -> tuple[ToolCall, ...]:
        """Calls with ids that are a function of the parent state, the tokens and the place among the calls."""
        turn = hashlib.sha256(state + array("i", token_ids).tobytes())
        return tuple(
            ToolCall(id=_call_id(turn, index), name=call.name, arguments=call.arguments)
            for index, call in enumerate(calls)
        )

    def _prompt_opens_reasoning(self, kwargs_text: str) -> bool:
        """Whether the generation prompt under these template arguments ends inside the reasoning."""
        if self._reasoning is None:
            return False
        kwargs = json.loads(kwargs_text)
        prompt = self.template.render((Message(role="user", content="x"),), (), kwargs, add_generation_prompt=True)
        _, started, rest = prompt.rpartition(self._reasoning.start)
        return bool(started) and self._reasoning.end not in rest


def _call_id(turn: hashlib._Hash, index: int) -> str:
    digest = turn.copy()
    digest.update(index.to_bytes(4, "big"))
    return f"call_{digest.hexdigest()[:24]}"
