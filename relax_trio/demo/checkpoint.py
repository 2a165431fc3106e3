"""The demo checkpoint on disk: built once, then found in the cache. Owns the cache's place, name and atomicity."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import asdict
from safetensors.torch import save_file

from relax_trio.demo.recipe import DemoRecipe
from relax_trio.demo.task import SYSTEM_PROMPT, TOOLS
from relax_trio.demo.tokenizer import DemoTokenizer, chat_template, train_tokenizer
from relax_trio.demo.warm_start import Progress, warm_start
from relax_trio.errors import ConfigError, boundary

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

_REQUIRED_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "chat_template.jinja",
)


def fingerprint(recipe: DemoRecipe) -> str:
    """Name of the checkpoint that `recipe` makes: 16 hex digits over all that its weights depend on."""
    source = {
        "version": recipe.version,
        "one_operation_share": recipe.one_operation_share,
        "warm_start": asdict(recipe.warm_start),
        "system_prompt": SYSTEM_PROMPT,
        "tools": TOOLS,
        "chat_template": chat_template(),
    }
    return hashlib.sha256(json.dumps(source, sort_keys=True).encode()).hexdigest()[:16]


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/relax_trio`, or `~/.cache/relax_trio` where that is unset or relative."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        base = Path.home() / ".cache"
    return base / "relax_trio"


def ensure_demo_checkpoint(
    *, cache_dir: Path | None = None, recipe: DemoRecipe | None = None, progress: Progress | None = None
) -> Path:
    """Return the directory of the demo checkpoint, building it on first use.

    Blocks for some twenty seconds of two cores when it builds; call it in a worker thread. `progress` is called
    after each training step, not at all for a cached checkpoint; an exception it raises ends the build, and
    nothing is left on disk. Builders that run at once don't disturb each other: the first to finish wins.
    ConfigError if the cache can't be written or holds a damaged checkpoint.
    """
    recipe = recipe or DemoRecipe()

    def build() -> tuple[Qwen3ForCausalLM, DemoTokenizer]:
        tokenizer = train_tokenizer(recipe.warm_start.vocab_len)
        return warm_start(tokenizer, recipe, progress), tokenizer

    return ensure_checkpoint((cache_dir or default_cache_dir()) / f"demo-{fingerprint(recipe)}", build)


def ensure_checkpoint(final: Path, build: Callable[[], tuple[Qwen3ForCausalLM, DemoTokenizer]]) -> Path:
    """Return `final`, after building it where it is missing: whole or not at all, whoever builds at the same time.

    ConfigError if it can't be written or is a damaged checkpoint. What `build` raises passes through.
    """
    with boundary(ConfigError, f"Cannot keep the demo checkpoint {final}", OSError):
        if final.exists():
            _check_complete(final)
            return final
        final.parent.mkdir(parents=True, exist_ok=True)  # before the training, whose result would be lost otherwise
        model, tokenizer = build()
        building = Path(tempfile.mkdtemp(prefix=".building-", dir=final.parent))
        try:
            save_checkpoint(model, tokenizer, building)
            _publish(building, final)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return final


def save_checkpoint(model: Qwen3ForCausalLM, tokenizer: DemoTokenizer, directory: Path) -> None:
    """Write a plain Hugging Face directory. Not by the model's `save_pretrained`, which draws a progress bar."""
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}  # tied
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = [type(model).__name__]
    model.config.dtype = next(iter(weights.values())).dtype
    model.config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    tokenizer.to_transformers().save_pretrained(directory)


def _publish(building: Path, final: Path) -> None:
    try:
        building.rename(final)
    except OSError:
        if not final.is_dir():
            raise
        _check_complete(final)


def _check_complete(final: Path) -> None:
    missing = [name for name in _REQUIRED_FILES if not (final / name).is_file()]
    if missing:
        raise ConfigError(
            f"The cached demo checkpoint {final} lacks {', '.join(missing)}; remove the directory to build it anew."
        )
