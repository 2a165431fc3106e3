"""Makes what the suite starts from: the rows of its tasks, which are committed, and a warm-started model of each.

    python examples/suite/make.py                       the models, where they are missing
    python examples/suite/make.py --rows                the rows anew; they are the same every time

The models have the demo's shape and are made as the demo's is: a supervised phase first shows careful behaviour, then a
mixture in which a careless habit is likelier, so that the skill is there and the preference is left to learn.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import game_task
import search_task
from attrs import asdict, evolve

from relax_trio.demo.checkpoint import default_cache_dir, ensure_checkpoint, ensure_demo_checkpoint, fingerprint
from relax_trio.demo.recipe import DemoRecipe, WarmStartRecipe
from relax_trio.demo.task import write_dataset
from relax_trio.demo.tokenizer import END_OF_TURN, chat_template, train_tokenizer
from relax_trio.demo.warm_start import conversation_rows, fit

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

    from relax_trio.demo.tokenizer import DemoTokenizer

HERE = Path(__file__).resolve().parent
TASKS: dict[str, ModuleType] = {"search": search_task, "game": game_task}
"""Those that have a model of their own; arithmetic is the demo's task and starts from its model."""
N_TRAIN_ROWS, N_HELD_OUT_ROWS = 256, 64
TRAIN_SEED, HELD_OUT_SEED = 1, 2
RECIPE = evolve(WarmStartRecipe(), vocab_len=768, n_careful_steps=120, n_steps=280)
N_TOKENIZER_TEXTS = 1000

Turns = Sequence[tuple[list[dict[str, str]], str]]
"""A demonstrated conversation: for each turn the messages before it and the response."""
Texts = list[tuple[str, str]]
"""The same as the template writes it."""


def write_rows(directory: Path) -> None:
    """Write the train and held-out rows of all three tasks."""
    for part, n_rows, seed in (("train", N_TRAIN_ROWS, TRAIN_SEED), ("held_out", N_HELD_OUT_ROWS, HELD_OUT_SEED)):
        held_out = part == "held_out"
        write_dataset(directory / f"arithmetic_{part}.jsonl", n_rows=n_rows, seed=seed, held_out=held_out)
        for name, task in TASKS.items():
            rng = random.Random(seed)
            distinct: dict[str, dict[str, object]] = {}
            while len(distinct) < n_rows:
                row = task.draw_row(rng, held_out=held_out)
                distinct.setdefault(json.dumps(row["messages"]), row)
            text = "".join(json.dumps(row) + "\n" for row in distinct.values())
            (directory / f"{name}_{part}.jsonl").write_text(text, encoding="utf-8")


def dialogue_text(messages: Iterable[dict[str, str]], *, goes_on: bool) -> str:
    """Messages as the demo's chat template writes them, up to where the model's turn begins.

    Args:
      goes_on: whether a turn of the model stands before them, whose line is still to be ended.
    """
    turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}{END_OF_TURN}\n" for m in messages)
    return "\n" * goes_on + turns + "<|im_start|>assistant\n"


def conversation(turns: Turns) -> Texts:
    """A demonstrated conversation as the template writes it, without the end of a response."""
    return [(dialogue_text(seen, goes_on=index > 0), reply) for index, (seen, reply) in enumerate(turns)]


def demonstrations(task: ModuleType, rng: random.Random, count: int, *, is_careful: bool) -> list[Texts]:
    """`count` conversations on training rows; those of one row follow each other."""
    found: list[Texts] = []
    while len(found) < count:
        row = task.draw_row(rng, held_out=False)
        found += [conversation(turns) for turns in task.demonstrate(row, rng, is_careful=is_careful)]
    return found[:count]


@cache
def lessons(name: str, recipe: WarmStartRecipe) -> list[Texts]:
    """All that a task's model is shown, in order: careful conversations first, then the mixture."""
    task, rng = TASKS[name], random.Random(recipe.seed)
    n_careful = recipe.n_careful_steps * recipe.batch_len
    n_mixed = recipe.n_steps * recipe.batch_len - n_careful
    careful = demonstrations(task, rng, n_careful, is_careful=True)
    return careful + demonstrations(task, rng, n_mixed, is_careful=False)


def model_path(name: str, models: Path, recipe: WarmStartRecipe = RECIPE) -> Path:
    """Where a task's model is kept: its name has 16 hex digits over all that its weights depend on."""
    if name not in TASKS:
        return default_cache_dir() / f"demo-{fingerprint(DemoRecipe())}"
    parts = json.dumps([asdict(recipe), chat_template(), _words(name), lessons(name, recipe)], sort_keys=True)
    return models / f"{name}-{hashlib.sha256(parts.encode()).hexdigest()[:16]}"


def ensure_model(name: str, models: Path, recipe: WarmStartRecipe = RECIPE) -> Path:
    """The directory of a task's model under `models`, made where it is missing; the demo's own for arithmetic.

    Blocks for some twenty seconds of two cores when it makes one.
    """

    def progress(step: int, n_steps: int, loss: float) -> None:
        if step % 40 == 0:
            print(f"{name}: warm start {step}/{n_steps}, loss {loss:.3f}", file=sys.stderr, flush=True)

    if name not in TASKS:
        return ensure_demo_checkpoint(progress=progress)

    def build() -> tuple[Qwen3ForCausalLM, DemoTokenizer]:
        shown = lessons(name, recipe)
        texts = ["".join(prompt + response for prompt, response in turns) for turns in shown[:N_TOKENIZER_TEXTS]]
        tokenizer = train_tokenizer(recipe.vocab_len, conversations=texts, words=_words(name))
        return fit(tokenizer, conversation_rows(tokenizer, shown), recipe, progress), tokenizer

    return ensure_checkpoint(model_path(name, models, recipe), build)


def _words(name: str) -> Sequence[str]:
    """What is one token each in a task's model."""
    return getattr(TASKS[name], "ITEMS", ())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", action="store_true", help="write the rows, make no model")
    parser.add_argument("--models", type=Path, default=Path("runs/suite/models"), help="where models are kept")
    options = parser.parse_args(arguments)
    if options.rows:
        write_rows(HERE)
        return 0
    for name in ("arithmetic", *TASKS):
        print(f"{name}: {ensure_model(name, options.models)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
