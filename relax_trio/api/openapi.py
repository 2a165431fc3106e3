"""The OpenAPI document of the API: paths, who may ask, what comes back. Shapes of bodies are in openapi_schemas.py.

Written by hand, because it says what a client may rely on and no more: fields that are read, with their bounds. What
else a body holds is ignored. Every path but the operator's stands without `/v1` as well.
"""

from __future__ import annotations

from functools import cache
from typing import Final

from relax_trio import __version__
from relax_trio.api.openapi_schemas import SCHEMAS
from relax_trio.api.paths import BASE_PATH
from relax_trio.data.json import JsonObject

_STATUSES: Final = {
    400: "A field is missing, has the wrong type or can't be served; or the context is full.",
    401: "No credential, or one that does not open this.",
    404: "The credential opens no live Session.",
    413: "The body is larger than the server takes.",
    500: "The engine failed this request.",
    503: "The run is shutting down.",
}
_GET_STATUSES: Final = (401, 404, 503)


@cache
def openapi_document() -> JsonObject:
    """The document. The same object at every call: not to be changed."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "relax_trio model API",
            "version": __version__,
            "description": "One request is one turn of one conversation, with its whole history in it.",
        },
        "servers": [{"url": BASE_PATH}],
        "security": [{"bearer": []}, {"key": []}],
        "paths": {
            "/": {"get": _open("What is here.")},
            "/health": {"get": _open("Whether requests are taken.", 503)},
            "/openapi.json": {"get": _open("This document.")},
            "/v1/models": {"get": _get("The model.", "ModelList", *_GET_STATUSES)},
            "/v1/models/{model_id}": {
                "get": _get("A model by any name.", "Model", *_GET_STATUSES),
                "parameters": [
                    {"name": "model_id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
                ],
            },
            "/v1/chat/completions": {"post": _post("Chat Completions.", "ChatRequest", "ChatReply", streams=True)},
            "/v1/responses": {"post": _post("Responses.", "ResponsesRequest", "ResponsesReply", streams=True)},
            "/v1/messages": {
                "post": _post("Messages.", "MessagesRequest", "MessagesReply", "AnthropicError", streams=True)
            },
            "/v1/messages/count_tokens": {
                "post": _post("How long a prompt is.", "CountRequest", "CountReply", "AnthropicError")
            },
            "/debug_state": {
                "get": _get("State: of a Session, or of all with the operator token.", "State", 401, 404),
                "parameters": [
                    {"name": "forest", "in": "query", "schema": {"type": "string"}, "description": "1 adds nodes."}
                ],
            },
            "/metrics": {"get": _metrics()},
        },
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
            "schemas": SCHEMAS,
        },
    }


def _ref(name: str) -> JsonObject:
    return {"$ref": f"#/components/schemas/{name}"}


def _json(name: str, description: str) -> JsonObject:
    return {"description": description, "content": {"application/json": {"schema": _ref(name)}}}


def _errors(envelope: str, *statuses: int) -> JsonObject:
    return {str(status): _json(envelope, _STATUSES[status]) for status in statuses}


def _get(summary: str, schema: str, *statuses: int) -> JsonObject:
    return {"summary": summary, "responses": {"200": _json(schema, "OK"), **_errors("Error", *statuses)}}


def _open(summary: str, *statuses: int) -> JsonObject:
    """A path that needs no credential."""
    return {**_get(summary, "State", *statuses), "security": []}


def _post(
    summary: str, request: str, reply: str, envelope: str = "OpenAIError", *, streams: bool = False
) -> JsonObject:
    answer: JsonObject = {"application/json": {"schema": _ref(reply)}}
    if streams:
        answer["text/event-stream"] = {}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(request)}}},
        "responses": {"200": {"description": "OK", "content": answer}, **_errors(envelope, *_STATUSES)},
    }


def _metrics() -> JsonObject:
    text: JsonObject = {"description": "Prometheus text", "content": {"text/plain": {"schema": {"type": "string"}}}}
    return {
        "summary": "Gauges of the run; needs the operator token.",
        "responses": {"200": text, **_errors("OpenAIError", 401)},
    }
