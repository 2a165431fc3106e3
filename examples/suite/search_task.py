"""The search task's questions and demonstrations of both agents, for the rows and the warm start (make.py).

Pure; everything random comes from the generator that is passed in.
"""

import zlib

from search_agent import solver_opening

SYSTEM_PROMPT = "Open the note that helps. Say: open TITLE"
# fmt: off
ITEMS = (
    "anchor", "basket", "candle", "drum", "engine", "feather", "garden", "hammer", "island", "jacket", "kettle",
    "ladder", "mirror", "needle", "organ", "pillow", "quilt", "ribbon", "saddle", "table", "umbrella", "violin",
    "wagon", "zipper",
)
# fmt: on
N_NOTES = 4
FIRST_SHARE = 0.5
"""Rows whose first note is the right one."""
ONE_CODE_SHARE = 0.5
"""Notes that hold one code; the others hold an old one and a new one, which is the right one."""
FIRST_NOTE_SHARE = 0.63
"""How often the warm start's habit opens the first note unread."""
FIRST_CODE_SHARE = 0.63
"""How often it takes the first code of a note."""


def draw_row(rng, *, held_out):
    """A row from the held-out or the training part, decided by the question alone: one in eight is held out."""
    while True:
        row = _draw(rng)
        if (zlib.crc32(row["messages"][1]["content"].encode()) % 8 == 0) == held_out:
            return row


def _draw(rng):
    items = rng.sample(ITEMS, N_NOTES)
    right = 0 if rng.random() < FIRST_SHARE else rng.randrange(1, N_NOTES)
    notes, codes = zip(*(_draw_note(rng, item) for item in items), strict=True)
    question = f"What is the code of the {items[right]}? Notes: {', '.join(items)}."
    opening = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
    hidden = {"wanted": items[right], "titles": items, "notes": notes, "right_note": right, "answer": codes[right]}
    return {"messages": opening, "metadata": hidden}


def _draw_note(rng, item):
    """A note and the code that is right by it."""
    if rng.random() < ONE_CODE_SHARE:
        code = rng.randint(10, 99)
        return f"{item}: code {code}.", code
    old, new = rng.sample(range(10, 100), 2)
    return f"{item}: code {old}, then {new}.", new


def demonstrate(row, rng, *, is_careful):
    """Both conversations: (messages before the reply, the reply) for each turn of each."""
    hidden = row["metadata"]
    choice = 0 if not is_careful and rng.random() < FIRST_NOTE_SHARE else hidden["right_note"]
    note = hidden["notes"][choice]
    codes = [word.strip(".,") for word in note.split() if word[0].isdigit()]
    code = codes[0] if not is_careful and rng.random() < FIRST_CODE_SHARE else codes[-1]
    return [
        [(row["messages"], f"open {hidden['titles'][choice]}")],
        [(solver_opening(hidden["wanted"], note), f"Answer: {code}")],
    ]
