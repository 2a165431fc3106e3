"""An agent on the OpenAI Agents SDK (Responses). Needs `pip install openai-agents`."""

import asyncio
import os

from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from harness_task import TIMEOUT_S, load_task, write_reward
from harness_task import read_file as read_task_file
from openai import AsyncOpenAI

MAX_TURNS = 8


async def main():
    set_tracing_disabled(True)  # traces would be sent to OpenAI
    task = load_task()

    @function_tool
    def read_file(name: str) -> str:
        """Return the text of a file."""
        return read_task_file(task, name)

    client = AsyncOpenAI(
        base_url=os.environ["RELAX_BASE_URL"], api_key=os.environ["RELAX_SESSION_ID"], timeout=TIMEOUT_S
    )
    agent = Agent(
        name="policy",
        model=OpenAIResponsesModel("policy", client),
        tools=[read_file],
        # Nothing is stored: each request carries the whole history, reasoning included.
        model_settings=ModelSettings(store=False, response_include=["reasoning.encrypted_content"]),
    )
    result = await Runner.run(agent, list(task.messages), max_turns=MAX_TURNS)
    write_reward(task, result.final_output)


if __name__ == "__main__":
    asyncio.run(main())
