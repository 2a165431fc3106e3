"""The environment of an agent: what it inherits, what it is given, and what wins."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_trio.agent.base import AgentSpec
from relax_trio.agent.environment import agent_environment
from relax_trio.config.tree import AgentConfig
from relax_trio.data.task import TaskInput
from relax_trio.ids import Credential, GroupId, PlaceId

SPEC = AgentSpec(
    place=PlaceId("G17/2"),
    group=GroupId("G17"),
    credential=Credential("rs-secret"),
    base_url="http://127.0.0.1:8123/agentic_api",
    mode="train",
    task=TaskInput(row=0, source="f:1", prompt="", messages=(), metadata={}),
)
OURS = {
    "RELAX_INPUT_JSON": "/io/session_input.json",
    "RELAX_OUTPUT_JSON": "/io/session_output.json",
    "RELAX_SESSION_IO_DIR": "/io",
    "RELAX_BASE_URL": "http://127.0.0.1:8123/agentic_api",
    "RELAX_SESSION_ID": "rs-secret",
    "RELAX_ROLLOUT_MODE": "train",
    "RELAX_GROUP_ID": "G17",
}
LOOPBACK = "localhost,127.0.0.1,::1"


def build(parent, spec=SPEC, **flags):
    return agent_environment(parent, config=AgentConfig(**flags), spec=spec, io_dir=Path("/io"))


def test_an_empty_parent_gives_the_seven_variables_and_the_loopback():
    assert build({}) == {**OURS, "NO_PROXY": LOOPBACK, "no_proxy": LOOPBACK}


@pytest.mark.parametrize(
    "name",
    [
        "OPENAI_API_KEY",
        "HF_TOKEN",
        "my_secret",
        "DbPassword",
        "PASSWORDS",
        "TOKENIZERS_PARALLELISM",
        "RELAX_X",
        "RELAX_",
    ],
)
def test_secrets_and_reserved_names_are_not_inherited(name):
    assert name not in build({name: "x"})


def test_other_names_are_inherited_as_they_are():
    parent = {"PATH": "/bin", "HOME": "/root", "A": "", "relax_x": "1", "B\udcff": "\udcff"}

    assert parent.items() <= build(parent).items()


def test_pass_lets_exactly_the_named_secrets_through():
    parent = {"HF_TOKEN": "t", "OPENAI_API_KEY": "k", "RELAX_TOKEN": "r"}

    env = build(parent, agent_env_pass=("HF_TOKEN", "RELAX_TOKEN"))

    assert env["HF_TOKEN"] == "t"
    assert {"OPENAI_API_KEY", "RELAX_TOKEN"}.isdisjoint(env)


def test_clear_keeps_a_minimum_and_what_is_passed():
    parent = {"PATH": "/bin", "HOME": "/h", "LANG": "C", "LC_ALL": "C", "TERM": "dumb", "EDITOR": "ed", "MY_KEY": "k"}

    env = build(parent, agent_env_clear=True, agent_env_pass=("MY_KEY",))

    assert env.keys() - OURS.keys() == {"PATH", "HOME", "LANG", "LC_ALL", "TERM", "MY_KEY", "NO_PROXY", "no_proxy"}


def test_loopback_is_added_to_both_spellings_of_no_proxy_once():
    env = build({"no_proxy": "corp, localhost", "NO_PROXY": "other"})

    assert env["NO_PROXY"] == env["no_proxy"] == "corp,localhost,other,127.0.0.1,::1"


def test_a_server_elsewhere_is_not_asked_for_through_a_proxy_either():
    spec = AgentSpec(
        place=SPEC.place,
        group=SPEC.group,
        credential=SPEC.credential,
        base_url="http://10.0.0.5:80/agentic_api",
        mode="eval",
        task=SPEC.task,
    )

    env = build({}, spec)

    assert env["NO_PROXY"] == LOOPBACK + ",10.0.0.5"
    assert env["RELAX_ROLLOUT_MODE"] == "eval"


def test_agent_env_wins_over_the_parent_and_the_seven_win_over_all():
    env = build({"A": "1", "B": "1"}, agent_env={"A": "2", "NO_PROXY": "*", "API_KEY": "k", "RELAX_GROUP_ID": "G1"})

    assert (env["A"], env["B"], env["NO_PROXY"], env["API_KEY"]) == ("2", "1", "*", "k")
    assert env["RELAX_GROUP_ID"] == "G17"


def test_the_credential_is_not_shown_by_the_spec():
    assert "rs-secret" not in repr(SPEC)
