"""Datasets: rows of a JSON Lines or Parquet file, checked and ready to be given to Groups.

Owns which rows are taken and how a file is read; what a row must hold is row.py. Reading is by row: the raw text of a
row is gone when its `TaskInput` is made, and rows outside the slice are not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TypeAlias

from attrs import field, frozen

from relax_trio.config.dataset_spec import DatasetSpec, parse_dataset_spec
from relax_trio.config.nearest import did_you_mean
from relax_trio.data.json import JsonObject, JsonValue, parse_json
from relax_trio.data.row import RowKeys, make_task
from relax_trio.data.task import TaskInput
from relax_trio.errors import ConfigError

RawRow: TypeAlias = "tuple[str, JsonValue]"
"""Where a row stands ("FILE:LINE"), and its content."""

_PARQUET_MAGIC = b"PAR1"
_PARQUET_SUFFIXES = (".parquet", ".pq")
_UTF8_BOM = b"\xef\xbb\xbf"
_PARQUET_BATCH = 1024


@frozen(kw_only=True)
class Dataset:
    """The rows of a dataset in the order of its file; row `i` has `rows[i].row == i`.

    Attributes:
      spec: as the user named it.
      rows: at least one.
    """

    spec: str
    rows: tuple[TaskInput, ...] = field(repr=False)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def n_without_messages(self) -> int:
        """Rows that hold metadata only; their agents make their own messages."""
        return sum(not task.messages for task in self.rows)


def load_dataset(
    spec: str,
    *,
    input_key: str = "input",
    label_key: str | None = None,
    metadata_key: str = "metadata",
    image_key: str | None = None,
) -> Dataset:
    """Read a dataset.

    Args:
      spec: `PATH` or `PATH@[a:b]`; the slice counts rows, blank lines of JSON Lines left out.
      input_key: row key of the prompt, a string or a message list; may be missing where there is metadata.
      label_key: row key of the label, which every row must then have.
      metadata_key: row key of the metadata object; may be missing.
      image_key: row key of the images that prompts have placeholders for; may be missing in rows that have none.

    Raises:
      ConfigError: the file can't be read, no row is left, or a row is bad; names "FILE:LINE" (Parquet: "FILE:ROW",
        counted from 1).
    """
    parsed = parse_dataset_spec(spec)
    keys = RowKeys(
        input_key=input_key,
        label_key=label_key,
        metadata_key=metadata_key,
        image_key=image_key,
        directory=parsed.path.parent,
    )
    try:
        raw_rows = _parquet_rows(parsed, keys) if _is_parquet(parsed.path) else _json_rows(parsed)
        rows = tuple(make_task(index, source, content, keys) for index, (source, content) in enumerate(raw_rows))
    except OSError as exc:
        raise ConfigError(f"{parsed.path}: cannot be read: {exc.strerror or exc}") from exc
    if not rows:
        raise ConfigError(f"{spec}: holds no rows{'' if parsed == DatasetSpec(parsed.path) else ' in this slice'}")
    return Dataset(spec=spec, rows=rows)


def _is_parquet(path: Path) -> bool:
    with path.open("rb") as file:
        is_parquet = file.read(len(_PARQUET_MAGIC)) == _PARQUET_MAGIC
    if path.suffix in _PARQUET_SUFFIXES and not is_parquet:
        raise ConfigError(f"{path}: is no Parquet file, whatever its name says")
    return is_parquet


def _bounds(spec: DatasetSpec, count: int) -> tuple[int, int]:
    start, stop, _ = slice(spec.start, spec.stop).indices(count)
    return start, max(start, stop)


# --- JSON Lines ------------------------------------------------------------------------------------------------


def _json_rows(spec: DatasetSpec) -> Iterator[RawRow]:
    start, stop = spec.start or 0, spec.stop
    if start < 0 or (stop is not None and stop < 0):
        start, stop = _bounds(spec, sum(1 for _ in _lines(spec.path)))
    for number, line in islice(_lines(spec.path), start, stop):
        source = f"{spec.path}:{number}"
        try:
            yield source, parse_json(line)
        except ValueError as exc:
            raise ConfigError(f"{source}: is no JSON: {exc}{_json_hint(number, line)}") from exc


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, each with its number from 1."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            text = line.removeprefix(_UTF8_BOM).strip() if number == 1 else line.strip()
            if text:
                yield number, text


def _json_hint(number: int, line: bytes) -> str:
    return "; write one object per line, not a JSON array" if number == 1 and line.startswith(b"[") else ""


# --- Parquet ---------------------------------------------------------------------------------------------------


def _parquet_rows(spec: DatasetSpec, keys: RowKeys) -> Iterator[RawRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(spec.path) as file:
            columns = _parquet_columns(spec.path, file.schema_arrow.names, keys)
            start, stop = _bounds(spec, file.metadata.num_rows)
            first = 0
            for batch in file.iter_batches(batch_size=_PARQUET_BATCH, columns=columns):
                if first >= stop:
                    break
                skip = min(max(0, start - first), len(batch))
                contents = batch.slice(skip, max(0, stop - first - skip)).to_pylist(maps_as_pydicts="strict")
                for number, content in enumerate(contents, start=first + skip + 1):
                    yield f"{spec.path}:{number}", _without_null_prompt(content, keys)
                first += len(batch)
    except (pa.ArrowException, UnicodeDecodeError, KeyError) as exc:  # KeyError: a map that holds a key twice
        raise ConfigError(f"{spec.path}: is no readable Parquet file: {exc}") from exc


def _parquet_columns(path: Path, names: list[str], keys: RowKeys) -> list[str]:
    """The columns to read; a Parquet file says at once which it lacks."""
    for key, what in ((keys.label_key, "label"), (keys.image_key, "images")):
        if key is not None and key not in names:
            hint = did_you_mean(key, names)
            raise ConfigError(f"{path}: has no column {key} for the {what} (columns: {', '.join(names)}){hint}")
    wanted = [key for key in (keys.input_key, keys.metadata_key) if key in names]
    if not wanted:
        hint = did_you_mean(keys.input_key, names)
        raise ConfigError(f"{path}: has no column {keys.input_key} for the prompt (columns: {', '.join(names)}){hint}")
    return list(dict.fromkeys([*wanted, *filter(None, (keys.label_key, keys.image_key))]))


def _without_null_prompt(content: JsonObject, keys: RowKeys) -> JsonObject:
    """Take nulls out of the prompt: a Parquet struct has every field of its column, null where the row has none."""
    prompt = content.get(keys.input_key)
    if isinstance(prompt, list):
        return {**content, keys.input_key: _without_nulls(prompt)}
    return content


def _without_nulls(value: JsonValue) -> JsonValue:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
