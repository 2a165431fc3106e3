"""KV pools of servers, read off the metrics that real ones answered with."""

from __future__ import annotations

import math

import pytest
import trio
from builders_admission import MeteredServer, metrics_text, open_admission, wanted
from hypothesis import given
from hypothesis import strategies as st
from sglang_wire import answer_of

from relax_trio.backend.admission import Admission, AdmissionOptions
from relax_trio.backend.capacity import Reading
from relax_trio.backend.sglang.readings import follow_servers, read_gauges
from relax_trio.errors import BackendProtocolError, BackendUnavailable

LABELS = 'engine_type="unified",model_name="{m}",tp_rank="0"'


def gauges(*lines):
    return "\n".join(f"sglang:{line}" for line in lines) + "\n"


# --- the text ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "used"), [("0.5.15.post1", 12), ("0.5.23", 13)])
def test_the_recorded_metrics_of_real_servers_are_read(version, used):
    status, body = answer_of(version, "14_metrics")

    assert status == 200
    assert read_gauges(body.decode(), "server") == Reading(n_total_tokens=16384, n_used_tokens=used, token_usage=0.0)


def test_of_several_ranks_the_largest_counts_and_never_the_sum():
    text = gauges(
        'max_total_num_tokens{dp_rank="0",tp_rank="0"} 1000.0',
        'max_total_num_tokens{dp_rank="0",tp_rank="1"} 1000.0',
        'max_total_num_tokens{dp_rank="1",tp_rank="0"} 1200.0',
        'num_used_tokens{dp_rank="0"} 700.0',
        'num_used_tokens{dp_rank="1"} 100.0',
        'token_usage{dp_rank="0"} 0.7',
        'token_usage{dp_rank="1"} 0.1',
    )

    assert read_gauges(text, "server") == Reading(n_total_tokens=1200, n_used_tokens=700, token_usage=0.7)


def test_gauges_with_odd_labels_none_timestamps_and_neighbours_of_like_names_are_told_apart():
    text = gauges(
        'full_token_usage{tp_rank="0"} 0.99',
        "max_total_num_tokens 500 1700000000000",
        r'num_used_tokens{model_name="a \"b\" } c",tp_rank="0"} 5e1',
        "token_usage_other 0.8",
        'token_usage {tp_rank="0"} NaN',
        'token_usage{tp_rank="1"} 0.1',
        "# HELP sglang:token_usage The token usage.",
    )

    assert read_gauges(text, "server") == Reading(n_total_tokens=500, n_used_tokens=50, token_usage=0.1)


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (["token_usage 0.5", "num_used_tokens 3"], "no sglang:max_total_num_tokens in its metrics"),
        (["token_usage NaN", "num_used_tokens 3", "max_total_num_tokens 9"], "no sglang:token_usage in"),
        (["token_usage much", "num_used_tokens 3", "max_total_num_tokens 9"], "'much', which is no number"),
        (["token_usage 0", "num_used_tokens 0", "max_total_num_tokens 0"], "max_total_num_tokens is 0"),
    ],
)
def test_a_gauge_that_is_missing_or_senseless_is_named(lines, told):
    with pytest.raises(BackendProtocolError, match="server 3: ") as caught:
        read_gauges(gauges(*lines), "server 3")
    assert told in str(caught.value)


@given(
    st.lists(st.tuples(st.integers(1, 10**9), st.integers(0, 10**9), st.floats(0, 2)), min_size=1, max_size=5),
    st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=60),
)
def test_any_ranks_between_any_other_lines_are_read(ranks, noise):
    lines = []
    for rank, (total, used, usage) in enumerate(ranks):
        label = LABELS.replace("{m}", noise.replace("\\", r"\\").replace('"', r"\""))
        lines += [f'max_total_num_tokens{{{label},dp_rank="{rank}"}} {float(total)}', f"num_used_tokens {used}"]
        lines += [f"token_usage{{}} {usage!r}", f"other{{{noise}}} 7"]

    totals, useds, usages = zip(*ranks, strict=True)
    assert read_gauges(gauges(*lines), "s") == Reading(
        n_total_tokens=max(totals), n_used_tokens=max(useds), token_usage=max(usages)
    )


# --- at intervals --------------------------------------------------------------------------------------------------


class Fleet:
    """Servers that say what a plan says at the time; notes when they are asked."""

    def __init__(self):
        self.servers = []
        self.asked = []

    def add(self, name, total, plan=lambda at: 0.0):
        async def metrics():
            self.asked.append((name, trio.current_time()))
            await trio.lowlevel.checkpoint()
            usage = plan(trio.current_time())
            if isinstance(usage, Exception):
                raise usage
            if usage == math.inf:
                await trio.sleep_forever()
            return metrics_text(total, int(total * usage), usage)

        server = MeteredServer(name, metrics)
        self.servers.append(server)
        return server

    def lose(self, server):
        self.servers.remove(server)
        server.gone.set()

    async def source(self, capacity):
        await follow_servers(lambda: self.servers, capacity)


async def test_every_server_is_read_at_once_and_then_every_two_seconds(autojump_clock):
    fleet = Fleet()
    fleet.add("a", 1000)
    async with open_admission(fleet.source) as admission:
        fleet.add("b", 500)
        await trio.sleep(5)
        assert sorted(fleet.asked) == [("a", 0), ("a", 2), ("a", 4), ("b", 2), ("b", 4)]
        assert admission.ceiling == 1350


async def test_a_lost_server_leaves_at_once_and_is_asked_no_more(autojump_clock):
    fleet = Fleet()
    fleet.add("a", 1000)
    lost = fleet.add("b", 500, lambda at: 0.95)
    async with open_admission(fleet.source) as admission:
        assert (admission.ceiling, admission.capacity.snapshot.pressure) == (1350, 0.95)
        await trio.sleep(1)
        fleet.lose(lost)
        await trio.testing.wait_all_tasks_blocked()
        assert (admission.ceiling, admission.capacity.snapshot.pressure) == (900, 0.0)
        await trio.sleep(9)
        fleet.add("b", 300)  # started again
        await trio.sleep(4)
        assert admission.ceiling == 1170
    assert all(at == 0 or at >= 10 for name, at in fleet.asked if name == "b")


async def test_a_server_that_hangs_or_fails_goes_stale_and_is_told_once(autojump_clock, events):
    def plan(at):
        if at < 3:
            return 0.5
        return math.inf if at < 9 else BackendUnavailable("connection refused") if at < 15 else 0.5

    fleet = Fleet()
    fleet.add("a", 1000, plan)
    async with open_admission(fleet.source) as admission:
        for second, ceiling in ((1, 900), (7.9, 900), (8, None), (15, None), (17, 900)):
            await trio.sleep_until(second)
            await trio.testing.wait_all_tasks_blocked()
            assert admission.ceiling == ceiling, second
    told = [(event.name, event.fields) for event in events if event.name in ("server.unread", "pools.lost")]
    assert told == [
        ("server.unread", {"server": "a", "error": "no answer within 2 s"}),
        ("pools.lost", {"waiting": 0, "reserved": 0}),
    ]
    assert [at for _, at in fleet.asked] == list(range(0, 18, 2)), "a call that hangs is given up for the next"


async def test_no_server_is_no_capacity(autojump_clock):
    admission = Admission(AdmissionOptions(), Fleet().source)
    async with trio.open_nursery() as nursery:
        await nursery.start(admission.run)
        await trio.sleep(100)
        assert admission.ceiling is None
        async with admission.admit(wanted(10)) as may_begin:
            assert may_begin
        nursery.cancel_scope.cancel()
