"""Shapes of request and reply bodies as JSON Schema, for the OpenAPI document."""

from __future__ import annotations

from typing import Final

from relax_trio.data.json import JsonObject, JsonValue


def _object(required: str = "", **properties: JsonValue) -> JsonObject:
    """An object with these properties, among others; `required` are names with blanks between."""
    return {"type": "object", "required": [*required.split()], "properties": {**properties}}


def _nullable(schema: JsonObject) -> JsonObject:
    return {"anyOf": [schema, {"type": "null"}]}


def _one_of(*values: str) -> JsonObject:
    return {"enum": [*values]}


def _other_than(*values: str) -> JsonObject:
    return {"type": "string", "minLength": 1, "not": {"enum": [*values]}}


def _list(items: JsonObject, *, at_least: int = 0) -> JsonObject:
    return {"type": "array", "items": items, "minItems": at_least}


_TEXT: Final[JsonObject] = {"type": "string"}
_SAID: Final[JsonObject] = {"type": "string", "minLength": 1}
_COUNT: Final[JsonObject] = {"type": "integer", "minimum": 0}
_LIMIT: Final[JsonObject] = {"type": "integer", "minimum": 1, "maximum": 2**63 - 1}
_FLAG: Final = _nullable({"type": "boolean"})
_OBJECT: Final[JsonObject] = {"type": "object"}
_NULL: Final[JsonObject] = {"type": "null"}
_STOP: Final = _nullable({"anyOf": [_SAID, _list(_SAID)]})
_SEED: Final = _nullable({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1})
_ONE: Final = _nullable({"const": 1})
_KWARGS: Final = _nullable({"type": "object", "description": "Arguments of the chat template."})

_FUNCTION: Final = _object(
    "name", name=_SAID, description=_nullable(_TEXT), parameters=_nullable(_OBJECT), strict=_FLAG
)
_TEXT_PART: Final = _object("type text", type=_one_of("text"), text=_SAID)
_PARTS: Final[JsonObject] = {"anyOf": [_SAID, _list(_TEXT_PART, at_least=1)]}

_CALL: Final = _object(
    "id function",
    id=_SAID,
    type=_one_of("function"),
    function=_object("name arguments", name=_SAID, arguments={"anyOf": [_TEXT, _OBJECT]}),
)
_CHAT_MESSAGE: Final[JsonObject] = {
    "oneOf": [
        _object("role content", role=_one_of("user", "system", "developer"), content=_PARTS),
        _object(
            "role content",
            role=_one_of("assistant"),
            content=_TEXT,
            reasoning_content=_nullable(_TEXT),
            tool_calls=_nullable(_list(_CALL)),
        ),
        _object("role", role=_one_of("tool"), content=_nullable(_TEXT), tool_call_id=_nullable(_TEXT)),
    ]
}

_ORDER: Final[JsonObject] = {"description": "The last message is not the assistant's."}

