"""The same agent on the official OpenAI SDK: only the way to the model differs. Needs `pip install openai`."""

import os

from agent import MAX_COMPLETION_TOKENS, TOOLS, run_session
from openai import OpenAI


def openai_completion():
    """Make `complete` for the tool loop of `agent.py`. No timeout: the engine may hold a request while it trains."""
    client = OpenAI(base_url=os.environ["RELAX_BASE_URL"], api_key=os.environ["RELAX_SESSION_ID"], timeout=None)

    def complete(messages):
        completion = client.chat.completions.create(
            model="policy", messages=messages, tools=TOOLS, max_completion_tokens=MAX_COMPLETION_TOKENS
        )
        return completion.choices[0].message.model_dump()

    return complete


if __name__ == "__main__":
    run_session(openai_completion())
