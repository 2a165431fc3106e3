"""An agent on Pydantic AI (Chat Completions). Needs `pip install "pydantic-ai-slim[openai]"`."""

import os

from harness_task import TIMEOUT_S, load_task, write_reward
from harness_task import read_file as read_task_file
from openai import AsyncOpenAI
from pydantic_ai import Agent, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

MAX_TURNS = 8


def main():
    task = load_task()
    client = AsyncOpenAI(
        base_url=os.environ["RELAX_BASE_URL"], api_key=os.environ["RELAX_SESSION_ID"], timeout=TIMEOUT_S
    )
    model = OpenAIChatModel("policy", provider=OpenAIProvider(openai_client=client))
    system = "\n\n".join(message["content"] for message in task.messages if message["role"] == "system")
    (question,) = [message["content"] for message in task.messages if message["role"] == "user"]
    agent = Agent(model, system_prompt=system)

    @agent.tool_plain
    def read_file(name: str) -> str:
        """Return the text of a file."""
        return read_task_file(task, name)

    result = agent.run_sync(question, usage_limits=UsageLimits(request_limit=MAX_TURNS))
    write_reward(task, result.output)


if __name__ == "__main__":
    main()
