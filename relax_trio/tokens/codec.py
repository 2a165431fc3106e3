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
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from attrs import field, frozen

from relax_trio.data.json import JsonObject, JsonValue, canonical_json, parse_json
from relax_trio.data.messages import Message, ToolCall
from relax_trio.data.normalize import assistant_message
from relax_trio.data.request import FinishReason
from relax_trio.errors import ConfigError, EngineFault, boundary
from relax_trio.ids import StateHash
from relax_trio.tokens.parsers.base import ReasoningParser, ToolCallParser
from relax_trio.tokens.parsers.registry import reasoning_parser as named_reasoning_parser
from relax_trio.tokens.parsers.registry import tool_call_parser as named_tool_call_parser
from relax_trio.tokens.template import ChatTemplate
from relax_trio.tokens.turn_end import TurnEnd, after_sentinel, find_turn_ends, first_end, sentinel_base


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
      template: renders to text.
      turn_ends: what the template puts after a plain turn and after tool calls.
      stop_token_ids: ids that end generation: the checkpoint's, the tokenizer's, the template's end of turn.
      vocab_len: ids the tokenizer knows, added tokens included.
    """

    template: ChatTemplate
    turn_ends: tuple[TurnEnd, ...]
    stop_token_ids: tuple[int, ...]
    vocab_len: int
    _encode: Callable[[str], list[int]] = field(repr=False)
    _decode: Callable[[list[int]], str] = field(repr=False)
    _ends: dict[str, int] = field(repr=False)
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
        if not checkpoint.is_dir():
            raise ConfigError(f"checkpoint {checkpoint} is not a directory")
        from transformers import AutoTokenizer  # heavy, and most rooms never need it

        with boundary(ConfigError, f"the tokenizer of {checkpoint} cannot be read", OSError, ValueError, KeyError):
            tokenizer = AutoTokenizer.from_pretrained(str(checkpoint), local_files_only=True)
        return cls.from_tokenizer(
            tokenizer,
            name=str(checkpoint),
            eos_ids=_generation_eos(checkpoint),
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
    ) -> ChatCodec:
        """Make a codec of a Hugging Face tokenizer with a chat template; `eos_ids` as in its generation config.

        Raises:
          ConfigError: as `load`.
        """
        if not tokenizer.chat_template:
            raise ConfigError(f"{name} has no chat template; add one (chat_template.jinja) to the checkpoint")
        template = ChatTemplate(tokenizer)
        declared = [*eos_ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])]
        stops = [str(tokenizer.convert_ids_to_tokens(token_id)) for token_id in declared]
        specials = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        turn_ends = find_turn_ends(template, stops, [*stops, *specials])
        ends = {text: _single_id(tokenizer, text, name) for text in (*stops, *(end.text for end in turn_ends))}
        encode, decode = _text_functions(tokenizer)
        return cls(
            template=template,
            turn_ends=turn_ends,
            stop_token_ids=tuple(dict.fromkeys([*declared, *(ends[end.text] for end in turn_ends)])),
            vocab_len=len(tokenizer),
            encode=encode,
            decode=decode,
            ends=ends,
            reasoning=named_reasoning_parser(reasoning_parser),
            calls=named_tool_call_parser(tool_call_parser),
        )

    # --- messages → ids ----------------------------------------------------------------------------------------

    def encode_opening(
        self, messages: Sequence[Message], tools: Sequence[JsonObject], chat_template_kwargs: JsonObject
    ) -> array[int]:
        """`array('i')` of a whole conversation with the generation prompt: the first observation of a tree.

        Raises:
          InvalidRequest: the template refuses the conversation.
        """
        text = self.template.render(messages, tools, chat_template_kwargs, add_generation_prompt=True)
        return array("i", self._encode(text))

    def encode_observation(
        self,
        messages: Sequence[Message],
        tools: Sequence[JsonObject],
        chat_template_kwargs: JsonObject,
        *,
        after_stop: bool,
        after_tool_calls: bool,
        calls: Sequence[ToolCall] = (),
    ) -> array[int]:
        """`array('i')` of what the template puts behind a generated turn: its end, `messages`, the generation prompt.

        Costs the same however long the history is. For a template that only appends it is the tail of the rendering of
        the whole conversation.

        Args:
          messages: the new messages, at least one.
          after_stop: the recorded turn already ends with the template's end-of-turn token (`ends_turn`), so it is not
            supplied again.
          after_tool_calls: the recorded turn made tool calls.
          calls: those calls, for templates that print their names or check their ids again; without them ids are taken
            from the results.

        Raises:
          InvalidRequest: the template refuses the messages at this place.
        """
        known = (tuple(calls) or _calls_answered(messages, tools)) if after_tool_calls else None
        base = sentinel_base(known)
        text = self.template.render((*base, *messages), tools, chat_template_kwargs, add_generation_prompt=True)
        tail = after_sentinel(text)
        found = None if tail is None else first_end(tail, self._ends)
        if tail is None or found is None:
            raise EngineFault("the chat template ends this turn otherwise than it did when it was probed")
        at, end = found
        ids = self._encode(tail[at:])
        if ids[:1] != [self._ends[end]]:
            raise EngineFault(f"the tokenizer does not keep the end-of-turn token {end!r} apart")
        return array("i", ids[1:] if after_stop else ids)

    def ends_turn(self, token_ids: Sequence[int]) -> bool:
        """Whether recorded ids end with a token that the template itself puts at the end of a turn."""
        return bool(token_ids) and token_ids[-1] in {self._ends[end.text] for end in self.turn_ends}

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

    def read_turn(
        self,
        token_ids: Sequence[int],
        *,
        stopped: bool,
        tools: Sequence[JsonObject],
        state: StateHash,
        stop_string: str | None,
        chat_template_kwargs: JsonObject | None = None,
    ) -> ParsedTurn:
        """Read one generated turn. Never raises for what a model wrote.

        Args:
          token_ids: all of the turn, stop token included.
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
        reasoning, content = None, text
        if self._reasoning is not None:
            opened = self._opens(canonical_json(chat_template_kwargs or {}))
            split = self._reasoning.split(text, opened=opened)
            reasoning, content = split.reasoning, split.content
        flags: list[str] = []
        calls: tuple[ToolCall, ...] = ()
        if tools and self._calls is not None:
            content, calls = self._tool_calls(self._calls, content, tools, state, token_ids, flags)
            if reasoning is not None and self._calls.marker in reasoning:
                flags.append("call_in_reasoning")
        finish: FinishReason = "tool_calls" if calls else "stop" if stopped else "length"
        return ParsedTurn(message=assistant_message(content, reasoning, calls), finish=finish, flags=tuple(flags))

    def _tool_calls(
        self,
        parser: ToolCallParser,
        content: str,
        tools: Sequence[JsonObject],
        state: StateHash,
        token_ids: Sequence[int],
        flags: list[str],
    ) -> tuple[str, tuple[ToolCall, ...]]:
        split = parser.split(content)
        names = {_tool_name(tool) for tool in tools}
        if split.n_unparsed:
            flags.append("unparsed_tool_call")
        if any(call.name not in names for call in split.calls):
            flags.append("unknown_tool")
        if not all(call.is_object for call in split.calls):
            flags.append("scalar_arguments")
        turn = hashlib.sha256(state + array("i", token_ids).tobytes())
        calls = tuple(
            ToolCall(id=_call_id(turn, index), name=call.name, arguments=call.arguments)
            for index, call in enumerate(split.calls)
        )
        return split.content, calls

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


