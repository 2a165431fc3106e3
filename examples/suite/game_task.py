"""The game's boards and demonstrations of it, for the rows and the warm start (make.py).

Pure; everything random comes from the generator that is passed in.
"""

import zlib

from game_agent import Board

SYSTEM_PROMPT = "Walk to the goal. Say left, right, up or down."
LARGEST = 8
STRAIGHT_SHARE = 0.35
"""Rows whose goal is in the same line, so that walking sideways is all they need."""
SIDEWAYS_SHARE = 0.65
"""How often the warm start's habit goes on sideways where up or down is right."""


def draw_row(rng, *, held_out):
    """A row from the held-out or the training part, decided by the board alone: one in eight is held out."""
    while True:
        start, goal = _draw(rng)
        text = str(Board(start, goal))
        if (zlib.crc32(text.encode()) % 8 == 0) == held_out:
            opening = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": text}]
            return {"messages": opening, "metadata": {"start": start, "goal": goal}}


def _draw(rng):
    is_straight = rng.random() < STRAIGHT_SHARE
    while True:
        dx, dy = (rng.randint(-3, 3), 0) if is_straight else (rng.randint(-2, 2), rng.choice((-2, -1, 1, 2)))
        x, y = rng.randint(1, LARGEST), rng.randint(1, LARGEST)
        if (dx or dy) and 1 <= x + dx <= LARGEST and 1 <= y + dy <= LARGEST:
            return [x, y], [x + dx, y + dy]


def demonstrate(row, rng, *, is_careful):
    """One game as a list of conversations, here one: (messages before the move, the move) for each turn.

    Sideways first. With `is_careful` False, `SIDEWAYS_SHARE` of the moves up or down are a move sideways instead.
    """
    board = Board(row["metadata"]["start"], row["metadata"]["goal"])
    seen, turns = row["messages"], []
    while board.distance and not board.is_lost:
        dx, dy = board.goal[0] - board.at[0], board.goal[1] - board.at[1]
        if dx:
            word = "right" if dx > 0 else "left"
        elif not is_careful and rng.random() < SIDEWAYS_SHARE:
            word = "right"
        else:
            word = "up" if dy > 0 else "down"
        turns.append((seen, word))
        board.move(word)
        seen = [{"role": "user", "content": str(board)}]
    return [turns]
