"""The demo's tokenizer: byte-level BPE trained on the spot, with Qwen's control tokens and a ChatML template.

Owns the vocabulary, the template and the exact text of the demo's turns. It doesn't own what is said in them
(`task`).
"""

from __future__ import annotations

import json
import pydoc_data.topics
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from relax_trio.demo.task import SYSTEM_PROMPT, TOOLS, typical_conversations

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TURN = "<|im_end|>"
PADDING = "<|endoftext|>"
CONTROL_TOKENS = (PADDING, "<|im_start|>", END_OF_TURN)
"""Tokens that only the template writes; a decoder may skip them."""
MARK_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Tokens the model itself writes or reads inside a turn: part of the text, never skipped."""

_GENERATION_PROMPT = "<|im_start|>assistant\n"
_N_CONVERSATIONS = 2000
_N_ENGLISH_CHARS = 200_000


class DemoTokenizer:
    """The trained BPE with the few operations the warm start needs."""

    def __init__(self, bpe: Tokenizer) -> None:
        self._bpe = bpe

    def __len__(self) -> int:
        return self._bpe.get_vocab_size()

    @property
    def pad_id(self) -> int:
        return self.token_id(PADDING)

    def token_id(self, token: str) -> int:
        """Id of a token of the vocabulary; KeyError if there is none."""
        found = self._bpe.token_to_id(token)
        if found is None:
            raise KeyError(token)
        return found

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode each text by itself, control tokens included, nothing added."""
        return [encoding.ids for encoding in self._bpe.encode_batch_fast(texts, add_special_tokens=False)]

    def to_transformers(self) -> PreTrainedTokenizerFast:
        """Wrap as the Hugging Face class, with the template: what `save_pretrained` and everyone else uses."""
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers has no types here
            tokenizer_object=self._bpe,
            eos_token=END_OF_TURN,
            pad_token=PADDING,
            chat_template=chat_template(),
            clean_up_tokenization_spaces=False,
            model_max_length=1_000_000,
        )


def chat_template() -> str:
    """The jinja source: ChatML turns, tools and calls as JSON, consecutive tool results in one user turn."""
    return Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8").rstrip("\n")


def train_tokenizer(
    vocab_len: int, *, conversations: Iterable[str] | None = None, words: Sequence[str] = ()
) -> DemoTokenizer:
    """Train the tokenizer: deterministic, about half a second.

    Args:
      vocab_len: tokens in all.
      conversations: texts to learn from, as the template writes them; by default those of the demo's own task.
      words: texts that are one token each wherever they stand.

    Text is split at digits and line ends only, not at spaces: lines that every conversation repeats become one
    token each, so that a whole conversation of three turns takes about 80 tokens. Bytes are the fallback, hence
    any text is encoded without loss.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split("\n", "merged_with_previous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_len - len(MARK_TOKENS) - len(words),
        min_frequency=2,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in CONTROL_TOKENS],
    )
    texts = _demo_texts() if conversations is None else conversations
    bpe.train_from_iterator(_training_texts(texts), trainer)
    # Not through the trainer, which would make them special whatever their flag says, and decoders would skip them.
    bpe.add_tokens([AddedToken(text, special=False, normalized=False) for text in (*MARK_TOKENS, *words)])
    return DemoTokenizer(bpe)


def _demo_texts() -> Iterator[str]:
    """Conversations of the demo as the template writes them."""
    for question, turns in typical_conversations(_N_CONVERSATIONS):
        yield "".join(
            (first_prompt_text(question) if observation is None else tool_result_text(observation)) + response
            for observation, response in turns
        )


def _training_texts(conversations: Iterable[str]) -> Iterator[str]:
    """The conversations without control tokens, then plain English."""
    control = re.compile("|".join(re.escape(token) for token in (*CONTROL_TOKENS, *MARK_TOKENS)))
    for text in conversations:
        yield from filter(None, control.split(text))
    english = "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    yield english[:_N_ENGLISH_CHARS]


def first_prompt_text(question: str) -> str:
    """What the model sees of a new conversation: system, tools, question, and the start of its own turn.

    The same text that the template makes of it; spelled out here because rendering thousands of demonstrations
    with jinja takes longer than training on them. A test holds the two together.
    """
    return f"{_head_text()}<|im_start|>user\n{question}{END_OF_TURN}\n{_GENERATION_PROMPT}"


def tool_result_text(content: str) -> str:
    """What follows the model's end of turn when its call was answered with `content`."""
    return f"\n<|im_start|>user\n<tool_response>\n{content}\n</tool_response>{END_OF_TURN}\n{_GENERATION_PROMPT}"


@cache
def _head_text() -> str:
    tools = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in TOOLS)
    return (
        f"<|im_start|>system\n{SYSTEM_PROMPT}\n\n# Tools\n\n"
        "Call a function with a JSON object inside <tool_call></tool_call> tags:\n"
        f"<tools>\n{tools}\n</tools>{END_OF_TURN}\n"
    )
