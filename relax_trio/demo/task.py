"""The demo's task: arithmetic questions that need a tool. Owns questions, the tool's schema, rows and demonstrations.

It doesn't own the agent, which is a program of its own (`examples/quickstart/agent.py`) and repeats the tool's
schema; a test holds the two together.
"""

from __future__ import annotations

import json
import math
import random
import zlib
from collections.abc import Iterator
from pathlib import Path

from attrs import evolve, frozen

from relax_trio.demo.recipe import DemoRecipe, WarmStartRecipe
from relax_trio.errors import ConfigError

SYSTEM_PROMPT = "Work out the result with the tool, one operation per call. End with: Answer: N"

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Apply one operation to two integers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer"},
                    "op": {"type": "string", "enum": ["+", "-", "*"]},
                    "b": {"type": "integer"},
                },
                "required": ["a", "op", "b"],
            },
        },
    }
]

MAX_ROWS = 4000
"""Rows one data set may have: far fewer than there are distinct questions, so that drawing without repetition ends."""

_HELD_OUT_ONE_IN = 8
_SMALLEST, _LARGEST = 10, 99
_RESULT_BOUND = 10_000

Demonstration = list[tuple[str | None, str]]
"""(observation, response) for each turn; observation None is the question itself, else a tool result."""


@frozen
class Question:
    """`a op b`, or `(a op b) op2 c` if `op2` is given. No intermediate result is negative."""

    a: int
    op: str
    b: int
    op2: str | None = None
    c: int = 0

    @property
    def n_operations(self) -> int:
        return 1 if self.op2 is None else 2

    @property
    def text(self) -> str:
        if self.op2 is None:
            return f"What is {self.a} {self.op} {self.b}?"
        return f"What is ({self.a} {self.op} {self.b}) {self.op2} {self.c}?"

    @property
    def first_result(self) -> int:
        return calculate(self.a, self.op, self.b)

    @property
    def answer(self) -> int:
        return self.first_result if self.op2 is None else calculate(self.first_result, self.op2, self.c)

    @property
    def held_out(self) -> bool:
        """Whether this question is kept for evaluation: decided by its text alone, one in eight."""
        return zlib.crc32(self.text.encode()) % _HELD_OUT_ONE_IN == 0


def calculate(a: int, op: str, b: int) -> int:
    """The tool: "+", "-" or "*" on two integers."""
    return {"+": a + b, "-": a - b, "*": a * b}[op]


def draw_question(rng: random.Random, *, n_operations: int, held_out: bool) -> Question:
    """Draw a question of 1 or 2 operations from the held-out or the training part."""
    while True:
        question = _draw(rng, n_operations)
        if question.held_out == held_out:
            return question


def _draw(rng: random.Random, n_operations: int) -> Question:
    if n_operations == 1:
        op, a, b = rng.choice("+-*"), _draw_number(rng), _draw_number(rng)
        return Question(a, op, b) if op != "-" else Question(max(a, b), op, min(a, b))
    # The first result is copied into the second call. A product would make it up to four digits long, and so small a
    # model needs several times the warm start to copy those.
    op, a, b, c = rng.choice("+-"), _draw_number(rng), _draw_number(rng), _draw_number(rng)
    if op == "-":
        a, b = max(a, b), min(a, b)
    first = calculate(a, op, b)
    allowed = "+" + "-" * (first >= c) + "*" * (first * c < _RESULT_BOUND)
    return Question(a, op, b, rng.choice(allowed), c)


def _draw_number(rng: random.Random) -> int:
    return rng.randint(_SMALLEST, _LARGEST)


def write_dataset(path: Path, *, n_rows: int, seed: int, held_out: bool) -> None:
    """Write distinct questions as JSON Lines rows {"messages", "label", "metadata": {"answer", "n_operations"}}.

    Training and held-out files never share a question, whatever their seeds. One-operation questions are
    spread evenly, so that any few rows in sequence are equally hard and step rewards can be compared.
    ConfigError if `n_rows` is over `MAX_ROWS`.
    """
    if not 0 < n_rows <= MAX_ROWS:
        raise ConfigError(f"The demo's data set {path} can have 1 to {MAX_ROWS} rows, not {n_rows}.")
    rng = random.Random(seed)
    share = DemoRecipe().one_operation_share
    questions: dict[str, Question] = {}
    while len(questions) < n_rows:
        done = len(questions)
        is_single = math.floor((done + 1) * share) > math.floor(done * share)
        question = draw_question(rng, n_operations=1 if is_single else 2, held_out=held_out)
        questions[question.text] = question
    with path.open("w", encoding="utf-8") as file:
        for question in questions.values():
            file.write(json.dumps(_row(question)) + "\n")


def _row(question: Question) -> dict[str, object]:
    answer = str(question.answer)
    return {
        "messages": [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": question.text},
        ],
        "label": answer,
        "metadata": {"answer": answer, "n_operations": question.n_operations},
    }


def call_text(a: int, op: str, b: int) -> str:
    """A tool call as the model writes it."""
    arguments = json.dumps({"a": a, "op": op, "b": b})
    return f'<tool_call>\n{{"name": "calculate", "arguments": {arguments}}}\n</tool_call>'


def answer_text(value: int) -> str:
    """The last turn as the model writes it."""
    return f"Answer: {value}"


def demonstration(question: Question, rng: random.Random, numbers: WarmStartRecipe) -> Demonstration:
    """Show one way to treat `question`: careful or careless, in the shares of `numbers`.

    Every behaviour copies numbers that are in the context, the careless ones too: so all of them teach the skill
    that the careful one needs, and only the preference is left for reinforcement.
    """
    last_number = question.b if question.op2 is None else question.c
    if rng.random() < numbers.guess_share:
        return [(None, answer_text(last_number))]
    turns: Demonstration = [(None, call_text(question.a, question.op, question.b))]
    result = question.first_result
    if question.op2 is not None and rng.random() >= numbers.stop_share:
        turns.append((str(result), call_text(result, question.op2, question.c)))
        result = calculate(result, question.op2, question.c)
    turns.append((str(result), answer_text(result)))
    return turns


def typical_conversations(count: int) -> Iterator[tuple[str, Demonstration]]:
    """Careful conversations for the tokenizer to learn its pieces from: (question, turns)."""
    rng = random.Random(0)
    careful = evolve(WarmStartRecipe(), guess_share=0.1, stop_share=0.0)
    for index in range(count):
        question = draw_question(rng, n_operations=1 + index % 2, held_out=False)
        yield question.text, demonstration(question, rng, careful)
