"""What the official OpenAI SDK makes of the Responses API: run as a program, prints what it saw as one JSON object.

Usage: openai_responses_client.py BASE_URL. Which credential gets which answer is test_openai_responses.py's.
"""

import asyncio
import json
import sys

import openai
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "name": "calc", "parameters": PARAMETERS, "strict": True},
    {
        "type": "namespace",
        "name": "files",
        "description": "files",
        "tools": [{"type": "function", "name": "list", "parameters": PARAMETERS}],
    },
]
USER = {"role": "user", "content": "hi"}
BASE_URL = sys.argv[1]
EVENTS = TypeAdapter(ResponseStreamEvent)


class Answer(BaseModel):
    answer: int


def client(credential):
    return openai.OpenAI(base_url=BASE_URL, api_key=credential, timeout=60)


def create(credential, items="hi", **fields):
    return client(credential).responses.create(model="gpt-x", input=items, **fields)


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


def strictly(credential, **fields):
    """The raw reply through the typed models with every check on: what is missing or mistyped raises."""
    raw = client(credential).responses.with_raw_response.create(model="gpt-x", input="hi", **fields)
    return Response.model_validate(json.loads(raw.text), strict=True).model_dump(mode="json")


def strict_events(credential, **fields):
    """The raw events of a stream through their typed models with every check on."""
    responses = client(credential).responses.with_streaming_response
    with responses.create(model="gpt-x", input="hi", stream=True, **fields) as raw:
        frames = "".join(raw.iter_text()).split("\n\n")
    data = [frame.partition("data: ")[2] for frame in frames if "data: " in frame]
    return [EVENTS.validate_python(json.loads(text)).type for text in data]


def streamed(credential, **fields):
    """The streaming helper: events with their snapshots, and the response it puts together."""
    with client(credential).responses.stream(model="gpt-x", input="hi", **fields) as stream:
        events = [event.to_dict() for event in stream]
        kinds = [event["type"] for event in events]
        snapshots = [event["snapshot"] for event in events if "snapshot" in event]
        return {"kinds": kinds, "snapshots": snapshots, "final": stream.get_final_response().model_dump(mode="json")}


def parsed(credential):
    """Structured output, plain and streamed: the helper reads the text as JSON."""
    plain = client(credential).responses.parse(model="gpt-x", input="hi", text_format=Answer)
    with client(credential).responses.stream(model="gpt-x", input="hi", text_format=Answer) as stream:
        final = stream.get_final_response()
    return [plain.output_parsed.answer, final.output_parsed.answer]


def conversation(credential, keep, *, stream=False):
    """A tool turn and its result; of the items given, `keep` decides what is sent back."""
    first = client(credential).responses.create(model="gpt-x", input=[USER], tools=TOOLS, stream=stream)
    items = [event.item for event in first if event.type == "response.output_item.done"] if stream else first.output
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "4"}
        for item in items
        if item.type == "function_call"
    ]
    create(credential, [USER, *keep(items), *results], tools=TOOLS)


def as_objects(items):
    return items


def as_dumps(items):
    return [item.model_dump() for item in items]


def as_codex(items):
    """Reasoning as Codex keeps it: summary and sealed content, no readable content."""
    return [
        {**item.model_dump(exclude_none=True), **({"content": None} if item.type == "reasoning" else {})}
        for item in items
    ]


def as_ids(items):
    """Reasoning by id alone, calls without ids."""
    return [
        {"type": "reasoning", "id": item.id, "summary": []}
        if item.type == "reasoning"
        else item.model_dump(exclude_none=True, exclude={"id", "status"})
        for item in items
    ]


async def asynchronous(credential):
    async_client = openai.AsyncOpenAI(base_url=BASE_URL, api_key=credential)
    async with async_client, async_client.responses.stream(model="gpt-x", input="hi") as stream:
        return (await stream.get_final_response()).output_text


def drain(credential, **fields):
    return [event.type for event in create(credential, stream=True, **fields)]


for keep in (as_objects, as_dumps, as_codex, as_ids):
    conversation(keep.__name__, keep)
conversation("as_events", as_objects, stream=True)
print(
    json.dumps(
        {
            "text": strictly("text", include=["message.output_text.logprobs"], instructions="terse"),
            "output_text": create("text").output_text,
            "tools": strictly("tools", tools=TOOLS),
            "cut": strictly("cut"),
            "strict_events": strict_events("tools", tools=TOOLS),
            "strict_failure": strict_events("failed"),
            "stream": streamed("text"),
            "tool_stream": streamed("tools", tools=TOOLS),
            "cut_stream": drain("cut"),
            "async": asyncio.run(asynchronous("text")),
            "parsed": parsed("json"),
            "unknown": error_of(lambda: create("unknown")),
            "previous": error_of(lambda: create("text", previous_response_id="resp_1")),
            "full": error_of(lambda: create("full")),
            "full_stream": error_of(lambda: create("full", stream=True)),
            "failed": error_of(lambda: create("failed")),
            "failed_stream": error_of(lambda: drain("failed")),
        }
    )
)
