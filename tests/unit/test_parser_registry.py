"""Parsers by name, with and without SGLang; a stand-in for SGLang shows what is done about its answers."""

from __future__ import annotations

import copy
import re
import types

import pytest
from builders_parsers import TOOLS

from relax_trio.errors import ConfigError
from relax_trio.tokens.parsers import registry
from relax_trio.tokens.parsers.base import split_calls
from relax_trio.tokens.parsers.sglang_load import Sglang


class BaseReasoningFormatDetector:
    """Splits at two tags; opened anywhere."""

    think_start_token, think_end_token = "<think>", "</think>"

    def __init__(self, *, force):
        self.force_reasoning = bool(force)
        self.tool_start_token = "<tool_call>"

    def detect_and_parse(self, text):
        body = text.removeprefix("<think>")
        if self.tool_start_token and self.tool_start_token in body:
            raise LookupError("a call ends the reasoning")
        reasoning, _, content = body.partition("</think>")
        return types.SimpleNamespace(reasoning_text=reasoning, normal_text=content)


class LosingDetector(BaseReasoningFormatDetector):
    def detect_and_parse(self, text):
        return types.SimpleNamespace(reasoning_text="", normal_text=text[:3])


class Qwen25Detector:
    """Reads what the real one reads, and like it drops other text, unknown tools, and empty arguments."""

    tool_start = "<tool_call>\n"

    def __init__(self):
        self.bot_token = self.tool_start

    def has_tool_call(self, text):
        return self.bot_token in text

    def detect_and_parse(self, text, tools):
        calls = [
            types.SimpleNamespace(name=name, parameters=arguments.strip())
            for name, arguments in re.findall(
                r'<tool_call>\n\{"name": "(\w+)", "arguments": (.*)\}\n</tool_call>', text
            )
            if name in tools
        ]
        return types.SimpleNamespace(calls=calls, normal_text="")


class OtherDetector(Qwen25Detector):
    pass


class BrokenDetector(Qwen25Detector):
    def detect_and_parse(self, text, tools):
        raise TypeError("not foreseen")


class NeedyDetector(Qwen25Detector):
    def __init__(self):
        raise ValueError("a file is required")


CALLS = {"qwen25": Qwen25Detector, "other": OtherDetector, "broken": BrokenDetector, "needy": NeedyDetector}
REASONING = {"qwen3": BaseReasoningFormatDetector, "losing": LosingDetector}


def make_tool(tool):
    if tool["function"].get("parameters") == "odd":
        raise TypeError("no schema")
    return tool["function"]["name"]


@pytest.fixture
def sglang(monkeypatch):
    fake = Sglang(
        version="9",
        call_detectors=CALLS,
        reasoning_detectors=REASONING,
        call_parser=lambda tools, name: types.SimpleNamespace(detector=CALLS[name]()),
        reasoning_parser=lambda name, *, stream_reasoning, force_reasoning=None, request=None: types.SimpleNamespace(
            detector=REASONING[name](force=force_reasoning)
        ),
        make_tool=make_tool,
    )
    monkeypatch.setattr(registry, "sglang_installed", lambda: True)
    monkeypatch.setattr(registry, "load_sglang", lambda: fake)
    return fake


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.setattr(registry, "sglang_installed", lambda: False)


def call(name, arguments="{}"):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def calls_of(split):
    return [(call.name, call.arguments) for call in split.calls]


@pytest.mark.usefixtures("alone")
def test_without_sglang_the_parsers_of_this_package_answer():
    assert registry.reasoning_parser(None) is None
    assert registry.tool_call_parser(None) is None
    assert registry.reasoning_parser("qwen3").implementation == "relax_trio"
    assert registry.tool_call_parser("llama3").implementation == "relax_trio"


@pytest.mark.usefixtures("alone")
def test_an_unknown_name_is_refused_with_the_nearest_and_all_known_ones():
    with pytest.raises(ConfigError) as caught:
        registry.tool_call_parser("qwen3-coder")
    assert str(caught.value) == (
        "--agentic-tool-call-parser qwen3-coder: no such tool-call parser (known are hermes, llama3, pythonic, qwen, "
        "qwen25, qwen3_coder; SGLang, which knows more, is not installed); did you mean qwen3_coder?"
    )
    with pytest.raises(ConfigError, match=r"^--reasoning-parser x: .*\(known are deepseek-r1, qwen3, qwen3-thinking; "):
        registry.reasoning_parser("x", flag="--reasoning-parser")


