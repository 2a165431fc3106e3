"""What the official Anthropic SDK makes of the API: run as a program, prints what it saw as one JSON object.

Usage: anthropic_sdk_client.py BASE_URL. Which credential gets which answer is test_anthropic_sdk.py's.
"""

import asyncio
import json
import sys

import anthropic

TOOLS = [{"name": "calc", "description": "add", "input_schema": {"type": "object", "properties": {}}}]
HI = [{"role": "user", "content": "hi"}]
BASE_URL = sys.argv[1]


def client(credential):
    return anthropic.Anthropic(base_url=BASE_URL, api_key=credential, timeout=60)


def create(credential, messages=HI, **fields):
    return client(credential).messages.create(model="claude-x", messages=messages, max_tokens=64, **fields)


def strict(model):
    """The model validated by its own type, which the SDK itself does not do."""
    return type(model).model_validate(model.model_dump()).model_dump(mode="json")


def error_of(call):
    try:
        call()
    except anthropic.APIError as exc:
        return {
            "type": type(exc).__name__,
            "status": getattr(exc, "status_code", None),
            "body": exc.body,
            "should_retry": exc.response.headers.get("x-should-retry"),
        }
    return None


def streamed(credential, **fields):
    """The streaming helper: event types, text, and the message it puts together."""
    with client(credential).messages.stream(model="claude-x", messages=HI, max_tokens=64, **fields) as stream:
        kinds = [event.type for event in stream]
        return {"kinds": kinds, "final": strict(stream.get_final_message())}


def drain(credential):
    return [event.type for event in create(credential, stream=True)]


async def asynchronous(credential):
    async with (
        anthropic.AsyncAnthropic(base_url=BASE_URL, api_key=credential) as async_client,
        async_client.messages.stream(model="claude-x", messages=HI, max_tokens=64) as stream,
    ):
        return [text async for text in stream.text_stream]


def conversation(credential, **fields):
    """A tool turn and its results, with the SDK's own content objects sent back."""
    first = create(credential, tools=TOOLS, **fields)
    calls = [block for block in first.content if block.type == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "4"} for call in calls]
    create(credential, [*HI, first.to_param(), {"role": "user", "content": results}], tools=TOOLS)
    return [call.input for call in calls]


def with_auth_token(credential):
    """The other way in which this SDK sends a credential."""
    by_token = anthropic.Anthropic(base_url=BASE_URL, auth_token=credential)
    return by_token.messages.create(model="claude-x", messages=HI, max_tokens=64).content[0].text


def beta(credential):
    message = client(credential).beta.messages.create(
        model="claude-x",
        messages=HI,
        max_tokens=64,
        betas=["context-management-2025-06-27"],
        context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
    )
    return message.model_dump(mode="json")


def models(credential):
    found = client(credential).models
    return {"listed": [strict(model) for model in found.list()], "one": strict(found.retrieve("Qwen/Qwen3-8B"))}


def count(credential):
    return client(credential).messages.count_tokens(model="claude-x", messages=HI, tools=TOOLS).input_tokens


print(
    json.dumps(
        {
            "text": strict(create("text", system=[{"type": "text", "text": "terse"}], metadata={"user_id": "u"})),
            "stopped": strict(create("stopped", stop_sequences=["END"])),
            "cut": strict(create("cut")),
            "tools": strict(create("tools", tools=TOOLS, thinking={"type": "enabled", "budget_tokens": 1024})),
            "stream": streamed("tools", tools=TOOLS),
            "text_stream": streamed("text"),
            "events": drain("text"),
            "async": asyncio.run(asynchronous("text")),
            "conversation": conversation("talk"),
            "auth_token": with_auth_token("text"),
            "beta": beta("text"),
            "models": models("text"),
            "count": count("text"),
            "unknown": error_of(lambda: create("unknown")),
            "unknown_models": error_of(lambda: client("unknown").models.list()),
            "bad": error_of(lambda: create("text", tool_choice={"type": "sometimes"})),
            "image": error_of(
                lambda: create(
                    "text",
                    [
                        {
                            "role": "user",
                            "content": [
                                {
                                    "type": "image",
                                    "source": {"type": "base64", "media_type": "image/png", "data": "AA=="},
                                }
                            ],
                        }
                    ],
                )
            ),
            "full": error_of(lambda: create("full")),
            "full_stream": error_of(lambda: create("full", stream=True)),
            "full_count": error_of(lambda: count("full")),
            "failed": error_of(lambda: create("failed")),
            "failed_stream": error_of(lambda: drain("failed")),
        }
    )
)
