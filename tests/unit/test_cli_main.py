"""The command itself: exit statuses, messages, help, and what it costs to ask for it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import types

import pytest

import relax_trio
from relax_trio.cli import main as main_module
from relax_trio.cli.main import COMMANDS, main
from relax_trio.errors import ConfigError, EngineFault, RunFailed, TrainError

WRITTEN = [name for name in COMMANDS if importlib.util.find_spec(f"relax_trio.cli.{name}_cmd")]


def python(*words):
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def command(monkeypatch):
    """Make `relax-trio train` do what the test says, without the real one."""

    def install(run, **contents):
        module = types.ModuleType("relax_trio.cli.train_cmd")
        module.run = run
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, "relax_trio.cli.train_cmd", module)

    monkeypatch.setattr(sys, "path", list(sys.path))
    return install


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in COMMANDS)


def test_no_command_is_a_usage_error_that_shows_help(capsys):
    assert main([]) == 64
    assert "usage: relax-trio" in capsys.readouterr().err


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"relax-trio {relax_trio.__version__}\n"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["trian"], "unknown command trian; did you mean train?"),
        (["xyzzy"], "unknown command xyzzy; see relax-trio --help\n"),
        (["--lr", "1"], "name a command before --lr: demo, train"),
        (["config", "--rolout-batch-size", "1"], "did you mean --rollout-batch-size?"),
    ],
)
def test_usage_errors_exit_64_with_one_message_on_stderr(argv, said, capsys):
    assert main(argv) == 64
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("relax-trio: ")
    assert said in err


def test_config_prints_the_tree_and_the_reference(capsys):
    assert main(["config", "--lr", "0.5"]) == 0
    assert "--lr 0.5" in capsys.readouterr().out
    assert main(["config", "--reference"]) == 0
    assert capsys.readouterr().out.startswith("# Flags\n")


def test_a_command_gets_its_words_and_gives_its_status(command):
    seen = []
    command(lambda argv: seen.append(list(argv)) or 143)
    assert main(["train", "--lr", "1"]) == 143
    assert seen == [["--lr", "1"]]


def raising(error):
    def run(argv):
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (ConfigError("bad flag"), 64, "relax-trio: bad flag\n"),
        (RunFailed("no Group left"), 1, "relax-trio: no Group left\n"),
        (KeyboardInterrupt(), 130, ""),
        (
            ExceptionGroup("", [TrainError("a"), ExceptionGroup("", [RunFailed("b")])]),
            1,
            "relax-trio: a\nrelax-trio: b\n",
        ),
        (ExceptionGroup("", [ConfigError("a")]), 64, "relax-trio: a\n"),
        (BaseExceptionGroup("", [KeyboardInterrupt(), RunFailed("b")]), 130, ""),
    ],
)
def test_failures_become_statuses_and_messages(command, capsys, error, status, said):
    command(raising(error))
    assert main(["train"]) == status
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    "error",
    [
        EngineFault("a bug"),
        ZeroDivisionError(),
        BaseExceptionGroup("", [KeyboardInterrupt(), EngineFault("a bug")]),
        ExceptionGroup("", [RunFailed("x"), ZeroDivisionError()]),
    ],
)
def test_a_bug_keeps_its_traceback(command, error):
    command(raising(error))
    with pytest.raises(type(error)) as caught:
        main(["train"])
    assert caught.value is error


def test_help_of_a_command_runs_nothing(command, capsys):
    command(raising(AssertionError("ran")))
    assert main(["train", "--lr", "1", "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: relax-trio train ")
    assert COMMANDS["train"] in out


def test_hooks_can_be_imported_from_the_working_directory(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command(lambda argv: 0)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert main(["train"]) == 0
    assert sys.path[-1] == str(tmp_path)
    before = list(sys.path)
    main(["train"])
    assert sys.path == before


@pytest.mark.parametrize("name", WRITTEN)
def test_help_of_a_command_comes_without_torch(name):
    script = (
        "import sys; from relax_trio.cli.main import main; status = main([sys.argv[1], '--help']); "
        "heavy = {'torch', 'transformers', 'matplotlib', 'pyarrow'} & set(sys.modules); "
        "sys.exit(f'imports {heavy}' if heavy else status)"
    )
    done = python("-c", script, name)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--agent-timeout X" in done.stdout


def test_help_is_cheap():
    """CPU time of the process, so that a busy machine does not matter; the goal is 0.3 s, measured at 0.05 s."""
    script = "import time; from relax_trio.cli.main import main; main(['--help']); print(time.process_time())"
    seconds = float(python("-c", script).stdout.split()[-1])
    assert seconds < 1.0


def test_python_m_runs_the_same_command():
    done = python("-m", "relax_trio", "--version")
    assert (done.returncode, done.stdout) == (0, f"relax-trio {relax_trio.__version__}\n")
    assert python("-m", "relax_trio", "trian").returncode == 64
    assert main_module.EXIT_USAGE == os.EX_USAGE