def _calls_answered(messages: Sequence[Message], tools: Sequence[JsonObject]) -> tuple[ToolCall, ...]:
    """Calls that the tool results at the head of `messages` would answer; one where there are none."""
    name = _tool_name(tools[0]) if tools else "f"
    ids: list[str] = []
    for message in messages:
        if message.role != "tool":
            break
        ids.append(message.tool_call_id or "call00000")
    return tuple(ToolCall(id=call_id, name=name, arguments="{}") for call_id in ids or ["call00000"])


def _tool_name(tool: JsonObject) -> str:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""


def _single_id(tokenizer: Any, text: str, name: str) -> int:
    token_id = tokenizer.convert_tokens_to_ids(text)
    if not isinstance(token_id, int) or tokenizer.convert_ids_to_tokens(token_id) != text:
        raise ConfigError(f"{name}: the end-of-turn text {text!r} is not one token")
    return token_id


def _text_functions(tokenizer: Any) -> tuple[Callable[[str], list[int]], Callable[[list[int]], str]]:
    """Encode and decode that keep no state: the wrapper's own set truncation on each call, which threads trip over."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return (
            lambda text: list(tokenizer.encode(text, add_special_tokens=False)),
            lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)),
        )
    backend.no_truncation()
    backend.no_padding()
    return (
        lambda text: list(backend.encode(text, add_special_tokens=False).ids),
        lambda ids: str(backend.decode(ids, skip_special_tokens=False)),
    )


def _generation_eos(checkpoint: Path) -> list[int]:
    path = checkpoint / "generation_config.json"
    if not path.is_file():
        return []
    with boundary(ConfigError, f"{path} cannot be read", OSError, ValueError):
        config = parse_json(path.read_bytes())
    eos: JsonValue = config.get("eos_token_id") if isinstance(config, dict) else None
    listed = eos if isinstance(eos, list) else [eos]
    return [token_id for token_id in listed if isinstance(token_id, int)]
