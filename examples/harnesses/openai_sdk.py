"""An agent on the official OpenAI SDK (Chat Completions). Needs `pip install openai`."""

import json
import os

from harness_task import TIMEOUT_S, load_task, read_file, write_reward
from openai import OpenAI

MAX_TURNS = 8
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Return the text of a file.",
            "parameters": {
                "type": "object",
                "properties": {"name": {"type": "string"}},
                "required": ["name"],
            },
        },
    }
]


def call_tool(task, call):
    """Run one call; the model reads what was wrong with it."""
    try:
        return read_file(task, json.loads(call.function.arguments)["name"])
    except (ValueError, KeyError, TypeError):
        return "read_file takes an object with a name."


def main():
    task = load_task()
    client = OpenAI(base_url=os.environ["RELAX_BASE_URL"], api_key=os.environ["RELAX_SESSION_ID"], timeout=TIMEOUT_S)
    messages = list(task.messages)
    for _ in range(MAX_TURNS):
        reply = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS).choices[0].message
        messages.append(reply)  # as it came, reasoning and calls included: so the history stays one line
        if not reply.tool_calls:
            break
        messages.extend(
            {"role": "tool", "tool_call_id": call.id, "content": call_tool(task, call)} for call in reply.tool_calls
        )
    write_reward(task, reply.content)


if __name__ == "__main__":
    main()
