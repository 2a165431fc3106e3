"""An agent on the official Anthropic SDK (Messages, streamed). Needs `pip install anthropic`."""

import os

from anthropic import Anthropic
from harness_task import TIMEOUT_S, load_task, read_file, write_reward

MAX_TURNS = 8
MAX_TOKENS = 1024
TOOLS = [
    {
        "name": "read_file",
        "description": "Return the text of a file.",
        "input_schema": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    }
]


def call_tool(task, block):
    """Run one call; the model reads what was wrong with it."""
    name = block.input.get("name")
    text = read_file(task, name) if isinstance(name, str) else "read_file takes an object with a name."
    return {"type": "tool_result", "tool_use_id": block.id, "content": text}


def main():
    task = load_task()
    client = Anthropic(base_url=os.environ["RELAX_BASE_URL"], api_key=os.environ["RELAX_SESSION_ID"], timeout=TIMEOUT_S)
    system = "\n\n".join(message["content"] for message in task.messages if message["role"] == "system")
    messages = [message for message in task.messages if message["role"] != "system"]
    for _ in range(MAX_TURNS):
        # Streamed, because the SDK refuses long requests that are not. The events come together at the end.
        with client.messages.stream(
            model="policy", max_tokens=MAX_TOKENS, system=system, messages=messages, tools=TOOLS
        ) as stream:
            reply = stream.get_final_message()
        messages.append({"role": "assistant", "content": reply.content})  # all blocks, thinking included
        calls = [block for block in reply.content if block.type == "tool_use"]
        if not calls:
            break
        messages.append({"role": "user", "content": [call_tool(task, block) for block in calls]})
    write_reward(task, "".join(block.text for block in reply.content if block.type == "text"))


if __name__ == "__main__":
    main()
