"""User hooks: loading them by name and calling them so that whatever they do comes back as a value or one error.

Owns the border to foreign code: sync hooks run in a worker thread, async ones on the loop, and any exception becomes a
RewardError that shows the hook's own frames. Not covered: what a hook is given (view.py) or may return (value.py).
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import outcome
import trio
from attrs import frozen

import relax_trio.reward
import relax_trio.sync
from relax_trio.config.hook_path import import_hook
from relax_trio.errors import ConfigError, CreditError, RewardError
from relax_trio.sync.cpu import CpuPool

MAX_TRACEBACK_CHARS = 4000
"""The end of a hook's traceback that an error shows."""

MAX_SUMMARY_CHARS = 500
"""The beginning of a hook's exception that an error repeats."""

HookError = RewardError | CreditError

_ASYNCIO_SIGNS = ("no running event loop", "trio.run received unrecognized yield message")


@frozen(kw_only=True)
class Hook:
    """A loaded user function.

    Attributes:
      flag: the flag that named it, with its dashes.
      path: `package.module.function` as the user wrote it.
      fn: the function.
      is_async: it is a coroutine function, or an object whose call is one.
      keywords: names of the optional keywords it takes; None: it takes any (`**kwargs`).
    """

    flag: str
    path: str
    fn: Callable[..., Any]
    is_async: bool
    keywords: frozenset[str] | None

    def accepted(self, optional: Mapping[str, object]) -> dict[str, object]:
        """Those of the optional keywords that this hook takes."""
        return {name: value for name, value in optional.items() if self.keywords is None or name in self.keywords}


def load_hook(flag: str, path: str, *, parameters: tuple[str, ...]) -> Hook:
    """Import the hook that `path` names and check that it can be called with `parameters`.

    Args:
      flag: the flag that gave it, for errors.
      path: `package.module.function`.
      parameters: names of what it is given by position, for the check and the error.

    Raises:
      ConfigError: it can't be imported, isn't there, isn't callable, or doesn't take these arguments.
    """
    fn = import_hook(flag, path)
    call = getattr(fn, "__call__", None)  # noqa: B004 - the bound method is wanted, not whether there is one
    is_async = inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(call)
    return Hook(flag=flag, path=path, fn=fn, is_async=is_async, keywords=_keywords(flag, path, fn, parameters))


def _keywords(flag: str, path: str, fn: Callable[..., Any], parameters: tuple[str, ...]) -> frozenset[str] | None:
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        # Some functions written in C tell nothing about their parameters; they are called as documented.
        return frozenset()
    try:
        signature.bind(*parameters)
    except TypeError as exc:
        wanted = ", ".join(parameters)
        raise ConfigError(f"{flag} {path}: must be callable as {path.rpartition('.')[2]}({wanted}); {exc}") from None
    found = list(signature.parameters.values())
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in found):
        return None
    by_name = found[len(parameters) :]
    return frozenset(p.name for p in by_name if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD))


async def call_hook(
    hook: Hook,
    *args: object,
    place: str,
    cpu: CpuPool,
    limit_s: float,
    optional: Mapping[str, object] | None = None,
    error: type[HookError] = RewardError,
) -> object:
    """Call a hook and return what it returns.

    Args:
      args: passed by position.
      place: whom it is called for, for errors: "G17/2" or "G17".
      cpu: where a sync hook runs; its time counts from the moment it has a thread.
      limit_s: the most seconds the call may take.
      optional: keywords passed as far as the hook takes them.
      error: what its failure becomes.

    Raises:
      RewardError, CreditError (`error`): the hook raised, or its time was over. The message names hook and place and
        ends with the traceback of the hook's own code.

    Cancellation: an async hook is cancelled; a sync one goes on in its thread, its result dropped.
    """
    keywords = hook.accepted(optional or {})
    if not hook.is_async:
        try:
            result = await cpu.run_within(limit_s, _call_sync, hook, place, args, keywords, error)
        except trio.TooSlowError:
            raise error(_too_slow(hook, place, limit_s)) from None
        if not inspect.isawaitable(result):
            return result
    # The deadline lies outside the guard: a TooSlowError of the hook's own is the hook's failure, not our time limit.
    with trio.move_on_after(limit_s) as scope, _foreign(hook, place, error):
        return await (hook.fn(*args, **keywords) if hook.is_async else result)
    assert scope.cancelled_caught, "the block is left by return, by error or by its deadline"
    raise error(_too_slow(hook, place, limit_s))


def _call_sync(
    hook: Hook, place: str, args: tuple[object, ...], keywords: dict[str, object], error: type[HookError]
) -> Any:
    with _foreign(hook, place, error):
        return hook.fn(*args, **keywords)


@contextmanager
def _foreign(hook: Hook, place: str, error: type[HookError]) -> Iterator[None]:
    """Everything that the hook raises becomes one `error`."""
    try:
        yield
    except (Exception, SystemExit) as exc:  # code of the user: it may raise anything; all of it is the hook's failure
        raise error(_story(hook, place, exc)) from exc


def _too_slow(hook: Hook, place: str, limit_s: float) -> str:
    return (
        f"{_named(place)}: {hook.flag} {hook.path} did not answer within {limit_s:g} s; "
        "make it faster or raise --rm-timeout"
    )


def _named(place: str) -> str:
    """A Session by its place, a Group by its own name."""
    return f"session {place}" if "/" in place else f"group {place}"


def _story(hook: Hook, place: str, exc: BaseException) -> str:
    """Name hook, place and exception; then the advice where one is known; then the hook's own frames."""
    lines = [f"{_named(place)}: {hook.flag} {hook.path} raised {type(exc).__name__}: {str(exc)[:MAX_SUMMARY_CHARS]}"]
    if any(sign in str(exc) for sign in _ASYNCIO_SIGNS):
        lines.append(
            "The hook uses asyncio, but hooks are awaited on Trio's loop: use a Trio library (httpx, anyio), or make "
            "it a plain `def` (it then runs in a worker thread) that calls asyncio.run itself."
        )
    return "\n".join([*lines, _own_traceback(exc)])


def _own_traceback(exc: BaseException) -> str:
    """The traceback without the frames of our calling code, of Trio and of what lies between them and the hook."""
    told = traceback.TracebackException.from_exception(exc)
    rooms = [Path(module.__file__ or "").parent for module in (relax_trio.reward, relax_trio.sync, trio, outcome)]
    hidden = (*(f"{room}/" for room in rooms), contextmanager.__code__.co_filename)
    told.stack = traceback.StackSummary.from_list(
        [frame for frame in told.stack if not frame.filename.startswith(hidden)]
    )
    return "".join(told.format()).rstrip()[-MAX_TRACEBACK_CHARS:]