_TEXT_BLOCK: Final = _object("type text", type=_one_of("text"), text=_SAID)
_THINKING_BLOCK: Final = _object(
    "type thinking", type=_one_of("thinking"), thinking=_nullable(_TEXT), signature=_nullable(_TEXT)
)
_USE_BLOCK: Final = _object("type id name input", type=_one_of("tool_use"), id=_SAID, name=_SAID, input=_OBJECT)
_RESULT_BLOCK: Final = _object(
    "type tool_use_id",
    type=_one_of("tool_result"),
    tool_use_id=_SAID,
    content=_nullable({"anyOf": [_TEXT, _list(_TEXT_BLOCK)]}),
)
_MESSAGE: Final[JsonObject] = {
    "description": "Blocks of other types are left out.",
    "oneOf": [
        _object("role content", role=_one_of("system"), content={"anyOf": [_SAID, _list(_TEXT_BLOCK, at_least=1)]}),
        _object(
            "role content",
            role=_one_of("user"),
            content={"anyOf": [_SAID, _list({"anyOf": [_TEXT_BLOCK, _RESULT_BLOCK]}, at_least=1)]},
        ),
        _object(
            "role content",
            role=_one_of("assistant"),
            content={"anyOf": [_TEXT, _list({"anyOf": [_TEXT_BLOCK, _THINKING_BLOCK, _USE_BLOCK]})]},
        ),
    ],
}
_MESSAGES_FIELDS: Final[JsonObject] = {
    "messages": {**_list(_MESSAGE, at_least=1), **_ORDER},
    "system": _nullable({"anyOf": [_TEXT, _list(_object("type text", type=_one_of("text"), text=_TEXT))]}),
    "tools": _nullable(
        _list(
            _object(
                "name",
                type=_nullable(_TEXT),
                name=_SAID,
                description=_nullable(_TEXT),
                input_schema=_nullable(_OBJECT),
                strict=_FLAG,
            )
        )
    ),
    "tool_choice": _nullable(
        {
            "anyOf": [
                _object("type", type=_one_of("auto", "any", "none")),
                _object("type name", type=_one_of("tool"), name=_SAID),
            ]
        }
    ),
    "thinking": _nullable(_object("type", type=_one_of("enabled", "adaptive", "disabled"))),
    "output_config": _nullable(_object(effort=_nullable(_TEXT))),
    "chat_template_kwargs": _KWARGS,
    "n": _ONE,
    "model": _nullable(_TEXT),
}
_ITEMS: Final[list[JsonValue]] = [
    _object("type role content", type=_one_of("message"), role=_one_of("user", "system", "developer"), content=_SAID),
    _object("type role content", type=_one_of("message"), role=_one_of("assistant"), content=_TEXT),
    _object("type call_id name arguments", type=_one_of("function_call"), call_id=_SAID, name=_SAID, arguments=_TEXT),
    _object("type call_id output", type=_one_of("function_call_output"), call_id=_SAID, output=_TEXT),
]
_OTHER_ITEM: Final[JsonObject] = {
    "description": "Reasoning is read, items of other types are left out.",
    **_object("type", type=_other_than("message", "function_call", "function_call_output", "reasoning")),
}
_ANTHROPIC_USAGE: Final = _object(
    "input_tokens cache_creation_input_tokens cache_read_input_tokens output_tokens",
    input_tokens=_COUNT,
    cache_creation_input_tokens=_COUNT,
    cache_read_input_tokens=_COUNT,
    output_tokens=_COUNT,
)
_OPENAI_ERROR: Final = _object(
    "error",
    error=_object("message type param code", message=_TEXT, type=_TEXT, param=_nullable(_TEXT), code=_nullable(_TEXT)),
)
_ANTHROPIC_ERROR: Final = _object(
    "type error", type=_one_of("error"), error=_object("type message", type=_TEXT, message=_TEXT)
)
_MODEL: Final = _object(
    "id object created owned_by type display_name created_at",
    id=_TEXT,
    object=_one_of("model"),
    created=_COUNT,
    owned_by=_TEXT,
    type=_one_of("model"),
    display_name=_TEXT,
    created_at=_TEXT,
)

