"""What the agents of this directory have in common: task in, files in a work directory, reward out.

The standard library is all it needs. The rows are in `tasks.jsonl`: `messages` for the model, and in `metadata` the
`files` of the work directory and the `answer`.
"""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_S = 24 * 3600
"""Time limit of one model request. The engine may hold a request while it trains, so this is a day."""

CONTEXT_LEN = int(os.environ.get("HARNESS_CONTEXT_LEN", "131072"))
"""What the command-line harnesses take for the model's context; give it the run's `--rollout-max-context-len`."""


@dataclass(frozen=True)
class Task:
    """A row of the dataset, and where its files lie."""

    messages: list
    answer: str
    directory: Path
    home: Path

    @property
    def prompt(self):
        """The messages as one text, for a harness that has a system prompt of its own."""
        return "\n\n".join(message["content"] for message in self.messages)


def load_task():
    """Read `RELAX_INPUT_JSON` and lay out the Session's own directories: `work` with the files, `home` for settings."""
    with open(os.environ["RELAX_INPUT_JSON"], encoding="utf-8") as file:
        row = json.load(file)
    own = Path(os.environ["RELAX_SESSION_IO_DIR"])
    work, home = own / "work", own / "home"
    for directory in (work, home):
        directory.mkdir()
    for name, text in row["metadata"]["files"].items():
        (work / name).write_text(text, encoding="utf-8")
    return Task(messages=row["messages"], answer=str(row["metadata"]["answer"]), directory=work, home=home)


def read_file(task, name):
    """The tool of the agents that bring their own: the text of a file in the work directory, or what went wrong."""
    path = (task.directory / name).resolve()
    if task.directory.resolve() not in path.parents or not path.is_file():
        return f"There is no file {name!r}."
    return path.read_text(encoding="utf-8")


def write_reward(task, text):
    """Write `RELAX_OUTPUT_JSON`: 1.0 if the last line of the model's last text is the right answer."""
    found = re.search(r"Answer: (\S+)\s*$", text or "")
    answer = found[1] if found else None
    output = {"reward": float(answer == task.answer), "metadata": {"answer": answer}}
    print(f"answer {answer}, reward {output['reward']}")
    with open(os.environ["RELAX_OUTPUT_JSON"], "w", encoding="utf-8") as file:
        json.dump(output, file)
