"""`relax-trio template CHECKPOINT_OR_FILE`: what a chat template does with a conversation, for a person."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

from relax_trio.cli.common import DEMO, find_checkpoint
from relax_trio.config.option import option
from relax_trio.config.parse import parse_command
from relax_trio.errors import ConfigError, boundary

if TYPE_CHECKING:
    from relax_trio.tokens.codec import ChatCodec

_USAGE = "relax-trio template CHECKPOINT_OR_FILE [--tokenizer CHECKPOINT]"


@frozen(kw_only=True)
class Own:
    """Flags of this command."""

    tokenizer: Path | None = option(
        None, "Checkpoint whose tokenizer is used with a template file.", metavar="CHECKPOINT"
    )


def run(argv: Sequence[str]) -> int:
    """Print the probe's finding.

    Raises:
      ConfigError: nothing is named, it can't be read, or its template can't be trained with.
    """
    if not argv or argv[0].startswith("-"):
        raise ConfigError(f"name a checkpoint directory, a .jinja file or {DEMO}: {_USAGE}")
    name, *rest = argv
    _, own = parse_command(rest, Own)
    codec = _load(name, own.tokenizer)
    from relax_trio.tokens.hf import BARE_BOS, BARE_EOS
    from relax_trio.tokens.probe import probe_template
    from relax_trio.tokens.probe_text import report_lines

    lines = [f"Chat template of {name}", "", *report_lines(probe_template(codec.observations)), ""]
    if own.tokenizer is None and Path(name).is_file() and name != DEMO:
        stand_ins = f"with stand-ins for bos and eos, {BARE_BOS} and {BARE_EOS}"
        lines.insert(1, f"{stand_ins}; --tokenizer CHECKPOINT takes those of a checkpoint")
    sys.stdout.write("\n".join(lines))
    return 0


def _load(name: str, tokenizer: Path | None) -> ChatCodec:
    from relax_trio.tokens.codec import ChatCodec
    from relax_trio.tokens.hf import bare_tokenizer, generation_eos, load_tokenizer

    path = Path(name)
    if name == DEMO or not path.is_file():
        if tokenizer is not None:
            raise ConfigError(f"--tokenizer belongs to a template file; {name} brings its own tokenizer")
        if name != DEMO and not path.exists():
            raise ConfigError(f"{name} is neither a checkpoint directory nor a template file; {_USAGE}")
        return ChatCodec.load(find_checkpoint(name), reasoning_parser=None, tool_call_parser=None)
    with boundary(ConfigError, f"{name} cannot be read", OSError, ValueError):
        source = path.read_text(encoding="utf-8")
    if tokenizer is None:
        return ChatCodec.from_tokenizer(bare_tokenizer(source), name=name)
    checkpoint = find_checkpoint(str(tokenizer))
    loaded = load_tokenizer(checkpoint)
    loaded.chat_template = source
    return ChatCodec.from_tokenizer(loaded, name=name, eos_ids=generation_eos(checkpoint))
