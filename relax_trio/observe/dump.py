"""Dumps of rollout steps (`--save-debug-rollout-data`): JSON Lines that need neither torch nor this package to be read.

The first line is `{"kind": "rollout", "format": 1, "rollout_id": …, "evaluation": …, "extra": {…}}`; then one line
`{"kind": "session", …}` per Session and one line `{"kind": "sample", …}` per training row, see `SessionFacts` and
sample_json.py for their fields. A row belongs to the Session with the same `place`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from attrs import field, frozen

from relax_trio.data.json import JsonObject, JsonValue, parse_json
from relax_trio.data.sample import Sample, VersionSpan
from relax_trio.errors import ConfigError, EngineFault, RunFailed, boundary
from relax_trio.ids import PlaceId, WeightVersion
from relax_trio.observe.metrics import row_numbers
from relax_trio.observe.sample_json import sample_from_json, sample_to_json
from relax_trio.runtime.outcome import SessionReport

FORMAT = 1
_FIELD = "{rollout_id}"


@frozen(kw_only=True)
class ContextFacts:
    """What a dump tells of one exported context beside its row, so that a row that was changed since shows.

    Attributes:
      name: of the export; None for the implicit one.
      numbers: see `metrics.row_numbers`; those that are not finite are left out.
    """

    name: str | None
    numbers: Mapping[str, float]


@frozen(kw_only=True)
class SessionFacts:
    """What a dump tells of one Session besides its rows.

    Attributes:
      place: public name of its place.
      status: how it ended: "completed", "failed" or "dropped".
      n_turns: assistant turns in its exported rows.
      seconds: from start to end, on the run's clock.
      state_hashes: hexadecimal state hash of every node of its SessionForest, in order of commit.
      requests: its model requests with their timing and attempts, in order of arrival.
      abort_count: attempts that were aborted, and pauses that others came through.
      weight_versions: spans of the exported rows, in order.
      error: why it failed, None when it did not.
      contexts: of each of its rows, in order; None in dumps that don't tell.
    """

    place: PlaceId
    status: str
    n_turns: int
    seconds: float
    state_hashes: tuple[str, ...]
    requests: tuple[JsonObject, ...]
    abort_count: int
    weight_versions: tuple[VersionSpan, ...]
    error: str | None = None
    contexts: tuple[ContextFacts, ...] | None = None


@frozen(kw_only=True)
class RolloutDump:
    """A dump that was read."""

    rollout_id: int
    evaluation: bool
    samples: tuple[Sample, ...]
    sessions: tuple[SessionFacts, ...] = ()
    extra: JsonObject = field(factory=dict)


def check_dump_template(path_template: str) -> None:
    """Refuse a template under which every step would overwrite the last one.

    Raises:
      ConfigError: no `{rollout_id}` in it.
    """
    if _FIELD not in path_template:
        raise ConfigError(
            f"--save-debug-rollout-data {path_template}: must hold {_FIELD}, else each step overwrites the one before"
        )


def dump_path(path_template: str, rollout_id: int, *, evaluation: bool = False) -> Path:
    """The file of one step; `eval_` goes before the number of an evaluation."""
    check_dump_template(path_template)
    return Path(path_template.replace(_FIELD, f"{'eval_' if evaluation else ''}{rollout_id}"))


def session_facts(
    report: SessionReport,
    samples: Iterable[Sample],
    *,
    status: str = "completed",
    error: str | None = None,
    reward_key: str | None = None,
) -> SessionFacts:
    """Make the facts of a Session from what the runtime remembers of it and from its rows (others are passed over).

    Raises:
      CreditError: a reward object that `reward_key` doesn't open.
    """
    own = [sample for sample in samples if sample.place == report.place]
    attempts = [
        attempt for request in report.requests for attempt in cast("list[JsonObject]", request.get("attempts", []))
    ]
    return SessionFacts(
        place=report.place,
        status=status,
        n_turns=sum(len(sample.turn_lens) for sample in own),
        seconds=report.seconds,
        state_hashes=report.state_hashes,
        requests=report.requests,
        abort_count=sum((attempt.get("finish") == "abort") + _n_pauses(attempt) for attempt in attempts),
        weight_versions=tuple(span for sample in own for span in sample.weight_versions),
        error=error,
        contexts=tuple(ContextFacts(name=row.name, numbers=_finite_numbers(row, reward_key)) for row in own),
    )


def _n_pauses(attempt: JsonObject) -> int:
    found = attempt.get("n_pauses", 0)
    return found if isinstance(found, int) else 0


def write_rollout_dump(
    path_template: str,
    rollout_id: int,
    samples: Sequence[Sample],
    *,
    sessions: Sequence[SessionFacts] = (),
    extra: JsonObject | None = None,
    evaluation: bool = False,
) -> Path:
    """Write one step's dump atomically and return its path. Blocking, and long for long rows: call it in a thread.

    Args:
      path_template: path with `{rollout_id}` in it; missing directories are made.
      extra: whatever else is to be remembered of the step.

    Raises:
      ConfigError: the template has no `{rollout_id}`.
      RunFailed: the file can't be written.
      EngineFault: a row holds what JSON does not have.
    """
    path = dump_path(path_template, rollout_id, evaluation=evaluation)
    head: JsonObject = {
        "kind": "rollout",
        "format": FORMAT,
        "rollout_id": rollout_id,
        "evaluation": evaluation,
        "extra": extra or {},
    }
    temporary = path.with_name(path.name + ".tmp")
    with boundary(RunFailed, f"the dump of step {rollout_id} can't be written", OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            for record in _records(head, sessions, samples):
                file.write(_line(record))
        os.replace(temporary, path)
    return path


def read_rollout_dump(path: Path) -> RolloutDump:
    """Read a dump back.

    Raises:
      ConfigError: no such file, a line that is broken, or a format of another version.
    """
    sessions: list[SessionFacts] = []
    samples: list[Sample] = []
    head: JsonObject | None = None
    with boundary(ConfigError, f"the dump {path} can't be read", OSError), path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            with boundary(
                ConfigError, f"{path}:{number} is no line of a rollout dump", ValueError, KeyError, TypeError
            ):
                record = cast("dict[str, Any]", parse_json(line))
                if number == 1:
                    head = _checked_head(record)
                elif record["kind"] == "session":
                    sessions.append(_session_from_json(record))
                else:
                    samples.append(sample_from_json(record))
    if head is None:
        raise ConfigError(f"the dump {path} is empty")
    return RolloutDump(
        rollout_id=cast("int", head["rollout_id"]),
        evaluation=bool(head["evaluation"]),
        samples=tuple(samples),
        sessions=tuple(sessions),
        extra=cast("JsonObject", head["extra"]),
    )


def _records(head: JsonObject, sessions: Iterable[SessionFacts], samples: Iterable[Sample]) -> Iterator[JsonObject]:
    yield head
    for session in sessions:
        yield {"kind": "session", **_session_to_json(session)}
    for sample in samples:
        yield {"kind": "sample", **sample_to_json(sample)}


def _line(record: JsonObject) -> bytes:
    try:
        return json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except UnicodeEncodeError:
        # Half a surrogate pair, which a client may send: it has a JSON escape, but no UTF-8.
        return json.dumps(record, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as exc:
        name = record.get("place", "the step's extra facts")
        raise EngineFault(f"the dump of {name} holds a value that is not JSON: {exc}") from exc


def _checked_head(record: JsonObject) -> JsonObject:
    if record["kind"] != "rollout":
        raise ValueError(f"the first line is a {record['kind']!r}, not a 'rollout'")
    if record["format"] != FORMAT:
        raise ValueError(f"format {record['format']}; this version reads format {FORMAT}")
    return record


def _finite_numbers(row: Sample, reward_key: str | None) -> dict[str, float]:
    numbers = row_numbers(row, reward_key=reward_key)
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def _session_to_json(session: SessionFacts) -> JsonObject:
    versions: list[JsonValue] = [{"version": s.version, "n_tokens": s.n_tokens} for s in session.weight_versions]
    return {
        "place": session.place,
        "status": session.status,
        "error": session.error,
        "n_turns": session.n_turns,
        "seconds": session.seconds,
        "abort_count": session.abort_count,
        "weight_versions": versions,
        "contexts": None if session.contexts is None else [_context_to_json(c) for c in session.contexts],
        "state_hashes": list(session.state_hashes),
        "requests": list(session.requests),
    }


def _context_to_json(context: ContextFacts) -> JsonObject:
    return {"name": context.name, "numbers": dict(context.numbers)}


def _session_from_json(value: dict[str, Any]) -> SessionFacts:
    contexts = value.get("contexts")
    return SessionFacts(
        place=PlaceId(value["place"]),
        status=value["status"],
        n_turns=value["n_turns"],
        seconds=value["seconds"],
        state_hashes=tuple(value["state_hashes"]),
        requests=tuple(value["requests"]),
        abort_count=value["abort_count"],
        weight_versions=tuple(
            VersionSpan(version=WeightVersion(span["version"]), n_tokens=span["n_tokens"])
            for span in value["weight_versions"]
        ),
        error=value["error"],
        contexts=None
        if contexts is None
        else tuple(ContextFacts(name=context["name"], numbers=dict(context["numbers"])) for context in contexts),
    )
