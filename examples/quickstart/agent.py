"""An agent that answers arithmetic questions with a tool. A program of its own: the standard library is all it needs.

It reads a task, talks to the model over HTTP until the model answers, runs the tool calls itself, and writes down
the reward. relax_trio starts one such process for every Session; what it may rely on are the `RELAX_*` variables.
"""

import http.client
import json
import os
import re
import sys
from urllib.parse import urlsplit

MAX_TURNS = 4  # two calls and an answer are enough for every question; one turn is to spare
MAX_COMPLETION_TOKENS = 32  # a call takes about twelve
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


class ModelError(Exception):
    """The model API refused a request; the text is its answer."""


def calculate(arguments):
    """Run the tool on a call's JSON arguments. ValueError if they don't fit its schema."""
    parsed = json.loads(arguments)
    if not isinstance(parsed, dict) or set(parsed) != {"a", "op", "b"}:
        raise ValueError("calculate takes a, op and b")
    a, op, b = parsed["a"], parsed["op"], parsed["b"]
    if type(a) is not int or type(b) is not int:
        raise ValueError("a and b are integers")
    if op == "+":
        return a + b
    if op == "-":
        return a - b
    if op == "*":
        return a * b
    raise ValueError("op is one of + - *")


def solve(messages, complete):
    """Talk with the model until it answers.

    `complete(messages)` returns the model's next message. Its messages are kept exactly as they came, and every
    request carries the whole conversation: this is how the engine recognises which turn follows which.
    Returns (answer or None, result of the last tool call or None, how it ended).
    """
    result = None
    for _ in range(MAX_TURNS):
        reply = complete(messages)
        messages.append(reply)
        calls = reply.get("tool_calls") or []
        if not calls:
            found = re.fullmatch(r"Answer: (-?\d{1,18})", (reply.get("content") or "").strip())
            return (int(found[1]), result, "answered") if found else (None, result, "no answer")
        for call in calls:
            try:
                if call["function"]["name"] != "calculate":
                    raise ValueError("no such tool")
                result = calculate(call["function"]["arguments"])
            except ValueError as error:
                return None, result, f"bad call: {error}"
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(result)})
    return None, result, "too many turns"


def score(answer, result, expected):
    """1.0 if the answer is right and the tool said so; a lucky guess earns nothing."""
    return 1.0 if answer is not None and answer == result == expected else 0.0


def run_session(complete):
    """Read the task, solve it, write the output file."""
    with open(os.environ["RELAX_INPUT_JSON"], encoding="utf-8") as file:
        task = json.load(file)
    messages = list(task["messages"])
    answer, result, ending = solve(messages, complete)
    n_turns = sum(message["role"] == "assistant" for message in messages)
    reward = score(answer, result, int(task["metadata"]["answer"]))
    print(f"{ending} after {n_turns} turns: answer {answer}, last tool result {result}, reward {reward}")
    output = {"reward": reward, "metadata": {"answer": answer, "n_turns": n_turns, "ending": ending}}
    with open(os.environ["RELAX_OUTPUT_JSON"], "w", encoding="utf-8") as file:
        json.dump(output, file)


def http_completion():
    """Make `complete` for `solve`: one connection for the whole conversation.

    There is no timeout on purpose: the engine may hold a request for as long as it trains.
    """
    base = urlsplit(os.environ["RELAX_BASE_URL"].rstrip("/"))
    connection = http.client.HTTPConnection(base.hostname, base.port)
    headers = {
        "Authorization": f"Bearer {os.environ['RELAX_SESSION_ID']}",
        "Content-Type": "application/json",
    }

    def complete(messages):
        body = {
            "model": "policy",
            "messages": messages,
            "tools": TOOLS,
            "max_completion_tokens": MAX_COMPLETION_TOKENS,
        }
        connection.request("POST", base.path + "/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        data = response.read()
        if response.status != 200:
            raise ModelError(f"{response.status} {data.decode(errors='replace')}")
        return json.loads(data)["choices"][0]["message"]

    return complete


if __name__ == "__main__":
    try:
        run_session(http_completion())
    except ModelError as error:
        sys.exit(f"The model API refused a request: {error}")
