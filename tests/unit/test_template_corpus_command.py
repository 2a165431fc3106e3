"""What a person is told of a template: by the command, at the start of a run, in the docs' table."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from builders_tokens import APPENDING, FORGETFUL, make_tokenizer
from template_families import LLAMA3, TEMPLATES

from relax_trio.cli.main import main
from relax_trio.config.parse import parse_config
from relax_trio.loop.setup import load_codec

ROOT = Path(__file__).parents[2]


def checkpoint(path, template=APPENDING):
    make_tokenizer(template).save_pretrained(path)
    return path


def rows(out):
    """The findings printed: kind → verdict and what follows it."""
    body = out.split("\n\n")[-1].splitlines()
    found = [line.split("  ", 1) for line in body if not line.startswith(" ")]
    return {kind: rest.strip() for kind, rest in found}


def test_a_checkpoint_is_described_with_the_first_differing_bytes(tmp_path, capsys):
    assert main(["template", str(checkpoint(tmp_path, FORGETFUL))]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"Chat template of {tmp_path}\n")
    assert "plain turn  ends with '<|im_end|>', then '\\n'\n" in out
    assert rows(out)["plain"] == "append-only"
    assert rows(out)["reasoning"] == "rewriting    when the next messages come, at byte 62"
    assert r"recorded  'ion one<|im_end|>\n<|im_start|>assistant\n<think>\nthought one\n</think>" in out
    assert r"template  'ion one<|im_end|>\n<|im_start|>assistant\nanswer one<|im_end|>" in out


def test_a_template_that_does_not_parse_is_refused_with_its_line(tmp_path, capsys):
    path = tmp_path / "bad.jinja"
    path.write_text("{% for m in messages %}\n{{ m.role }\n{% endfor %}")
    assert main(["template", str(path)]) == 64
    assert "unexpected '}' (line 2 of the template)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("glm4_5", "calls       is not closed; the next message's tag follows, such as '<|observation|>'"),
        ("harmony", "stops       <|return|> <|call|>"),
        ("harmony", "date        printed; it stays that of the start of the run"),
        ("mistral", "call ids    given as nine letters or digits"),
        ("llama3", "variables   builtin_tools, date_string, tools_in_user_message"),
        ("qwen3_coder", "arguments   given as mappings; what is no object is wrapped in one"),
        ("qwen2_5", "            a mapping is printed as JSON, JSON text as a JSON string"),
        ("deepseek_r1", "system      as it is; a later one as a user message"),
        ("deepseek_r1", "remembers   whether there were turns and tool results before"),
        ("gemma", "calls       not printed"),
    ],
)
def test_a_template_file_is_looked_at_without_its_tokenizer(name, said, capsys):
    assert main(["template", str(TEMPLATES / f"{name}.jinja")]) == 0
    assert said in capsys.readouterr().out.splitlines()


def test_a_template_file_may_be_looked_at_with_a_checkpoints_tokenizer(tmp_path, capsys):
    make_tokenizer(special=LLAMA3.special, marks=(), eos="<|eot_id|>", pad="<|end_of_text|>").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4, 5]}')
    assert main(["template", str(TEMPLATES / "llama3.jinja"), "--tokenizer", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "plain turn  ends with '<|eot_id|>', then ''\n" in out
    assert rows(out)["several tool calls"].startswith("refused")
    assert "one tool call a turn" in rows(out)["several tool calls"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "name a checkpoint directory, a .jinja file or demo"),
        (["--tokenizer", "x"], "name a checkpoint directory, a .jinja file or demo"),
        (["nowhere"], "nowhere is neither a checkpoint directory nor a template file"),
        (["demo", "--tokenizer", "x"], "--tokenizer belongs to a template file"),
        (["TEMPLATE", "--tokenizer", "nowhere"], "checkpoint nowhere is not a directory"),
        (["TEMPLATE", "--tokeniser", "x"], "did you mean --tokenizer?"),
        (["BROKEN"], "a plain conversation cannot be rendered"),
        (["ENDLESS"], "with no special token"),
    ],
)
def test_what_cannot_be_described_is_a_usage_error(argv, said, tmp_path, capsys):
    (tmp_path / "broken.jinja").write_text("{{ broken")
    (tmp_path / "endless.jinja").write_text("{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '\n' }}{% endfor %}")
    files = {
        "TEMPLATE": str(TEMPLATES / "chatml.jinja"),
        "BROKEN": str(tmp_path / "broken.jinja"),
        "ENDLESS": str(tmp_path / "endless.jinja"),
    }
    assert main(["template", *(files.get(word, word) for word in argv)]) == 64
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err


def warnings(path, events):
    load_codec(parse_config(["--hf-checkpoint", str(path)]).config, path)
    return [event.fields["rewrites"] for event in events if event.name == "template.warned"]


def test_the_start_of_a_run_tells_of_a_template_that_rewrites(tmp_path, events):
    assert warnings(checkpoint(tmp_path, FORGETFUL), events) == ["reasoning, reasoning with a tool call"]


def test_the_start_of_a_run_says_nothing_of_a_template_that_appends(tmp_path, events):
    assert warnings(checkpoint(tmp_path), events) == []


def test_a_template_that_rewrites_every_turn_is_told_in_few_words(tmp_path, events):
    swapping = APPENDING.replace(
        "{{- '<|im_end|>\\n' }}\n{%- elif message.role == 'tool'",
        "{{- loop.last ~ '<|im_end|>\\n' }}\n{%- elif message.role == 'tool'",
    )
    assert warnings(checkpoint(tmp_path, swapping), events) == ["every kind of turn"]


def test_the_docs_hold_the_table_as_the_tool_computes_it(capsys):
    spec = importlib.util.spec_from_file_location("template_table", ROOT / "tools/template_table.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.main(["--check"]) == 0, capsys.readouterr().err
    assert tool.NOT_EXACT not in tool.PAGE.read_text(encoding="utf-8")
