"""What users import to test agents, hooks and the runtime under them on a virtual clock. See docs/testing.md."""

from relax_trio.agent.fake import AgentExit, FakeAgent, FakeAgentLauncher
from relax_trio.backend.fake import FakeBackend
from relax_trio.testing.actions import KINDS
from relax_trio.testing.bench import LIMITS, Bench, make_rows
from relax_trio.testing.client import ConnectionBroken, Exchange, FakeClient, make_request, prompt_of, user
from relax_trio.testing.codec import STOP, ByteCodec, byte_codec, prompt_text, turn
from relax_trio.testing.explorer import explore, replay
from relax_trio.testing.rehearsal import Scenario
from relax_trio.testing.report import Report, Run
from relax_trio.testing.sample import make_sample
from relax_trio.testing.schedule import run_virtual, seeded_schedule

__all__ = [
    "KINDS",
    "LIMITS",
    "STOP",
    "AgentExit",
    "Bench",
    "ByteCodec",
    "ConnectionBroken",
    "Exchange",
    "FakeAgent",
    "FakeAgentLauncher",
    "FakeBackend",
    "FakeClient",
    "Report",
    "Run",
    "Scenario",
    "byte_codec",
    "explore",
    "make_request",
    "make_rows",
    "make_sample",
    "prompt_of",
    "prompt_text",
    "replay",
    "run_virtual",
    "seeded_schedule",
    "turn",
    "user",
]
