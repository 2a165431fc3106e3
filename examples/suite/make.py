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
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import game_task
import search_task
from attrs import asdict, evolve

from relax_trio.demo.checkpoint import ensure_checkpoint, ensure_demo_checkpoint
from relax_trio.demo.recipe import WarmStartRecipe
from relax_trio.demo.task import write_dataset
from relax_trio.demo.tokenizer import END_OF_TURN, chat_template, train_tokenizer
from relax_trio.demo.warm_start import conversation_rows, fit

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

    from relax_trio.demo.tokenizer import DemoTokenizer

HERE = Path(__file__).resolve().parent
TASKS: dict[str, ModuleType] = {"search": search_task, "game": game_task}
"""Those that have a model of their own; arithmetic is the demo's task and starts from its model."""
N_TRAIN_ROWS, N_HELD_OUT_ROWS = 400, 64
TRAIN_SEED, HELD_OUT_SEED = 1, 2
RECIPE = evolve(WarmStartRecipe(), vocab_len=768, n_careful_steps=120, n_steps=280)
N_TOKENIZER_ROWS = 1000

Turns = Sequence[tuple[list[dict[str, str]], str]]


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


def conversation(turns: Turns) -> list[tuple[str, str]]:
    """A demonstrated conversation as texts: what stands before each response, and the response."""
    return [(dialogue_text(seen, goes_on=index > 0), reply) for index, (seen, reply) in enumerate(turns)]


def demonstrations(task: ModuleType, rng: random.Random, count: int, *, is_careful: bool) -> list[list[tuple[str, str]]]:
    """`count` conversations on training rows; those of one row follow each other."""
    found: list[list[tuple[str, str]]] = []
    while len(found) < count:
        row = task.draw_row(rng, held_out=False)
        found += [conversation(turns) for turns in task.demonstrate(row, rng, is_careful=is_careful)]
    return found[:count]


def ensure_model(name: str, models: Path) -> Path:
    """The directory of a task's model under `models`, made where it is missing; the demo's own for arithmetic.

    Blocks for some twenty seconds of two cores when it makes one.
    """

    def progress(step: int, n_steps: int, loss: float) -> None:
        if step % 40 == 0:
            print(f"{name}: warm start {step}/{n_steps}, loss {loss:.3f}", file=sys.stderr, flush=True)

    if name not in TASKS:
        return ensure_demo_checkpoint(progress=progress)

    def build() -> tuple[Qwen3ForCausalLM, DemoTokenizer]:
        task, rng = TASKS[name], random.Random(RECIPE.seed)
        texts = ["".join(p + r for p, r in turns) for turns in demonstrations(task, rng, N_TOKENIZER_ROWS, is_careful=True)]
        tokenizer = train_tokenizer(RECIPE.vocab_len, conversations=texts, words=getattr(task, "ITEMS", ()))
        n_careful = RECIPE.n_careful_steps * RECIPE.batch_len
        n_mixed = RECIPE.n_steps * RECIPE.batch_len - n_careful
        shown = demonstrations(task, rng, n_careful, is_careful=True) + demonstrations(task, rng, n_mixed, is_careful=False)
        return fit(tokenizer, conversation_rows(tokenizer, shown), RECIPE, progress), tokenizer

    return ensure_checkpoint(models / name / fingerprint(name), build)


def fingerprint(name: str) -> str:
    """16 hex digits over what a task's model depends on: recipe, template and the sources that make it."""
    sources = [HERE / f"{name}_task.py", HERE / f"{name}_agent.py", Path(__file__)]
    parts = [json.dumps(asdict(RECIPE), sort_keys=True), chat_template(), *(path.read_text() for path in sources)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


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
