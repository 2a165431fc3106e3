"""What the official OpenAI SDK makes of the API: run as a program, prints what it saw as one JSON object.

Usage: openai_sdk_client.py BASE_URL. Which credential gets which answer is test_openai_sdk.py's.
"""

import asyncio
import json
import sys

import openai

TOOLS = [{"type": "function", "function": {"name": "calc", "parameters": {"type": "object", "properties": {}}}}]
HI = [{"role": "user", "content": "hi"}]
BASE_URL = sys.argv[1]


def client(credential):
    return openai.OpenAI(base_url=BASE_URL, api_key=credential, timeout=60)


def create(credential, **fields):
    return client(credential).chat.completions.create(model="gpt-x", messages=HI, **fields)


def error_of(call):
    try:
        call()
    except openai.APIError as exc:
        return {
            "type": type(exc).__name__,
            "status": getattr(exc, "status_code", None),
            "code": exc.code,
            "param": exc.param,
            "message": exc.message,
        }
    return None


def streamed(credential):
    """The streaming helper: events, and the completion it puts together."""
    with client(credential).chat.completions.stream(model="gpt-x", messages=HI, tools=TOOLS) as stream:
        kinds = [event.type for event in stream]
        return {"kinds": kinds, "final": stream.get_final_completion().model_dump()}


def drain(credential):
    return [chunk.model_dump() for chunk in create(credential, stream=True)]


async def asynchronous(credential):
    async with openai.AsyncOpenAI(base_url=BASE_URL, api_key=credential) as async_client:
        stream = await async_client.chat.completions.create(model="gpt-x", messages=HI, stream=True)
        return [chunk.choices[0].delta.content async for chunk in stream]


def conversation(credential):
    """A tool turn and its result, with the SDK's own message object sent back."""
    first = create(credential, tools=TOOLS).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "4"} for call in first.tool_calls]
    client(credential).chat.completions.create(model="gpt-x", messages=[*HI, first, *results], tools=TOOLS)
    return True


print(
    json.dumps(
        {
            "text": create("text", logprobs=True).model_dump(),
            "tools": create("tools", tools=TOOLS).model_dump(),
            "stream": streamed("tools"),
            "chunks": drain("text"),
            "async": asyncio.run(asynchronous("text")),
            "conversation": conversation("talk"),
            "models": [model.id for model in client("text").models.list()],
            "unknown": error_of(lambda: create("unknown")),
            "bad": error_of(lambda: create("text", n=2)),
            "full": error_of(lambda: create("full")),
            "full_stream": error_of(lambda: create("full", stream=True)),
            "failed": error_of(lambda: create("failed")),
            "failed_stream": error_of(lambda: drain("failed")),
            "no_completions": error_of(lambda: client("text").completions.create(model="gpt-x", prompt="hi")),
        }
    )
)
