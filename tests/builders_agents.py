"""Builders of the tests with real agents: what one is started with, and a launcher that must leave nothing behind."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
import trio

from relax_trio.agent.base import AgentSpec
from relax_trio.agent.launcher import ProcessAgentLauncher
from relax_trio.config.tree import AgentConfig
from relax_trio.data.messages import Message
from relax_trio.data.task import TaskInput
from relax_trio.errors import AgentExecutionError
from relax_trio.ids import group_id, new_credential, place_id
from relax_trio.sync.process import STOP_S, Warden
from relax_trio.sync.services import Services

BASE_URL = "http://127.0.0.1:1/agentic_api"


def spec(index=0, metadata=None, content="2 + 2 = ?  é"):
    """A Session's agent at place G17/`index`."""
    return AgentSpec(
        place=place_id(group_id(17), index),
        group=group_id(17),
        credential=new_credential(),
        base_url=BASE_URL,
        mode="train",
        task=TaskInput(
            row=0,
            source="f:1",
            prompt=content,
            messages=(Message(role="user", content=content),),
            metadata=metadata or {},
        ),
    )


@asynccontextmanager
async def launching(tmp_path, command, *, within_s=60, **flags):
    """A launcher with a running warden and, by `agent_preload`, a warm parent; checks that no IO directory is left."""
    temp_root = tmp_path / "temp"
    temp_root.mkdir(exist_ok=True)
    flags = {"agent_term_grace": 0.2, "agent_cwd": tmp_path, **flags}
    with trio.fail_after(within_s):
        async with Services.open() as services:
            warden = Warden()
            await services.start(warden.run, name="warden", stop_s=STOP_S)
            config = AgentConfig(agent_command=command, **flags)
            launcher = ProcessAgentLauncher(warden, config, tmp_path / "run", temp_root)

            async def keep_warm(*, task_status):
                await launcher.keep_warm(BASE_URL, task_status=task_status)

            await services.start(keep_warm, name="warm parent")
            yield launcher
    assert list(temp_root.iterdir()) == []


def kept(tmp_path):
    """Names of the IO directories that were kept."""
    sessions = tmp_path / "run" / "sessions"
    return sorted(p.name for p in sessions.iterdir()) if sessions.exists() else []


async def failure(launcher, the_spec):
    """The error of an agent that fails, raised bare."""
    with pytest.raises(AgentExecutionError) as caught:  # noqa: PT012 - the block is what must let it out
        async with launcher.open(the_spec) as agent:
            await agent.wait()
            await agent.read_output()
    return caught.value
