"""Two agents in one program: a searcher picks which note to open, a solver answers from the note that it is given.

Each has a conversation of its own and both are exported, so that each gets its own credit (search_credit.py). The
Session's reward is that of the answer.
"""

import re
import sys

from model_api import ModelError, http_completion, read_task, write_output

SOLVER_PROMPT = "Answer from the note: its newest code. Say: Answer: N"
MAX_COMPLETION_TOKENS = 12  # an answer takes about five


def opened(reply, titles):
    """The index of the note that the searcher's reply opens, None where it opens none."""
    found = re.fullmatch(r"open (\w+)", (reply.get("content") or "").strip())
    return titles.index(found[1]) if found and found[1] in titles else None


def answered(reply):
    """The code that the solver's reply gives, None where it gives none."""
    found = re.fullmatch(r"Answer: (\d{1,9})", (reply.get("content") or "").strip())
    return int(found[1]) if found else None


def solver_opening(wanted, note):
    """The messages that the solver begins with."""
    question = f"What is the code of the {wanted}? Note: {note}"
    return [{"role": "system", "content": SOLVER_PROMPT}, {"role": "user", "content": question}]


def run(task, complete):
    """Search, then solve; returns the records to export. Where no note is opened, the searcher is alone."""
    hidden = task["metadata"]
    searcher = list(task["messages"])
    searcher.append(complete(searcher))
    choice = opened(searcher[-1], hidden["titles"])
    has_found = choice is not None and choice == hidden["right_note"]
    search = {"name": "searcher", "messages": searcher, "metadata": {"found": int(has_found)}}
    if choice is None:
        return [{**search, "reward": 0.0}]
    solver = solver_opening(hidden["wanted"], hidden["notes"][choice])
    solver.append(complete(solver))
    is_right = answered(solver[-1]) == hidden["answer"]
    solve = {"had_note": int(has_found), "right": int(is_right)}
    return [search, {"name": "solver", "messages": solver, "metadata": solve, "reward": float(is_right)}]


if __name__ == "__main__":
    try:
        write_output(*run(read_task(), http_completion(MAX_COMPLETION_TOKENS)))
    except ModelError as error:
        sys.exit(f"The model API refused a request: {error}")