SCHEMAS: Final[JsonObject] = {
    "OpenAIError": _OPENAI_ERROR,
    "AnthropicError": _ANTHROPIC_ERROR,
    "Error": {"anyOf": [_OPENAI_ERROR, _ANTHROPIC_ERROR], "description": "Anthropic's where its SDK asks."},
    "State": _OBJECT,
    "Model": _MODEL,
    "ModelList": _object(
        "object data has_more", object=_one_of("list"), data=_list(_MODEL), has_more={"type": "boolean"}
    ),
    "ChatRequest": _object(
        "messages",
        messages={**_list(_CHAT_MESSAGE, at_least=1), **_ORDER},
        tools=_nullable(_list(_object("function", type=_nullable(_one_of("function")), function=_FUNCTION))),
        tool_choice=_nullable(
            {
                "anyOf": [
                    _one_of("auto", "none", "required", "any"),
                    _object("function", function=_object("name", name=_SAID)),
                ]
            }
        ),
        chat_template_kwargs=_KWARGS,
        max_completion_tokens=_nullable(_LIMIT),
        max_tokens=_nullable(_LIMIT),
        stop=_STOP,
        seed=_SEED,
        logprobs=_FLAG,
        stream=_FLAG,
        n=_ONE,
        model=_nullable(_TEXT),
    ),
    "ChatReply": _object(
        "id object created model choices usage",
        id=_TEXT,
        object=_one_of("chat.completion"),
        created=_COUNT,
        model=_TEXT,
        choices=_list(
            _object(
                "index message finish_reason",
                index=_COUNT,
                message=_object("role content", role=_one_of("assistant"), content=_nullable(_TEXT)),
                finish_reason=_one_of("stop", "length", "tool_calls"),
            ),
            at_least=1,
        ),
        usage=_object(
            "prompt_tokens completion_tokens total_tokens",
            prompt_tokens=_COUNT,
            completion_tokens=_COUNT,
            total_tokens=_COUNT,
        ),
    ),
    "ResponsesRequest": _object(
        "input",
        input={"anyOf": [_SAID, {**_list({"anyOf": [*_ITEMS, _OTHER_ITEM]}), "contains": {"anyOf": [*_ITEMS]}}]},
        instructions=_nullable(_TEXT),
        tools=_nullable(_list(_object("type", type=_SAID))),
        tool_choice=_nullable(
            {
                "anyOf": [
                    _one_of("auto", "none", "required"),
                    _object("type name", type=_one_of("function"), name=_SAID),
                    _object("type", type=_one_of("allowed_tools"), mode=_nullable(_one_of("auto", "required"))),
                    _object("type", type=_other_than("function", "allowed_tools")),
                ]
            }
        ),
        reasoning=_nullable(_object(effort=_nullable(_TEXT))),
        chat_template_kwargs=_KWARGS,
        max_output_tokens=_nullable(_LIMIT),
        stop=_STOP,
        seed=_SEED,
        stream=_FLAG,
        n=_ONE,
        model=_nullable(_TEXT),
        include=_nullable(_list(_TEXT)),
        top_logprobs=_nullable(_COUNT),
        background=_nullable({"const": False}),
        previous_response_id=_NULL,
        conversation=_NULL,
        prompt=_NULL,
    ),
    "ResponsesReply": _object(
        "id object created_at status model output usage",
        id=_TEXT,
        object=_one_of("response"),
        created_at=_COUNT,
        status=_one_of("completed", "incomplete"),
        model=_TEXT,
        output=_list(_object("type", type=_one_of("message", "reasoning", "function_call"))),
        usage=_object(
            "input_tokens output_tokens total_tokens", input_tokens=_COUNT, output_tokens=_COUNT, total_tokens=_COUNT
        ),
    ),
    "MessagesRequest": _object(
        "messages max_tokens",
        **_MESSAGES_FIELDS,
        max_tokens=_LIMIT,
        stop_sequences=_STOP,
        seed=_SEED,
        stream=_FLAG,
    ),
    "MessagesReply": _object(
        "id type role model content stop_reason stop_sequence usage",
        id=_TEXT,
        type=_one_of("message"),
        role=_one_of("assistant"),
        model=_TEXT,
        content=_list(_object("type", type=_one_of("text", "thinking", "tool_use"))),
        stop_reason=_one_of("end_turn", "max_tokens", "stop_sequence", "tool_use"),
        stop_sequence=_nullable(_TEXT),
        usage=_ANTHROPIC_USAGE,
    ),
    "CountRequest": _object("messages", **_MESSAGES_FIELDS),
    "CountReply": _object("input_tokens", input_tokens=_COUNT),
}
