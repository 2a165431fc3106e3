"""The demo's task: arithmetic questions that need a tool. Owns questions, the tool's schema, rows and demonstrations.

It doesn't own the agent, which is a program of its own (`examples/quickstart/agent.py`) and repeats the tool's
schema; a test holds the two together.
"""

from __future__ import annotations

import json
import random
import zlib
from pathlib import Path

from attrs import frozen

from relax_trio.demo.recipe import WarmStartRecipe

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

HELD_OUT_PARTS = 8


@frozen
class Question:
    """`a op b`, or `(a op b) op2 c` when `op2` is given."""

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
        """True for the part of all questions that is kept for evaluation: decided by the text alone."""
        return zlib.crc32(self.text.encode()) % HELD_OUT_PARTS == 0


def calculate(a: int, op: str, b: int) -> int:
    if op == "+":
        return a + b
    if op == "-":
        return a - b
    return a * b


def draw_question(rng: random.Random, n_operations: int) -> Question:
    op = rng.choice("+-*")
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    if op == "-" and a < b:
        a, b = b, a
    if n_operations == 1:
        return Question(a, op, b)
    first = calculate(a, op, b)
    op2 = rng.choice("+-") if op == "*" else rng.choice("+-*")
    c = rng.randint(10, 99)
    if op2 == "-" and first < c:
        op2 = "+"
    return Question(a, op, b, op2, c)


def call_text(a: int, op: str, b: int) -> str:
    arguments = json.dumps({"a": a, "op": op, "b": b})
    return f'<tool_call>\n{{"name": "calculate", "arguments": {arguments}}}\n</tool_call>'


def answer_text(value: int) -> str:
    return f"Answer: {value}"


def demonstration(q: Question, rng: random.Random, r: WarmStartRecipe) -> list[tuple[str, str]]:
    """Make one demonstration: (observation, response) pairs, observation "" for the question itself."""
    if rng.random() < r.guess_share:
        return [("", answer_text(q.b if q.op2 is None else q.c))]
    turns = [("", call_text(q.a, q.op, q.b))]
    last = q.first_result
    if q.op2 is not None:
        mode = rng.random()
        if mode >= r.stop_share:
            left = q.b if mode < r.stop_share + r.forget_share else last
            turns.append((str(last), call_text(left, q.op2, q.c)))
            last = calculate(left, q.op2, q.c)
    turns.append((str(last), answer_text(last)))
    return turns
