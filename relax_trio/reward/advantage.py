"""Custom advantage: the user's function gives each exported context its base credit. Pure; the call is judge.py's.

    def advantage(metadata_by_slot: list[dict[name, metadata]]) -> list[dict[name, number | list of numbers]] | None

One mapping a Session, in the order of the Group's places; a name is that of the export, None for the implicit one. A
list holds one number per assistant turn of its context. None drops the Group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real

from relax_trio.data.json import JsonObject
from relax_trio.data.sample import Sample
from relax_trio.errors import CreditError

Credit = float | tuple[float, ...]


def metadata_by_slot(samples: Sequence[Sample]) -> list[dict[str | None, JsonObject]]:
    """The function's argument: exported metadata only, of its own; nothing of the dataset row's."""
    slots: dict[int, dict[str | None, JsonObject]] = {}
    for sample in samples:
        slots.setdefault(sample.index, {})[sample.name] = dict(sample.output_metadata)
    return list(slots.values())


def custom_credits(value: object, samples: Sequence[Sample], hook: str) -> list[Credit]:
    """Check what the function returned for one Group (None apart) and put it in the order of its rows.

    Raises:
      CreditError: wrong number of Sessions, a missing or unknown name, a value that is neither a finite number nor a
        list of one finite number per turn. Names the Group, and Session and context where there is one.
    """
    group, slots = samples[0].group, _slots(samples)
    if not isinstance(value, list) or len(value) != len(slots):
        raise CreditError(
            f"group {group}: {hook} returned {_kind(value)}; it must return None, or a list with one mapping for each "
            f"of the {len(slots)} Sessions"
        )
    found: dict[int, Credit] = {}
    for rows, given in zip(slots, value, strict=True):
        place = rows[0].place
        if not isinstance(given, dict):
            raise CreditError(f"session {place}: {hook} returned {_kind(given)} for it instead of a mapping by name")
        _check_names(rows, given, f"session {place}: {hook}")
        for row in rows:
            found[id(row)] = _credit(given[row.name], row, f"session {place}, context {_shown(row.name)}: {hook}")
    return [found[id(sample)] for sample in samples]


def _slots(samples: Sequence[Sample]) -> list[list[Sample]]:
    slots: dict[int, list[Sample]] = {}
    for sample in samples:
        slots.setdefault(sample.index, []).append(sample)
    return list(slots.values())


def _check_names(rows: Sequence[Sample], given: dict[object, object], what: str) -> None:
    names = [row.name for row in rows]
    missing = [_shown(name) for name in names if name not in given]
    unknown = [_shown(name) for name in given if name not in names]
    if missing or unknown:
        told = [f"leaves out {', '.join(missing)}"] * bool(missing) + [f"names {', '.join(unknown)}"] * bool(unknown)
        raise CreditError(f"{what} {' and '.join(told)}; its contexts are {', '.join(map(_shown, names))}")


def _credit(value: object, row: Sample, what: str) -> Credit:
    if not isinstance(value, list | tuple):
        return _number(value, f"{what} gave {value!r}")
    if len(value) != len(row.turn_lens):
        raise CreditError(f"{what} gave {len(value)} numbers for {len(row.turn_lens)} assistant turns")
    return tuple(_number(item, f"{what} gave {item!r} for turn {turn}") for turn, item in enumerate(value))


def _number(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise CreditError(f"{what}; a credit is a finite number")
    return float(value)


def _shown(name: object) -> str:
    return "(implicit)" if name is None else repr(name)


def _kind(value: object) -> str:
    return f"a list of {len(value)}" if isinstance(value, list) else f"{type(value).__name__} {value!r}"[:80]
