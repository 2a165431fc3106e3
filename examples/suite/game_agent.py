"""A game of several turns: walk over a board to the goal, without a step too many.

After each move the board answers with the new position. The game is over when the goal is reached, which is worth 1,
or when the moves that are left no longer suffice, which is worth 0. The board knows nothing of who plays.
"""

import sys

from model_api import ModelError, http_completion, read_task, write_output

MAX_COMPLETION_TOKENS = 8  # a move is one word
MOVES = {"left": (-1, 0), "right": (1, 0), "down": (0, -1), "up": (0, 1)}


class Board:
    """Where the player is and how many moves are left: as many as the shortest way takes."""

    def __init__(self, start, goal):
        self.at, self.goal = tuple(start), tuple(goal)
        self.n_left = self.distance

    @property
    def distance(self):
        return abs(self.goal[0] - self.at[0]) + abs(self.goal[1] - self.at[1])

    @property
    def is_lost(self):
        return self.distance > self.n_left

    def move(self, word):
        """Make a move. ValueError if `word` is none. The board has no edge."""
        if word not in MOVES:
            raise ValueError(f"no move: {word!r}")
        dx, dy = MOVES[word]
        self.at = (self.at[0] + dx, self.at[1] + dy)
        self.n_left -= 1

    def __str__(self):
        return f"You: {self.at[0]} {self.at[1]}. Goal: {self.goal[0]} {self.goal[1]}."


def play(board, messages, complete):
    """Play until the game is over; returns how it ended. `messages` grows with it."""
    while board.distance:
        reply = complete(messages)
        messages.append(reply)
        try:
            board.move((reply.get("content") or "").strip())
        except ValueError:
            return "no move"
        if board.is_lost:
            return "lost"
        if board.distance:
            messages.append({"role": "user", "content": str(board)})
    return "won"


def main():
    task = read_task()
    messages = list(task["messages"])
    board = Board(task["metadata"]["start"], task["metadata"]["goal"])
    ending = play(board, messages, http_completion(MAX_COMPLETION_TOKENS))
    print(f"{ending} after {sum(message['role'] == 'assistant' for message in messages)} moves")
    write_output({"reward": float(ending == "won"), "metadata": {"ending": ending}})


if __name__ == "__main__":
    try:
        main()
    except ModelError as error:
        sys.exit(f"The model API refused a request: {error}")
