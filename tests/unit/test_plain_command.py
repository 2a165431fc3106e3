"""Which commands a warm parent can run, and as which words."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from relax_trio.config.check_command import command_problems
from relax_trio.config.parse import parse_config
from relax_trio.config.plain_command import python_command


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("python agent.py", ["python", "agent.py"]),
        (" python3.12  agent.py\t--x=1 a,b \n", ["python3.12", "agent.py", "--x=1", "a,b"]),
        ("/opt/venv/bin/python3 -m pkg.agent -m x", ["/opt/venv/bin/python3", "-m", "pkg.agent", "-m", "x"]),
        ("python3.13t ./a-b_c.py", ["python3.13t", "./a-b_c.py"]),
        ("pypy3 dir/", ["pypy3", "dir/"]),
        ("python agent.py 'a $b' \"c d\" e'f'\"g\" ''", ["python", "agent.py", "a $b", "c d", "efg", ""]),
        ("python agent.py A=b ok! ] x^y 50% @f", ["python", "agent.py", "A=b", "ok!", "]", "x^y", "50%", "@f"]),
        ("python 'my agent.py'", ["python", "my agent.py"]),
    ],
)
def test_a_plain_python_command_becomes_its_words(command, words):
    assert python_command(command) == words


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("", "it is empty"),
        ("python", "python has no FILE"),
        ("python ''", "python has no FILE"),
        ("python -m", "-m has no MODULE"),
        ("python -u agent.py", "-u is an option of Python's"),
        ("python -c 'print(1)'", "-c is an option"),
        ("python -magent", "-magent is an option"),
        ("./agent.py", "./agent.py is no Python"),
        ("uv run agent.py", "uv is no Python"),
        ("exec python agent.py", "exec is no Python"),
        ("X=1 python agent.py", "X=1 is shell syntax; --agent-env sets a variable"),
        ("cd sub && python agent.py", "'&& python agent.py' is shell syntax"),
        ("python agent.py | tee log", "'| tee log' is shell syntax"),
        ("python agent.py > log", "'> log' is shell syntax"),
        ("python agent.py; true", "'; true' is shell syntax"),
        ("python agent.py &", "'&' is shell syntax"),
        ("python agent.py\npython agent.py", r"'\\npython agent.py' is shell syntax"),
        ("python $HOME/agent.py", r"'\$HOME/agent.py' is shell syntax"),
        ('python "$HOME/agent.py"', "is shell syntax"),
        ("python `which agent`", "is shell syntax"),
        ("python ~/agent.py", "'~/agent.py' is shell syntax"),
        ("python *.py", r"'\*.py' is shell syntax"),
        ("python agent.py {a,b}", "is shell syntax"),
        ("python agent.py # say it", "'# say it' is shell syntax"),
        (r"python a\ b.py", "is shell syntax"),
        ("python 'open", "is shell syntax"),
        ("(python agent.py)", "is shell syntax"),
    ],
)
def test_what_needs_a_shell_or_is_no_python_is_refused(command, said):
    with pytest.raises(ValueError, match=said):
        python_command(command)


@given(st.lists(st.text(st.characters(exclude_characters="\0\r", exclude_categories=("Cs",)), max_size=6), max_size=4))
@example(["a'b", ""])
def test_words_quoted_for_a_shell_are_read_back(words):
    assert python_command(shlex.join(["python", "agent.py", *words])) == ["python", "agent.py", *words]


@pytest.fixture
def problems(tmp_path):
    (tmp_path / "agent.py").write_text("")

    def check(command, *flags):
        words = ["--agent-command", command, "--agent-cwd", str(tmp_path), *flags]
        return command_problems(parse_config(words).config.agent)

    return check


def test_a_command_that_cannot_be_forked_is_refused_only_with_preload(problems):
    preload = ("--agent-preload", "openai,httpx")
    assert problems("python3 agent.py") == problems("python3 agent.py", *preload) == []
    assert problems("true | cat") == []
    (problem,) = problems("true | cat", *preload)
    assert problem.startswith("--agent-preload needs --agent-command to be PYTHON FILE|-m MODULE ARGS without shell")
    assert "'| cat' is shell syntax" in problem
    (problem,) = problems("true | cat", *preload, "--agent-login-shell")
    assert "shell syntax" in problem


def test_modules_are_given_between_commas_or_as_words():
    for words in (["a.b,c"], ["a.b", "c"]):
        assert parse_config(["--agent-preload", *words]).config.agent.preload_modules == ("a.b", "c")
    assert parse_config([]).config.agent.preload_modules == ()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--agent-preload", "a,,b"], "must be module names with commas between them"),
        (["--agent-preload", "a-b"], "must be module names"),
        (["--agent-log-bytes", "1000"], "must be 65536 or greater"),
    ],
)
def test_values_that_make_no_sense_are_refused(words, said):
    with pytest.raises(Exception, match=said):
        parse_config(words)
