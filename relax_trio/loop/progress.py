"""The progress bar of the open step, fed by events: Sessions finished, Groups scored, Groups prepared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from attrs import define, field

from relax_trio.events import Event, event_sink
from relax_trio.observe.progress import StepBar, step_progress


@contextmanager
def show_progress() -> Iterator[None]:
    """Show the steps of this context, and of tasks started in it, for the length of the block."""
    with ExitStack() as bars, event_sink(_ProgressSink(bars)):
        yield


@define(eq=False)
class _ProgressSink:
    """Counts what the open step's events say. Eval Sessions ("E…") are not the step's."""

    _bars: ExitStack
    _bar: StepBar | None = None
    _finished: int = 0
    _scored: int = 0
    _prepared: set[str] = field(factory=set)

    def __call__(self, event: Event) -> None:
        fields = event.fields
        if event.name == "accounting_start":
            self._open(fields)
        elif event.name == "accounting_end":
            self._bars.close()
            self._bar = None
        elif self._bar is not None and self._count(event.name, str(fields.get("group", fields.get("place", "")))):
            self._bar.update(finished=self._finished, scored=self._scored, prepared=len(self._prepared))

    def _open(self, fields: dict[str, str | int | float | bool | None]) -> None:
        rollout, sessions, carried = fields["rollout"], fields["sessions"], fields.get("carried", 0)
        assert isinstance(carried, int), "surplus of earlier steps has paid so many Groups"
        self._finished, self._scored = 0, carried
        assert isinstance(rollout, int), "the step names its number"
        assert isinstance(sessions, int), "the step says how many Sessions it trains on"
        self._bar = self._bars.enter_context(step_progress(rollout, sessions))

    def _count(self, name: str, who: str) -> bool:
        """Whether the event changed a count."""
        if who.startswith("E"):
            return False
        if name == "session.completed":
            self._finished += 1
        elif name == "group.scored":
            self._scored += 1
        elif name == "group.prepared":
            self._prepared.add(who)
        elif name in ("group.leased", "group.dropped"):
            self._prepared.discard(who)
        else:
            return False
        return True
