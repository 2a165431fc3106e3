"""The run log, the console, progress bars and the run directory."""

from __future__ import annotations

import io
import re
from datetime import datetime

import pytest
import trio

from relax_trio.errors import ConfigError
from relax_trio.events import Event, emit
from relax_trio.observe.log import ConsoleSink, FileSink, event_line, install_run_log
from relax_trio.observe.progress import step_progress
from relax_trio.observe.rundir import make_run_dir


class Terminal(io.StringIO):
    def isatty(self):
        return True


NOON = datetime.fromisoformat("2025-01-02T12:34:56.789+00:00")


def test_every_event_is_one_plain_line_with_its_time(tmp_path):
    with install_run_log(tmp_path, console=io.StringIO()):
        emit("group.leased", group="G1")
        emit("session.failed", place="G1/0", error="exit 3\nlast \x1b[31mwords\x1b[0m")
    emit("after.ended")

    lines = (tmp_path / "run.log").read_text().splitlines()
    assert [re.sub(r"^\S+T\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d ", "", line) for line in lines] == [
        "group.leased group=G1",
        r"session.failed place=G1/0 error='exit 3\nlast \x1b[31mwords\x1b[0m'",
    ]


def test_escape_codes_are_written_out_even_where_nothing_is_quoted():
    assert event_line(Event("a.b", 0.0, {"error": "\x1b[31mred"})) == r"a.b error=\x1b[31mred"


def test_accounting_events_appear_under_the_documented_marker(tmp_path):
    console = Terminal()
    with install_run_log(tmp_path, console=console):
        emit("accounting_start", rollout=0, groups=8, sessions=64)
        emit("idle_heartbeat", rollout=0, scored=3, prepared=1)
        emit("accounting_end", rollout=0, scored=8, seconds=1.25)

    log = (tmp_path / "run.log").read_text()
    for line in (
        "AGENTIC ROLLOUT event=accounting_start rollout=0 groups=8 sessions=64",
        "AGENTIC ROLLOUT event=idle_heartbeat rollout=0 scored=3 prepared=1",
        "AGENTIC ROLLOUT event=accounting_end rollout=0 scored=8 seconds=1.25",
    ):
        assert f" {line}\n" in log
    assert "\x1b" not in log
    assert "\x1b[1mAGENTIC ROLLOUT event=accounting_end rollout=0" in console.getvalue()


@pytest.mark.parametrize("verb", ["started", "waiting", "admitted", "died", "unreachable"])
def test_the_console_tells_what_becomes_of_servers(verb):
    plain = io.StringIO()
    ConsoleSink(plain, now=lambda: NOON)(Event(f"server.{verb}", 0.0, {"server": "0"}))
    ConsoleSink(plain, now=lambda: NOON)(Event("server.updated", 0.0, {"server": "0"}))
    assert plain.getvalue() == f"12:34:56 server.{verb} server=0\n"


def test_the_console_tells_what_a_person_wants_to_see_and_colours_terminals_only():
    plain, terminal, everything = io.StringIO(), Terminal(), io.StringIO()
    sinks = [
        ConsoleSink(plain, now=lambda: NOON),
        ConsoleSink(terminal, now=lambda: NOON),
        ConsoleSink(everything, now=lambda: NOON, verbose=True),
    ]
    for event in (Event("group.leased", 0.0, {"group": "G1"}), Event("group.dropped", 0.0, {"group": "G1"})):
        for sink in sinks:
            sink(event)

    assert plain.getvalue() == "12:34:56 group.dropped group=G1\n"
    assert everything.getvalue() == "12:34:56 group.leased group=G1\n12:34:56 group.dropped group=G1\n"
    assert "\x1b[31mgroup.dropped\x1b[0m group=G1" in terminal.getvalue()
    assert "leased" not in terminal.getvalue()


def test_a_resumed_run_appends_to_its_log(tmp_path):
    for _ in range(2):
        with install_run_log(tmp_path, console=io.StringIO()):
            emit("run.started")

    assert len((tmp_path / "run.log").read_text().splitlines()) == 2


