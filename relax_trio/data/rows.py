"""The data source of a run: which row comes next, which come back, which are set aside, and how to resume it.

Plain and synchronous: every method is atomic under Trio, because none checkpoints. Not covered: when a row has failed
often enough to be set aside (runtime) and where positions are stored (train/checkpoint).
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable, Sequence

from attrs import define, field, frozen

from relax_trio.data.json import JsonObject, JsonValue
from relax_trio.data.task import TaskInput
from relax_trio.errors import ConfigError, EngineFault, RunFailed

_FORMAT = 1
_SHOWN_REASONS = 3


@frozen
class SetAsideRow:
    """A row that is not taken any more: where it stands in its dataset, and why."""

    source: str
    why: str


@define(eq=False, kw_only=True)
class RowStream:
    """Rows without end: epoch after epoch, rows that were given back first.

    The order of an epoch is a function of (seed, epoch) alone. A row that is given back takes its old place again:
    among given-back rows, the one that was due first comes first, whatever the order in which they came back.

    Attributes:
      rows: the dataset, `rows[i].row == i`.
      seed: seed of the shuffle.
      shuffle: False keeps the order of the file in every epoch.
      n_taken: rows handed out, given-back ones counted each time.
      n_given_back: rows that came back.
    """

    rows: Sequence[TaskInput]
    seed: int
    shuffle: bool
    n_taken: int = field(default=0, init=False)
    n_given_back: int = field(default=0, init=False)
    _epoch: int = field(default=0, init=False)
    _index: int = field(default=0, init=False)
    _order: list[int] = field(factory=list, init=False)
    _returned: list[tuple[int, int]] = field(factory=list, init=False)  # heap of (turn, row)
    _turns: dict[int, int] = field(factory=dict, init=False)  # row -> the turn it was last taken for
    _set_aside: dict[int, str] = field(factory=dict, init=False)  # row -> why

    def __attrs_post_init__(self) -> None:
        if not self.rows:
            raise EngineFault("a row stream needs at least one row")
        self._order = self._order_of(0)

    @property
    def epoch(self) -> int:
        """Number of the epoch that new rows come from, from 0."""
        return self._epoch

    @property
    def set_aside_rows(self) -> tuple[SetAsideRow, ...]:
        """Rows that are not taken any more, in the order in which they were set aside."""
        return tuple(SetAsideRow(self.rows[row].source, why) for row, why in self._set_aside.items())

    def take(self) -> TaskInput:
        """The next row: the given-back row that was due first, else the next of the epoch.

        Raises:
          RunFailed: every row has been set aside; shows some of the reasons.
        """
        if len(self._set_aside) == len(self.rows):
            raise RunFailed(f"every one of the {len(self.rows)} rows has been set aside: {self._reasons()}")
        turn, row = heapq.heappop(self._returned) if self._returned else self._next_turn()
        self._turns[row] = turn
        self.n_taken += 1
        return self.rows[row]

    def give_back(self, task: TaskInput) -> None:
        """Take back a row whose Group was dropped; it comes again before new rows, unless it was set aside.

        Raises:
          EngineFault: the row was never taken from this stream, or more rows came back than were taken.
        """
        entry = self._entry(task)
        if self.n_given_back >= self.n_taken:
            raise EngineFault(f"row {task.source} was given back twice")
        self.n_given_back += 1
        if task.row not in self._set_aside:
            heapq.heappush(self._returned, entry)

    def set_aside(self, task: TaskInput, why: str) -> None:
        """Never hand out this row again, not even where it was given back. `why` is one line for the log."""
        if self.rows[task.row] is not task:
            raise EngineFault(f"row {task.source} is not of this stream")
        self._set_aside.setdefault(task.row, why)
        self._returned = [entry for entry in self._returned if entry[1] != task.row]
        heapq.heapify(self._returned)

    def position(self, at_work: Iterable[TaskInput] = ()) -> JsonObject:
        """Where the stream stands, as JSON; `restore` goes on from there.

        Args:
          at_work: rows taken and not done, whose Groups will not survive: written down as given back. Without them a
            resumed run would lose them.
        """
        unfinished = [self._entry(task) for task in at_work]
        returned = sorted([*self._returned, *unfinished])
        return {
            "format": _FORMAT,
            "n_rows": len(self.rows),
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epoch": self._epoch,
            "index": self._index,
            "n_taken": self.n_taken,
            "n_given_back": self.n_given_back + len(unfinished),
            "returned": [[turn, row] for turn, row in returned if row not in self._set_aside],
            "set_aside": [[row, why] for row, why in self._set_aside.items()],
        }

    def restore(self, position: JsonObject) -> None:
        """Go on from a `position`, on a stream that nothing was taken from.

        Raises:
          ConfigError: the position is of another dataset, seed or order, or is damaged; the stream is unchanged.
        """
        if self.n_taken:
            raise EngineFault("restore() on a row stream that is in use")
        self._check_same_order(position)
        state = _State.read(position, len(self.rows))
        self._epoch, self._index = state.epoch, state.index
        self._order = self._order_of(state.epoch)
        self.n_taken, self.n_given_back = state.n_taken, state.n_given_back
        self._returned = sorted(state.returned)
        self._set_aside = dict(state.set_aside)

    def _check_same_order(self, position: JsonObject) -> None:
        now: JsonObject = {
            "format": _FORMAT,
            "n_rows": len(self.rows),
            "seed": self.seed,
            "shuffle": self.shuffle,
        }
        flags = {"n_rows": "--prompt-data (its number of rows)", "seed": "--rollout-seed"}
        flags |= {"shuffle": "--rollout-shuffle", "format": "the format of the checkpoint"}
        different = [
            f"{flags[key]} was {position.get(key)}, is {value}"
            for key, value in now.items()
            if position.get(key) != value
        ]
        if different:
            raise ConfigError(f"the data order cannot be resumed: {'; '.join(different)}")

    def _next_turn(self) -> tuple[int, int]:
        while True:
            if self._index == len(self.rows):
                self._epoch, self._index = self._epoch + 1, 0
                self._order = self._order_of(self._epoch)
            turn = self._epoch * len(self.rows) + self._index
            row = self._order[self._index]
            self._index += 1
            if row not in self._set_aside:
                return turn, row

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(len(self.rows)))
        if self.shuffle:
            # A text seed is hashed whole, so that (1, 23) and (12, 3) differ.
            random.Random(f"relax_trio rows {self.seed} {epoch}").shuffle(order)
        return order

    def _entry(self, task: TaskInput) -> tuple[int, int]:
        if task.row not in self._turns or self.rows[task.row] is not task:
            raise EngineFault(f"row {task.source} was never taken from this stream")
        return self._turns[task.row], task.row

    def _reasons(self) -> str:
        rows = self.set_aside_rows
        shown = "; ".join(f"{row.source}: {row.why}" for row in rows[-_SHOWN_REASONS:])
        return shown if len(rows) <= _SHOWN_REASONS else f"{shown} (the last {_SHOWN_REASONS})"


@frozen(kw_only=True)
class _State:
    """A position, checked."""

    epoch: int
    index: int
    n_taken: int
    n_given_back: int
    returned: list[tuple[int, int]]
    set_aside: list[tuple[int, str]]

    @classmethod
    def read(cls, position: JsonObject, n_rows: int) -> _State:
        index = _count(position, "index", n_rows)
        returned = [(_item(pair, 0, None), _item(pair, 1, n_rows - 1)) for pair in _pairs(position, "returned")]
        set_aside = [(_item(pair, 0, n_rows - 1), str(pair[1])) for pair in _pairs(position, "set_aside")]
        return cls(
            epoch=_count(position, "epoch", None),
            index=index,
            n_taken=_count(position, "n_taken", None),
            n_given_back=_count(position, "n_given_back", None),
            returned=returned,
            set_aside=set_aside,
        )


def _damaged(what: str) -> ConfigError:
    return ConfigError(f"the saved data position is damaged: {what}; resume from another checkpoint")


def _number(value: JsonValue, name: str, most: int | None) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0 or (most is not None and value > most):
        raise _damaged(f"{name} is {value!r}")
    return value


def _count(position: JsonObject, key: str, most: int | None) -> int:
    return _number(position.get(key), key, most)


def _pairs(position: JsonObject, key: str) -> list[list[JsonValue]]:
    value = position.get(key)
    pairs = [pair for pair in value if isinstance(pair, list) and len(pair) == 2] if isinstance(value, list) else []
    if not isinstance(value, list) or len(pairs) != len(value):
        raise _damaged(f"{key} is no list of pairs")
    return pairs


def _item(pair: list[JsonValue], at: int, most: int | None) -> int:
    return _number(pair[at], f"a pair {pair!r}", most)
