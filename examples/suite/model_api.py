"""The model API for the agents of this suite: Chat Completions over one connection. The standard library is enough."""

import http.client
import json
import os
from urllib.parse import urlsplit


class ModelError(Exception):
    """The model API refused a request; the text is its answer."""


def http_completion(max_completion_tokens):
    """Make `complete(messages)`, which returns the model's next message.

    There is no timeout on purpose: the engine may hold a request for as long as it trains.
    """
    base = urlsplit(os.environ["RELAX_BASE_URL"].rstrip("/"))
    connection = http.client.HTTPConnection(base.hostname, base.port)
    headers = {
        "Authorization": f"Bearer {os.environ['RELAX_SESSION_ID']}",
        "Content-Type": "application/json",
    }

    def complete(messages):
        body = {"model": "policy", "messages": messages, "max_completion_tokens": max_completion_tokens}
        connection.request("POST", base.path + "/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        data = response.read()
        if response.status != 200:
            raise ModelError(f"{response.status} {data.decode(errors='replace')}")
        return json.loads(data)["choices"][0]["message"]

    return complete


def read_task():
    """The row: {"messages", "metadata"}."""
    with open(os.environ["RELAX_INPUT_JSON"], encoding="utf-8") as file:
        return json.load(file)


def write_output(*records):
    """Write the Session's output, one JSON object a line."""
    with open(os.environ["RELAX_OUTPUT_JSON"], "w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
