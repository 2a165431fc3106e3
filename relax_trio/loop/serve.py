"""The model API without a run: Sessions that no agent process belongs to, for trying an agent by hand."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

import trio

from relax_trio.backend.scripted import ScriptedBackend, read_answers
from relax_trio.config.tree import Config
from relax_trio.data.json import JsonObject
from relax_trio.data.task import TaskInput
from relax_trio.ids import GroupId, WeightVersion, place_id
from relax_trio.loop import servers, setup
from relax_trio.loop.start import tell_operator
from relax_trio.runtime.engine import Engine, open_engine
from relax_trio.runtime.session import Session
from relax_trio.runtime.stop import Stop
from relax_trio.sync.cpu import ThreadCpuPool

GROUP = GroupId("S0")
"""Public name of the Group that served Sessions stand in."""

SCRIPTED_CONTEXT_LEN = 131_072
"""Context of a script, which has no model to bound it, where `--rollout-max-context-len` doesn't."""


async def serve(
    config: Config, checkpoint: Path, *, answers: Path | None, n_sessions: int, forest_out: Path | None, stop: Stop
) -> None:
    """Serve the model API until stopped.

    Prints to stdout, once bound: one RELAX_BASE_URL line, then one RELAX_SESSION_ID line per Session.

    Args:
      checkpoint: model, or, with `answers`, its tokenizer only.
      answers: script of answers; every Session reads its own copy in order.
      forest_out: file that gets the forest on exit: of one Session as it is, of several under "sessions".

    Raises:
      ConfigError: the port is in use, the script or the checkpoint can't be used.

    Cancellation: leaves; the forest is not written.
    """
    cpu = ThreadCpuPool(setup.n_cores())
    codec = setup.load_codec(config, checkpoint, scripted=answers is not None)
    with tempfile.TemporaryDirectory(prefix="relax-trio-serve-") as scratch:
        if answers is None:
            opening = servers.open_run_engine(
                config,
                checkpoint,
                codec,
                WeightVersion("0"),
                cpu=cpu,
                run_dir=Path(),
                servers_dir=Path(scratch),
                stop=stop,
            )
        else:
            script = ScriptedBackend(
                read_answers(answers, codec.encode_text, codec.stop_token_ids[0]),
                name=str(answers),
                max_context_len=config.rollout.rollout_max_context_len or SCRIPTED_CONTEXT_LEN,
                vocab_len=codec.vocab_len,
            )
            opening = open_engine(config, backend=script, codec=codec, cpu=cpu, run_dir=Path(), stop=stop)
        async with opening as engine:
            sessions = [_make_session(config, engine, index) for index in range(n_sessions)]
            with stop.work():
                async with trio.open_nursery() as nursery:
                    for session in sessions:
                        await nursery.start(_hold, session, name=f"session {session.name}")
                    _announce(engine, sessions)
                    await trio.sleep(math.inf)
            if forest_out is not None:
                _write_forests(forest_out, sessions)


def _make_session(config: Config, engine: Engine, index: int) -> Session:
    """A Session at place S0/index, leased from the start."""
    lease = trio.Event()
    lease.set()
    return Session(
        place=place_id(GROUP, index),
        group=GROUP,
        index=index,
        sample=index,
        mode="train",
        task=TaskInput(row=0, source="serve", prompt="", messages=(), metadata={}),
        limits=setup.train_limits(config, engine.shared.backend.max_context_len),
        shared=engine.shared,
        lease=lease,
    )


async def _hold(session: Session, *, task_status: trio.TaskStatus[None]) -> None:
    async with session.open():
        task_status.started()
        await trio.sleep_forever()


def _announce(engine: Engine, sessions: Sequence[Session]) -> None:
    """Tell a script how to connect; nothing else goes to stdout."""
    print(f"RELAX_BASE_URL={engine.shared.base_url}", flush=True)
    for session in sessions:
        print(f"RELAX_SESSION_ID={session.credential}", flush=True)
    tell_operator(engine)


def _write_forests(path: Path, sessions: Sequence[Session]) -> None:
    forests = [session.debug_state(forest=True) for session in sessions]
    content: JsonObject = forests[0] if len(forests) == 1 else {"sessions": [*forests]}
    path.write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")
