"""`relax-trio parse`: what a person and a program are shown."""

from __future__ import annotations

import io
import json
import types

import pytest
from builders_parsers import TOOLS

from relax_trio.cli.main import main
from relax_trio.tokens.parsers import registry

TEXT = (
    "<think>\nHm.\n</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "fly", "arguments": 5}\n</tool_call>\n<tool_call>\n{"name": "lo'
)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setattr(registry, "sglang_installed", lambda: False)


@pytest.fixture
def files(tmp_path):
    (tmp_path / "turn.txt").write_text(TEXT)
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    return types.SimpleNamespace(turn=str(tmp_path / "turn.txt"), tools=str(tmp_path / "tools.json"), path=tmp_path)


def test_a_person_sees_reasoning_content_calls_flags_and_who_answered(files, capsys):
    flags = ["--tool-call-parser", "qwen25", "--reasoning-parser", "qwen3", "--tools", files.tools]
    assert main(["parse", *flags, files.turn]) == 0
    assert capsys.readouterr().out == (
        "reasoning\n  Hm.\n"
        'content\n  Let me see.\n  \n  <tool_call>\n  {"name": "lo\n'
        "calls\n  fly 5\n"
        "flags\n"
        "  unparsed_tool_call: something begins like a call and is none; it stayed in the content\n"
        "  unknown_tool: a call names a tool that the request does not have\n"
        "  scalar_arguments: the arguments of a call are no JSON object\n"
        "reasoning-parser qwen3: relax_trio\n"
        "tool-call-parser qwen25: relax_trio\n"
    )


@pytest.mark.parametrize("place", ["first", "last", "after a switch", "stdin", "-"])
def test_a_program_gets_json_of_a_file_or_of_standard_input(place, files, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", types.SimpleNamespace(buffer=io.BytesIO(TEXT.encode())))
    parser = ["--tool-call-parser", "qwen25"]
    words = {
        "first": [files.turn, *parser, "--json"],
        "last": ["--json", *parser, files.turn],
        "after a switch": [*parser, "--json", files.turn],
        "stdin": ["--json", *parser],
        "-": [*parser, "--json", "-"],
    }
    assert main(["parse", *words[place]]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "reasoning": None,
        "content": '<think>\nHm.\n</think>\n\nLet me see.\n\n<tool_call>\n{"name": "lo',
        "tool_calls": [{"name": "fly", "arguments": "5"}],
        "flags": ["unparsed_tool_call", "scalar_arguments"],
        "reasoning_parser": None,
        "tool_call_parser": {"name": "qwen25", "implementation": "relax_trio"},
    }


def test_the_parsers_of_a_runs_configuration_are_the_default(files, capsys):
    (files.path / "run.yaml").write_text("agentic_tool_call_parser: hermes\nagentic_reasoning_parser: qwen3\n")
    assert main(["parse", files.turn, "--config", str(files.path / "run.yaml")]) == 0
    assert "tool-call-parser hermes: relax_trio" in capsys.readouterr().out


def test_a_prompt_that_opens_the_reasoning_is_told(files, capsys):
    (files.path / "turn.txt").write_text("Hm.</think>Yes.")
    flags = ["--reasoning-parser", "qwen3", "--json"]
    for opened, wanted in (([], None), (["--prompt-opens-reasoning"], "Hm.")):
        assert main(["parse", files.turn, *flags, *opened]) == 0
        assert json.loads(capsys.readouterr().out)["reasoning"] == wanted


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name a parser: --tool-call-parser, --reasoning-parser or both"),
        (["--tool-call-parser", "qwen26"], "--tool-call-parser qwen26: no such tool-call parser"),
        (["--agentic-tool-call-parser", "qwen26"], "--agentic-tool-call-parser qwen26: no such tool-call parser"),
        (["nowhere.txt", "--reasoning-parser", "qwen3"], "nowhere.txt cannot be read"),
        (["a.txt", "--reasoning-parser", "qwen3", "b.txt"], "belongs to no flag"),
        (["--tool-call-parser", "qwen25", "--tools", "nowhere.json"], "--tools nowhere.json cannot be read"),
    ],
)
def test_what_is_wrong_is_said_and_exits_64(words, said, capsys):
    assert main(["parse", *words]) == 64
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("tools", "said"), [("{}", "must be a list of function tools"), ("[{}]", "tools[0].function")])
def test_tools_that_are_none_are_refused(tools, said, files, capsys):
    (files.path / "tools.json").write_text(tools)
    assert main(["parse", files.turn, "--tool-call-parser", "qwen25", "--tools", files.tools]) == 64
    assert said in capsys.readouterr().err