def test_a_log_that_cannot_be_written_is_told_once_and_stops_nothing():
    class Full(io.StringIO):
        name = "run.log"

        def write(self, text):
            raise OSError(28, "No space left on device")

    told = []
    sink = FileSink(Full(), on_failure=told.append)
    for _ in range(3):
        sink(Event("run.started", 0.0, {}))

    assert [(event.name, event.fields["file"]) for event in told] == [("log.failed", "run.log")]


def test_a_console_whose_reader_left_falls_silent():
    class Gone(io.StringIO):
        n_writes = 0

        def write(self, text):
            self.n_writes += 1
            raise BrokenPipeError

    stream = Gone()
    sink = ConsoleSink(stream)
    for _ in range(3):
        sink(Event("run.started", 0.0, {}))

    assert stream.n_writes == 1


def test_a_directory_that_cannot_be_written_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"run\.log cannot be opened"), install_run_log(tmp_path / "missing"):
        pass


async def test_events_of_worker_threads_are_logged_whole(tmp_path):
    with install_run_log(tmp_path, console=io.StringIO()):
        async with trio.open_nursery() as nursery:
            for n in range(8):
                nursery.start_soon(trio.to_thread.run_sync, lambda n=n: [emit("x.y", n=n) for _ in range(50)])

    lines = (tmp_path / "run.log").read_text().splitlines()
    assert len(lines) == 400
    assert all(re.search(r" x\.y n=\d$", line) for line in lines)


def test_progress_without_a_terminal_is_plain_lines_at_intervals():
    now = [0.0]
    out = io.StringIO()
    with step_progress(3, 16, stream=out, interval_s=10, clock=lambda: now[0]) as bar:
        for second in range(25):
            now[0] = second
            bar.update(finished=second, scored=second // 8, prepared=1)

    assert out.getvalue().splitlines() == [
        "step 3: 10/16 sessions, scored=1, prepared=1",
        "step 3: 20/20 sessions, scored=2, prepared=1",
        "step 3: 24/24 sessions, scored=3, prepared=1",
    ]


def test_progress_on_a_terminal_is_a_bar_with_both_counts_and_no_thread():
    import threading

    before = threading.active_count()
    out = Terminal()
    with step_progress(3, 16, stream=out) as bar:
        bar.update(finished=2, scored=1, prepared=4)
        bar.update(finished=16, scored=2)
        assert threading.active_count() == before

    last = out.getvalue().rpartition("\r")[2]
    assert "step 3: 100%" in last
    assert "16/16" in last
    assert "scored=2, prepared=4" in last


def test_a_line_of_the_log_does_not_tear_the_bar():
    out = Terminal()
    with step_progress(0, 4, stream=out) as bar:
        bar.update(finished=1)
        ConsoleSink(out)(Event("group.dropped", 0.0, {"group": "G1"}))

    line = next(line for line in out.getvalue().split("\n") if "group.dropped" in line)
    assert line.rpartition("\r")[2].startswith("\x1b[2m")


def test_a_run_directory_of_its_own_for_every_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    paths = [make_run_dir(None, now=NOON) for _ in range(3)]

    assert [str(path.relative_to(tmp_path)) for path in paths] == [
        "runs/20250102-123456",
        "runs/20250102-123456-2",
        "runs/20250102-123456-3",
    ]
    assert all(path.is_dir() for path in paths)


def test_a_given_directory_is_made_or_taken_when_empty(tmp_path):
    for _ in range(2):
        assert make_run_dir(tmp_path / "a" / "b") == tmp_path / "a" / "b"


def test_a_directory_with_another_run_is_refused_unless_it_is_resumed(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")

    with pytest.raises(ConfigError, match=r"--output-dir .* is not empty; .* --load"):
        make_run_dir(tmp_path)
    assert make_run_dir(tmp_path, resume=True) == tmp_path


def test_an_output_dir_that_cannot_be_one_is_named(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match="is a file"):
        make_run_dir(tmp_path / "file")
    with pytest.raises(ConfigError, match="cannot be made"):
        make_run_dir(tmp_path / "file" / "below")
