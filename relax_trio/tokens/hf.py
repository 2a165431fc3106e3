"""What the codec needs of a Hugging Face tokenizer: stateless encode and decode, control tokens, stop tokens.

Also where tokenizers come from: a checkpoint directory, or a template without a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from relax_trio.data.json import JsonValue, parse_json
from relax_trio.errors import ConfigError, boundary
from relax_trio.tokens.control import control_tokens_in

BARE_BOS = "<s>"
BARE_EOS = "<|im_end|>"


@frozen(kw_only=True, eq=False)
class TokenizerParts:
    """A tokenizer, taken apart.

    Attributes:
      encode, decode: text ↔ ids, special tokens kept; safe to call from threads.
      control_ids: id of every control token by its text.
      stops: texts of the tokens that are declared to end generation.
      vocab_len: ids the tokenizer knows, added tokens included.
    """

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    control_ids: Mapping[str, int]
    stops: tuple[str, ...]
    vocab_len: int


def load_tokenizer(checkpoint: Path) -> Any:
    """The tokenizer of a checkpoint directory.

    Raises:
      ConfigError: no directory, or no readable tokenizer in it.
    """
    if not checkpoint.is_dir():
        raise ConfigError(f"checkpoint {checkpoint} is not a directory")
    from transformers import AutoTokenizer  # heavy, and most rooms never need it

    with boundary(ConfigError, f"the tokenizer of {checkpoint} cannot be read", OSError, ValueError, KeyError):
        return AutoTokenizer.from_pretrained(str(checkpoint), local_files_only=True)


def bare_tokenizer(template: str) -> Any:
    """A tokenizer for looking at a template without its checkpoint: ChatML's end of turn is its eos, and whatever looks
    like a control token in the template is one. Its vocabulary holds nothing else."""
    from tokenizers import AddedToken, Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    controls = sorted({BARE_BOS, BARE_EOS} | control_tokens_in(template))
    vocabulary = {text: index for index, text in enumerate(controls)}
    backend = Tokenizer(models.WordLevel({**vocabulary, "[UNKNOWN]": len(controls)}, unk_token="[UNKNOWN]"))
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in controls])
    tokenizer: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers has no types here
        tokenizer_object=backend, bos_token=BARE_BOS, eos_token=BARE_EOS
    )
    tokenizer.chat_template = template
    return tokenizer


def tokenizer_parts(tokenizer: Any, *, eos_ids: Iterable[int], name: str) -> TokenizerParts:
    """Take `tokenizer` apart; `eos_ids` are declared to end generation besides its own.

    Raises:
      ConfigError: an id of `eos_ids` is not in its vocabulary.
    """
    declared = [*eos_ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])]
    control_ids = {str(token): index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    stops: list[str] = []
    for token_id in dict.fromkeys(declared):
        text = tokenizer.convert_ids_to_tokens(token_id)
        if not isinstance(text, str):
            raise ConfigError(f"{name}: stop token id {token_id} is not in the vocabulary")
        control_ids[text] = token_id
        stops.append(text)
    encode, decode = _text_functions(tokenizer)
    return TokenizerParts(
        encode=encode, decode=decode, control_ids=control_ids, stops=tuple(stops), vocab_len=len(tokenizer)
    )


def generation_eos(checkpoint: Path) -> list[int]:
    """Ids that a checkpoint's generation config declares to end generation.

    Raises:
      ConfigError: the file can't be read.
    """
    path = checkpoint / "generation_config.json"
    if not path.is_file():
        return []
    with boundary(ConfigError, f"{path} cannot be read", OSError, ValueError):
        config = parse_json(path.read_bytes())
    eos: JsonValue = config.get("eos_token_id") if isinstance(config, dict) else None
    listed = eos if isinstance(eos, list) else [eos]
    return [token_id for token_id in listed if isinstance(token_id, int)]


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
