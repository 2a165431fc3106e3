"""The log of a run: RUN_DIR/run.log with every event, and the console with those a person wants to see.

The file is plain text, one line per event, no escape codes; colour belongs to the console, on a terminal only. Events
hold no credentials, so neither does the log. Not covered: metrics, the progress bar.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import TextIO

from attrs import define, field

from relax_trio.errors import ConfigError, boundary
from relax_trio.events import Event, Sink, accounting_line, event_sink, format_line
from relax_trio.observe.progress import write_above_bar
from relax_trio.observe.rundir import RUN_LOG_FILE

ACCOUNTING_EVENTS = frozenset({"accounting_start", "accounting_end", "idle_heartbeat"})
"""Events that appear under the documented marker `AGENTIC ROLLOUT`."""

_TOLD_NOUNS = frozenset({"run", "engine", "eval", "checkpoint", "row", "log"})
_TOLD_EVENTS = ACCOUNTING_EVENTS | {
    *("server.started", "server.waiting", "server.admitted", "server.died", "server.unreachable"),
    *("router.unreachable", "router.worker_refused", "groups.none_kept"),
}
_TOLD_VERBS = frozenset(
    {"failed", "timed_out", "dropped", "skipped", "stalled", "retried", "warned", "abort_timeout", "nonfinite"}
)
_BAD_VERBS = _TOLD_VERBS - {"retried"}
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")

_DIM, _BOLD, _RED, _RESET = "\x1b[2m", "\x1b[1m", "\x1b[31m", "\x1b[0m"


@contextmanager
def install_run_log(
    run_dir: Path,
    *,
    console: TextIO | None = None,
    verbose: bool = False,
    clock: Callable[[], float] | None = None,
) -> Iterator[None]:
    """Log the events of this context, and of tasks started in it, for the length of the block.

    Args:
      run_dir: gets `run.log`; a resumed run appends to it.
      console: where people read along; standard error by default.
      verbose: the console tells every event, not only those of interest.
      clock: stamps events, see `event_sink`; lines carry local wall time whatever it is.

    Raises:
      ConfigError: the file can't be opened.
    """
    console_sink = ConsoleSink(sys.stderr if console is None else console, verbose=verbose)
    path = run_dir / RUN_LOG_FILE
    with ExitStack() as stack:
        with boundary(ConfigError, f"{path} cannot be opened", OSError):
            file = stack.enter_context(path.open("a", encoding="utf-8", errors="backslashreplace", buffering=1))
        stack.enter_context(event_sink(FileSink(file, on_failure=console_sink), clock))
        stack.enter_context(event_sink(console_sink))
        yield


def event_line(event: Event) -> str:
    """The text of an event, without time: the documented marker for accounting, else `name key=value …`."""
    rollout = event.fields.get("rollout")
    if event.name in ACCOUNTING_EVENTS and isinstance(rollout, int):
        rest = {key: value for key, value in event.fields.items() if key != "rollout"}
        return _plain(accounting_line(event.name, rollout, **rest))
    return _plain(format_line(event))


@define(eq=False)
class FileSink:
    """Writes every event as one line with local time and UTC offset. A file that can't be written any more (disk full)
    is told once to `on_failure` and left alone: the log never stops a run."""

    _file: TextIO
    _on_failure: Sink
    _now: Callable[[], datetime] = lambda: datetime.now().astimezone()
    _lock: threading.Lock = field(factory=threading.Lock)
    _broken: bool = False

    def __call__(self, event: Event) -> None:
        """Write one event."""
        line = f"{self._now().isoformat(timespec='milliseconds')} {event_line(event)}\n"
        with self._lock:
            if self._broken:
                return
            try:
                self._file.write(line)
                return
            except OSError as exc:
                self._broken = True
                failure = exc
        self._on_failure(Event("log.failed", event.at, {"file": str(self._file.name), "error": str(failure)}))


@define(eq=False)
class ConsoleSink:
    """Shows events to a person: all when `verbose`, else what `is_told` says. Falls silent when nobody reads."""

    _stream: TextIO
    _verbose: bool = field(kw_only=True, default=False)
    _now: Callable[[], datetime] = field(kw_only=True, default=lambda: datetime.now().astimezone())
    _broken: bool = False

    def __call__(self, event: Event) -> None:
        """Show one event."""
        if self._broken or not (self._verbose or is_told(event)):
            return
        stamp = f"{self._now():%H:%M:%S}"
        try:
            if self._stream.isatty():
                write_above_bar(_coloured(stamp, event), self._stream)
            else:
                print(f"{stamp} {event_line(event)}", file=self._stream, flush=True)
        except OSError:
            # The reader of the pipe is gone. The file has every line, so nothing is lost.
            self._broken = True


def is_told(event: Event) -> bool:
    """Whether a person who watches the run wants to see this event."""
    noun, _, verb = event.name.partition(".")
    return event.name in _TOLD_EVENTS or noun in _TOLD_NOUNS or verb in _TOLD_VERBS


def _coloured(stamp: str, event: Event) -> str:
    head, _, rest = event_line(event).partition(" ")
    verb = event.name.partition(".")[2]
    colour = _RED if verb in _BAD_VERBS else _BOLD
    if event.name in ACCOUNTING_EVENTS:
        return f"{_DIM}{stamp}{_RESET} {_BOLD}{head} {rest}{_RESET}"
    return f"{_DIM}{stamp}{_RESET} {colour}{head}{_RESET} {rest}".rstrip()


def _plain(text: str) -> str:
    """Text of foreign origin (an agent's last words) may hold escape codes; they are written out, never sent."""
    return _CONTROL.sub(lambda match: match.group().encode("unicode_escape").decode(), text)
