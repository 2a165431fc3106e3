"""The small views: the base, health, models, what is not offered, the API's own description."""

from __future__ import annotations

from quart import request
from quart.wrappers import Response

from relax_trio.api.answers import json_answer
from relax_trio.api.credentials import live_session
from relax_trio.api.openapi import openapi_document
from relax_trio.api.sessions import SessionDirectory
from relax_trio.data.json import JsonObject
from relax_trio.errors import EngineUnavailable, NotFound


class Views:
    """Views that begin nothing. No state of their own.

    Args:
      directory: finds Sessions by credential.
      model_name: the model that is listed.
    """

    def __init__(self, directory: SessionDirectory, *, model_name: str) -> None:
        self._directory = directory
        self._model_name = model_name

    async def base(self) -> Response:
        """What is here, for clients and people who probe the base path."""
        endpoints = ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/models", "/health", "/openapi.json"]
        return json_answer({"service": "relax_trio model API", "endpoints": [*endpoints]})

    async def openapi(self) -> Response:
        """The OpenAPI document of what is here."""
        return json_answer(openapi_document())

    async def health(self) -> Response:
        """Whether requests are accepted."""
        if self._directory.closing:
            raise EngineUnavailable("the run is shutting down")
        return json_answer({"status": "ok"})

    async def models(self) -> Response:
        """The one model there is, as a list of both OpenAI's and Anthropic's shape."""
        live_session(self._directory, request.headers)
        name = self._model_name
        return json_answer(
            {"object": "list", "data": [model_json(name)], "first_id": name, "last_id": name, "has_more": False}
        )

    async def model(self, model_id: str) -> Response:
        """Any model by name: names are echoed and select nothing."""
        live_session(self._directory, request.headers)
        return json_answer(model_json(model_id))

    async def completions(self) -> Response:
        """Text completions are not offered: a prompt has no turns to train on."""
        raise NotFound(
            "there is no /v1/completions here; send the conversation as messages to /v1/chat/completions",
            code="unsupported_endpoint",
        )


def model_json(name: str) -> JsonObject:
    """A model with the fields of both SDKs. When it was made is not known: both get the epoch."""
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "relax_trio",
        "type": "model",
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
        "lifecycle": "active",
    }