@pytest.mark.usefixtures("sglang")
def test_with_sglang_its_classes_answer_and_its_names_are_known():
    assert registry.tool_call_parser("qwen25").implementation == "SGLang 9 (Qwen25Detector)"
    assert registry.tool_call_parser("other").implementation == "SGLang 9 (OtherDetector)"
    assert registry.tool_call_parser("llama3").implementation == "relax_trio"
    assert registry.reasoning_parser("qwen3").implementation == "SGLang 9 (BaseReasoningFormatDetector)"
    assert registry.reasoning_parser("deepseek-r1").implementation == "relax_trio"
    with pytest.raises(ConfigError, match=r"known are broken, hermes, .*qwen3_coder\); did you mean other\?$"):
        registry.tool_call_parser("othe")
    with pytest.raises(
        ConfigError, match="--agentic-tool-call-parser needy: SGLang's parser cannot be made: a file is"
    ):
        registry.tool_call_parser("needy")


def test_an_sglang_that_cannot_be_imported_is_said_and_replaced(monkeypatch):
    def fail():
        raise ImportError("no kernels")

    monkeypatch.setattr(registry, "sglang_installed", lambda: True)
    monkeypatch.setattr(registry, "load_sglang", fail)
    with pytest.warns(RuntimeWarning, match=r"cannot be imported: no kernels; relax_trio's own parsers are used"):
        assert registry.tool_call_parser("qwen25").implementation == "relax_trio"
    with pytest.warns(RuntimeWarning), pytest.raises(ConfigError, match="is installed but cannot be imported"):
        registry.tool_call_parser("glm45")


@pytest.mark.usefixtures("sglang")
@pytest.mark.parametrize("name", ["qwen25", "other"])
def test_what_sglang_drops_is_put_back(name):
    parser = registry.tool_call_parser(name)
    text = f"a\n{call('look')}\nb\n{call('fly', '{1}')}\n{call('fly')}\nc"
    split = split_calls(parser, text, TOOLS)
    assert calls_of(split) == [("look", "{}"), ("fly", "{}")]
    assert split.content.split() == ["a", "b", *call("fly", "{1}").split(), "c"]
    assert split.n_unparsed == 1


@pytest.mark.usefixtures("sglang")
def test_arguments_that_are_no_object_stay_as_the_model_wrote_them():
    split = split_calls(registry.tool_call_parser("qwen25"), call("look", "0"), TOOLS)
    assert calls_of(split) == [("look", "0")]


@pytest.mark.usefixtures("sglang")
def test_a_parser_that_raises_leaves_the_text_as_content():
    split = split_calls(registry.tool_call_parser("broken"), call("look"), TOOLS)
    assert (split.content, split.calls, split.n_unparsed) == (call("look"), (), 1)


@pytest.mark.usefixtures("sglang")
def test_a_schema_that_sglang_refuses_does_not_hide_its_tool():
    tools = [{"type": "function", "function": {"name": "odd", "parameters": "odd"}}]
    before = copy.deepcopy(tools)
    assert calls_of(split_calls(registry.tool_call_parser("other"), call("odd"), tools)) == [("odd", "{}")]
    assert tools == before


@pytest.mark.usefixtures("sglang")
@pytest.mark.parametrize(
    ("name", "text", "opened", "reasoning", "content"),
    [
        ("qwen3", "<think>a</think>b", False, "a", "b"),
        ("qwen3", " <think> a </think> b ", False, "a", "b"),
        ("qwen3", "a</think>b", True, "a", "b"),
        ("qwen3", "say <think>", False, None, "say <think>"),
        ("qwen3", "<think>a <tool_call>b", False, "a <tool_call>b", ""),
        ("losing", "abcdef", True, None, "abcdef"),
    ],
)
def test_reasoning_stands_at_the_beginning_and_no_call_ends_it(name, text, opened, reasoning, content):
    split = registry.reasoning_parser(name).split(text, opened=opened, chat_template_kwargs={})
    assert (split.reasoning, split.content) == (reasoning, content)
