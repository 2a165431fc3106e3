"""`session_output.json` → SessionOutput: a pure parser of what an agent hands back.

Reading the file is session_io.py's; which committed state a record names is the forest's.
"""

from __future__ import annotations

import math
from typing import Final

from attrs import frozen

from relax_trio.data.json import JsonObject, JsonValue, canonical_json, parse_json
from relax_trio.data.normalize import clean_text, normalize_messages, normalize_template_kwargs, normalize_tools
from relax_trio.data.record import ExportRecord, Reward, SessionOutput
from relax_trio.errors import AgentOutputError, InvalidRequest
from relax_trio.events import emit
from relax_trio.ids import PlaceId

_IMPLICIT_KEYS: Final = frozenset({"metadata", "reward"})
_RECORD_KEYS: Final = frozenset({"name", "messages", "tools", "chat_template_kwargs", "metadata", "reward"})


@frozen
class ParsedOutput:
    """An agent's output and the keys in it that mean nothing here, sorted."""

    output: SessionOutput
    unknown_keys: tuple[str, ...] = ()


class UnknownKeys:
    """Warns about each unknown key of the output once per run."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def warn(self, keys: tuple[str, ...], place: PlaceId) -> None:
        """Tell of the keys that were not told of before, as event `output.unknown_key`."""
        for key in keys:
            if key not in self._warned:
                self._warned.add(key)
                emit("output.unknown_key", place=place, key=key)


def parse_session_output(data: bytes, *, place: PlaceId) -> ParsedOutput:
    """Parse the content of `session_output.json`.

    Empty content, or one object without `messages`, is an implicit export; one object with `messages`, or JSON Lines
    of such objects, an explicit one. An optional field that is null counts as absent.

    Args:
      data: content of the file; empty for a missing one.
      place: the Session's public name, for errors.

    Raises:
      AgentOutputError: names the session, the record and what is wrong with it.
    """
    try:
        return _parse(data)
    except _Problem as exc:
        raise AgentOutputError(f"session {place}: session_output.json: {exc}") from exc


class _Problem(Exception):
    """What is wrong, without the session's name."""


def _parse(data: bytes) -> ParsedOutput:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise _Problem(f"not UTF-8: {exc}") from exc
    if not text.strip():
        return ParsedOutput(SessionOutput(metadata={}))
    values = _values(text)
    first = values[0][1]
    if len(values) == 1 and isinstance(first, dict) and "messages" not in first:
        return _implicit(first)
    unknown: set[str] = set()
    records: dict[str, ExportRecord] = {}
    for number, (where, value) in enumerate(values, start=1):
        record = _record(value, f"record {number}{where}", unknown)
        if record.name in records:
            raise _Problem(f"record {number}{where}: the name {record.name!r} is already taken by another record")
        records[record.name] = record
    output = SessionOutput(records=tuple(records.values()), metadata={})
    return ParsedOutput(output, tuple(sorted(unknown)))


def _values(text: str) -> list[tuple[str, JsonValue]]:
    """The JSON values of the file, each with where it stands: one document, or one value a line."""
    try:
        return [("", parse_json(text))]
    except ValueError as exc:
        whole = exc
    # Split at line feeds only: JSON strings may hold the other characters that count as line ends in Python.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    values: list[tuple[str, JsonValue]] = []
    for number, line in lines:
        try:
            values.append((f" (line {number})", parse_json(line)))
        except ValueError as exc:
            if not values:  # no JSON Lines at all, but one document with a mistake in it
                raise _Problem(f"not valid JSON: {whole}") from exc
            raise _Problem(f"record {len(values) + 1} (line {number}): not valid JSON: {exc}") from exc
    return values


def _implicit(value: JsonObject) -> ParsedOutput:
    output = SessionOutput(metadata=_metadata(value, "the object"), reward=_reward(value, "the object"))
    return ParsedOutput(output, tuple(sorted(value.keys() - _IMPLICIT_KEYS)))


def _record(value: JsonValue, where: str, unknown: set[str]) -> ExportRecord:
    if isinstance(value, list):
        raise _Problem(f"{where}: a JSON array is not accepted; write one object per line")
    if not isinstance(value, dict):
        raise _Problem(f"{where}: must be a JSON object")
    name = value.get("name")
    if "messages" not in value:
        named = f" ({name!r})" if isinstance(name, str) else ""
        raise _Problem(f"{where}{named}: has no messages; every record of an explicit export needs them")
    if not isinstance(name, str) or not name:
        raise _Problem(f"{where}: name must be a nonempty string, unique in the session")
    where = f"{where} ({name!r})"
    unknown |= value.keys() - _RECORD_KEYS
    told: list[str] = []  # of what is left out here: the requests that had it were warned about
    try:
        return ExportRecord(
            name=clean_text(name),
            messages=normalize_messages(value["messages"], param="messages", skipped=told),
            tools=normalize_tools(value.get("tools"), param="tools", skipped=told),
            chat_template_kwargs=normalize_template_kwargs(
                value.get("chat_template_kwargs"), param="chat_template_kwargs"
            ),
            metadata=_metadata(value, where),
            reward=_reward(value, where),
        )
    except InvalidRequest as exc:
        raise _Problem(f"{where}: {exc.message}") from exc


def _metadata(value: JsonObject, where: str) -> JsonObject:
    metadata = value.get("metadata")
    if metadata is None:
        return {}
    if not isinstance(metadata, dict):
        raise _Problem(f"{where}: metadata must be an object")
    return _plain(metadata, f"{where}: metadata")


def _reward(value: JsonObject, where: str) -> Reward:
    reward = value.get("reward")
    if reward is None:
        return None
    if isinstance(reward, dict):
        return _plain(reward, f"{where}: reward")
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        raise _Problem(f"{where}: reward must be a number, an object or null, not {canonical_json(reward)[:80]}")
    try:
        number = float(reward)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _Problem(f"{where}: reward must be a finite number")
    return number


def _plain(value: JsonObject, what: str) -> JsonObject:
    """Refuse what the parser lets in and JSON cannot write: 1e999 is infinity."""
    try:
        canonical_json(value)
    except ValueError as exc:
        raise _Problem(f"{what} holds a number that is not finite") from exc
    return value
