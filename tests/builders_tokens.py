"""A small tokenizer with Qwen-style chat templates, and builders of messages. No download, no files."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from relax_trio.data.messages import Message, ToolCall
from relax_trio.tokens.codec import ChatCodec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
CORPUS = [
    "hello there, how are you today",
    "the answer is 42",
    '{"name": "look", "arguments": {}}',
    "user system assistant",
]

_HEAD = """\
{%- set first = messages[0] %}
{%- if tools or first.role == 'system' %}
{{- '<|im_start|>system\\n' }}
{%- if first.role == 'system' %}{{- first.content }}{%- endif %}
{%- for tool in tools or [] %}{{- '\\n' ~ (tool | tojson) }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
"""

_BODY = """\
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if message.reasoning_content and KEEP %}
{{- '<think>\\n' ~ message.reasoning_content ~ '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
{%- set args = call.function.arguments %}
{{- '<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
{{- (args if args is string else args | tojson) ~ '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- elif message.role == 'user' or not loop.first %}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

APPENDING = _HEAD + _BODY.replace("KEEP", "true")
"""Prints every earlier turn as it was generated."""

FORGETFUL = (
    _HEAD
    + "{%- set ns = namespace(last=-1) %}"
    + "{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    + _BODY.replace("KEEP", "loop.index0 > ns.last")
)
"""Drops reasoning before the last user message, as Qwen3 does."""

STRICT = """\
{%- for message in messages %}
{%- if message.role == 'system' and not loop.first %}{{- raise_exception('system must come first') }}{%- endif %}
{%- if message.role == 'tool' %}{{- raise_exception('no tools here') }}{%- endif %}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""Refuses tools, and system messages behind the first place."""

THINKING_PROMPT = APPENDING.replace(
    "{{- '<|im_start|>assistant\\n' }}{%- endif %}\n",
    "{{- '<|im_start|>assistant\\n' }}{%- if enable_thinking is not defined or enable_thinking %}"
    "{{- '<think>\\n' }}{%- endif %}{%- endif %}\n",
)
"""Opens the reasoning in the generation prompt unless enable_thinking is false."""

LOOK = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}},
}


@functools.cache
def make_tokenizer(
    template: str | None = APPENDING,
    *,
    special: tuple[str, ...] = SPECIAL,
    marks: tuple[str, ...] = MARKS,
    bos: str | None = None,
    eos: str = "<|im_end|>",
    pad: str = "<|endoftext|>",
) -> PreTrainedTokenizerFast:
    """Byte-level BPE over `CORPUS`; special tokens come first, marks are added tokens that are no control tokens."""
    from transformers import PreTrainedTokenizerFast  # slow to import, and forests need none

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in special],
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in marks])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos, pad_token=pad)
    tokenizer.chat_template = template
    return tokenizer


@functools.cache
def make_codec(
    template: str = APPENDING, *, reasoning: str | None = "qwen3", calls: str | None = "qwen25"
) -> ChatCodec:
    """A codec over `make_tokenizer`, generation config with <|endoftext|> as Qwen's has."""
    return ChatCodec.from_tokenizer(
        make_tokenizer(template), eos_ids=(0, 2), reasoning_parser=reasoning, tool_call_parser=calls
    )


def user(text: str = "hello") -> Message:
    return Message(role="user", content=text)


def system(text: str = "be kind") -> Message:
    return Message(role="system", content=text)


def assistant(text: str | None = "hi", *, reasoning: str | None = None, calls: tuple[ToolCall, ...] = ()) -> Message:
    return Message(role="assistant", content=text, reasoning_content=reasoning, tool_calls=calls)


def result(text: str = "42", call_id: str = "c1") -> Message:
    return Message(role="tool", content=text, tool_call_id=call_id)


def look_call(call_id: str = "c1", arguments: str = '{"at":1}') -> ToolCall:
    return ToolCall(id=call_id, name="look", arguments=arguments)
