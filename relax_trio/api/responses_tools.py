"""Tools of the Responses API: flat function tools, namespaces that hold some, and hosted tools, which are left out.

A namespaced function goes to the model under its bare name. Only where that name is taken does it become
`namespace__name`. Replies name function and namespace apart again, as clients route calls by the pair.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from attrs import define, field

from relax_trio.api.fields import kind_of
from relax_trio.data.json import JsonObject, JsonValue
from relax_trio.data.normalize import function_tool, nonempty_text
from relax_trio.errors import InvalidRequest

MAX_KIND_CHARS = 64
"""Kinds of things that were left out are told in the log; a client chooses their names."""

_FUNCTION_KEYS: Final = ("name", "description", "parameters", "strict")


@define
class Tools:
    """What one request says of tools.

    Attributes:
      functions: canonical function tools, in the client's order.
      skipped: kinds of tools that were left out, e.g. "tool web_search".
    """

    functions: list[JsonObject] = field(factory=list)
    skipped: list[str] = field(factory=list)
    _canonical: dict[tuple[str | None, str], str] = field(factory=dict)
    _client: dict[str, tuple[str | None, str]] = field(factory=dict)

    def canonical_name(self, name: str, namespace: str | None) -> str:
        """The name under which the model knows a function."""
        return self._canonical.get((namespace, name), name)

    def client_name(self, canonical: str) -> tuple[str | None, str]:
        """Namespace (None where there is none) and name under which the client knows what the model called."""
        return self._client.get(canonical, (None, canonical))

    def add(self, function: JsonObject, namespace: str | None) -> None:
        """Add a function, canonical but for its name; plain functions have to come before namespaced ones."""
        name = str(function["name"])
        is_taken = namespace is not None and self._client.get(name, (namespace, name)) != (namespace, name)
        canonical = f"{str(namespace).rstrip('_')}__{name}" if is_taken else name
        function["name"] = canonical
        self._canonical.setdefault((namespace, name), canonical)
        self._client.setdefault(canonical, (namespace, name))


def read_tools(raw: JsonValue) -> Tools:
    """Read the `tools` of a request.

    Raises:
      InvalidRequest: with `param` set to the path of the offending field, e.g. `tools[0].name`.
    """
    tools = Tools()
    namespaced: list[tuple[JsonObject, str]] = []
    for path, tool in _objects(raw, "tools"):
        kind = _kind(tool, path)
        if kind == "function":
            tools.add(_function(tools, tool, path), None)
        elif kind == "namespace":
            name = nonempty_text(tool.get("name"), f"{path}.name")
            for inner_path, inner in _objects(tool.get("tools"), f"{path}.tools"):
                inner_kind = _kind(inner, inner_path)
                if inner_kind == "function":
                    namespaced.append((_function(tools, inner, inner_path), name))
                else:
                    tools.skipped.append(f"tool {inner_kind}")
        else:
            tools.skipped.append(f"tool {kind}")
    for function, name in namespaced:
        tools.add(function, name)
    return tools


def _function(tools: Tools, raw: JsonObject, path: str) -> JsonObject:
    """List a function tool, flat or in the nested shape of Chat; returns what it says of the function."""
    nested = raw.get("function")
    given, path = (nested, f"{path}.function") if isinstance(nested, dict) else (raw, path)
    # In Chat's order: templates print it, so that the same tool is the same tokens in every API.
    tool = function_tool({key: given.get(key) for key in _FUNCTION_KEYS}, path)
    tools.functions.append(tool)
    function = tool["function"]
    assert isinstance(function, dict), "function_tool makes an object of it"
    return function


def _objects(raw: JsonValue, path: str) -> Iterator[tuple[str, JsonObject]]:
    """The objects of an optional list, each with its path."""
    if raw is None:
        return
    if not isinstance(raw, list):
        raise InvalidRequest(f"{path} must be a list of tools, not {kind_of(raw)}", param=path)
    for index, item in enumerate(raw):
        if not isinstance(item, dict):
            raise InvalidRequest(f"{path}[{index}] must be an object, not {kind_of(item)}", param=f"{path}[{index}]")
        yield f"{path}[{index}]", item


def _kind(tool: JsonObject, path: str) -> str:
    """The tool's type; a tool without one is a function."""
    kind = tool.get("type")
    return "function" if kind is None else nonempty_text(kind, f"{path}.type")[:MAX_KIND_CHARS]
