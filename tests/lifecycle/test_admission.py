"""Admission on the virtual clock: one line, one ledger, what passes, what is counted."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from builders_admission import Line, open_admission, planned, reading, silent, steady, wanted
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_trio.backend.admission import Admission, AdmissionOptions, Reservation
from relax_trio.testing import run_virtual

CEILING = 90
"""Of one server of 100 tokens under the default headroom."""


def counts(admission):
    """The counts since the last call, without zeros."""
    metrics = admission.take_metrics()
    names = ("admit", "bypass_protected", "bypass_degraded", "bypass_aged", "wait", "cancelled")
    found = {name: metrics[f"agentic_kv/admission/{name}"] for name in names}
    return {name: count for name, count in found.items() if count}


# --- the line and the ledger ---------------------------------------------------------------------------------------


async def test_attempts_begin_in_order_as_tokens_come_back(autojump_clock):
    async with open_admission(steady(100)) as admission, trio.open_nursery() as nursery:
        line = Line(admission, nursery)
        for number in range(5):
            line.come(f"a{number}", 40, seconds=10 + number)
            await trio.sleep(1)
        assert (admission.n_reserved, admission.n_waiting, admission.ceiling) == (80, 3, CEILING)
    assert line.begun == {"a0": 0, "a1": 1, "a2": 10, "a3": 12, "a4": 22}
    assert (admission.n_reserved, admission.n_waiting) == (0, 0)


async def test_who_would_fit_does_not_overtake_who_does_not(autojump_clock):
    async with open_admission(steady(100)) as admission, trio.open_nursery() as nursery:
        line = Line(admission, nursery)
        for name, tokens in (("big", 60), ("bigger", 70), ("small", 10)):
            line.come(name, tokens)
            await trio.sleep(1)
    assert line.begun == {"big": 0, "bigger": 10, "small": 10}


async def test_the_ceiling_is_exact(autojump_clock):
    async with open_admission(steady(100)) as admission, trio.open_nursery() as nursery:
        line = Line(admission, nursery)
        line.come("all", CEILING)
        await trio.sleep(1)
        line.come("one", 1)
    assert line.begun == {"all": 0, "one": 10}


async def test_the_ceiling_is_the_sum_over_servers_by_the_headroom(autojump_clock):
    async with open_admission(steady(100, 50), headroom=0.5) as admission:
        assert admission.ceiling == 75


async def test_a_lease_is_prefix_and_what_may_come_by_the_cap(autojump_clock):
    async with open_admission(steady(100), expected_decode_cap=8) as admission:
        async with admission.admit(Reservation(session="s", n_prefix=10, n_new=50)):
            assert admission.n_reserved == 18
        async with admission.admit(Reservation(session="s", n_prefix=10, n_new=5)):
            assert admission.n_reserved == 15
    async with (
        open_admission(steady(100)) as admission,
        admission.admit(Reservation(session="s", n_prefix=10, n_new=50)),
    ):
        assert admission.n_reserved == 60


async def test_a_server_that_is_lost_takes_its_share_of_the_ceiling_along(autojump_clock):
    async def source(capacity):
        for name in ("a", "b"):
            capacity.follow(name)
        while True:
            for name in ("a", "b") if trio.current_time() < 5 else ("a",):
                capacity.read(name, reading(100))
            await trio.sleep(1)
            if trio.current_time() == 5:
                capacity.forget("b")

    async with open_admission(source) as admission, trio.open_nursery() as nursery:
        line = Line(admission, nursery)
        line.come("first", 100, seconds=20)
        await trio.sleep(6)
        assert (admission.ceiling, admission.n_reserved) == (CEILING, 100)
        line.come("second", 1)
    assert line.begun == {"first": 0, "second": 20}, "what runs goes on, nothing is added to it"


async def test_a_new_server_counts_once_it_was_read(autojump_clock):
    async with open_admission(steady(100)) as admission:
        admission.capacity.follow("new")
        assert admission.ceiling == CEILING
        admission.capacity.read("new", reading(100))
        assert admission.ceiling == 2 * CEILING


# --- pressure ------------------------------------------------------------------------------------------------------


async def test_nothing_is_admitted_under_pressure_and_the_reading_that_ends_it_does_it(autojump_clock):
    async with (
        open_admission(planned((0, 0.92), (5, 0.91))) as admission,
        trio.open_nursery() as nursery,
    ):
        line = Line(admission, nursery)
        line.come("a", 1)
    assert line.begun == {"a": 6}, "the threshold itself is pressure; the reading after second 5 comes at 6"


async def test_the_worst_server_makes_the_pressure(autojump_clock):
    async def source(capacity):
        capacity.follow("idle")
        capacity.follow("full")
        while True:
            capacity.read("idle", reading(100, 0.0))
            capacity.read("full", reading(100, 0.95 if trio.current_time() < 3 else 0.5))
            await trio.sleep(2)

    async with open_admission(source) as admission, trio.open_nursery() as nursery:
        line = Line(admission, nursery)
        line.come("a", 1)
    assert line.begun == {"a": 4}


# --- what passes ---------------------------------------------------------------------------------------------------


async def test_who_waited_long_enough_passes_without_a_lease(autojump_clock):
    async with open_admission(steady(100)) as admission, trio.open_nursery() as nursery:
        line = Line(admission, nursery)
        line.come("long", 80, seconds=100)
        await trio.sleep(1)
        line.come("waits", 50, seconds=5)
        await trio.sleep(1)
        line.come("behind", 10)
        await trio.sleep_until(32)
        assert admission.n_reserved == 90, "the long one's and that of the one behind, which fits once it is first"
    assert line.begun == {"long": 0, "waits": 31, "behind": 31}
    assert counts(admission) == {"admit": 2, "bypass_aged": 1, "wait": 2}


async def test_what_no_pool_can_hold_passes_by_its_age(autojump_clock):
    async with open_admission(steady(100), max_wait_s=7) as admission, trio.open_nursery() as nursery:
        line = Line(admission, nursery)
        line.come("huge", 1000, seconds=1)
        line.come("huge too", 1000, seconds=1)
    assert line.begun == {"huge": 7, "huge too": 7}


async def test_nothing_waits_longer_than_the_limit_under_constant_pressure(autojump_clock):
    async with open_admission(steady(100, usage=1.0)) as admission, trio.open_nursery() as nursery:
        line = Line(admission, nursery)
        for number in range(20):
            line.come(f"a{number:02}", 5)
            await trio.sleep(1)
    assert line.begun == {f"a{number:02}": number + 30 for number in range(20)}


async def test_protected_attempts_pass_the_line_and_the_pressure(autojump_clock):
    async with open_admission(steady(100, usage=0.99)) as admission, trio.open_nursery() as nursery:
        line = Line(admission, nursery)
        line.come("waits", 10, seconds=0)
        await trio.sleep(1)
        line.come("protected", 500, is_protected=True)
        await trio.sleep(1)
        assert (admission.n_reserved, admission.n_waiting) == (0, 1)
    assert line.begun == {"protected": 1, "waits": 30}
    assert counts(admission) == {"bypass_protected": 1, "bypass_aged": 1, "wait": 1}


@pytest.mark.parametrize(("scope", "begins_at"), [("train", 1), ("all", 10)])
async def test_evaluation_waits_only_where_the_scope_is_all(autojump_clock, scope, begins_at):
    async with open_admission(steady(100), scope=scope) as admission, trio.open_nursery() as nursery:
        line = Line(admission, nursery)
        line.come("train", CEILING)
        await trio.sleep(1)
        line.come("eval", 10, is_train=False)
    assert line.begun == {"train": 0, "eval": begins_at}
    assert counts(admission) == ({"admit": 1} if scope == "train" else {"admit": 2, "wait": 1})


async def test_everything_passes_before_the_first_reading(autojump_clock):
    async with open_admission(silent) as admission, trio.open_nursery() as nursery:
        line = Line(admission, nursery)
        line.come("a", 1000)
        await trio.sleep(1)
        assert (admission.ceiling, admission.n_reserved) == (None, 0)
    assert line.begun == {"a": 0}
    assert counts(admission) == {"bypass_degraded": 1}


async def test_stale_readings_let_pass_who_waits_and_who_comes(autojump_clock, events):
    async with open_admission(steady(100, until_s=4)) as admission, trio.open_nursery() as nursery:
        line = Line(admission, nursery)
        line.come("long", 80, seconds=100)
        await trio.sleep(1)
        line.come("waits", 50)
        line.come("waits too", 50)
        await trio.sleep_until(12)
        line.come("late", 50)
    assert line.begun == {"long": 0, "waits": 10, "waits too": 10, "late": 12}, "6 s after the reading at 4"
    assert counts(admission) == {"admit": 1, "bypass_degraded": 3, "wait": 2}
    told = [(event.name, event.fields) for event in events if event.name.startswith("pools.")]
    assert told == [("pools.learned", {"tokens": 100}), ("pools.lost", {"waiting": 2, "reserved": 80})]


async def test_one_server_that_is_not_heard_of_makes_all_pass(autojump_clock):
    """Nobody knows what it holds; a line kept by half of the readings would be a line of guesses."""

    async def source(capacity):
        capacity.follow("dumb")
        await steady(100)(capacity)

    async with open_admission(source) as admission:
        assert admission.ceiling == CEILING
        await trio.sleep_until(6)
        assert admission.ceiling is None
        admission.capacity.forget("dumb")
        assert admission.ceiling == CEILING


async def test_readings_that_come_again_bring_the_line_back(autojump_clock):
    async def source(capacity):
        capacity.follow("server")
        capacity.read("server", reading(100))
        await trio.sleep(20)
        capacity.read("server", reading(100))
        await trio.sleep_forever()

    async with open_admission(source) as admission, trio.open_nursery() as nursery:
        line = Line(admission, nursery)
        await trio.sleep_until(19)
        line.come("unknown", 500, seconds=50)
        await trio.sleep_until(21)
        line.come("a", 80, seconds=2)
        await trio.sleep(1)
        line.come("b", 80)
    assert line.begun == {"unknown": 19, "a": 21, "b": 23}


# --- leaving the line ----------------------------------------------------------------------------------------------


async def test_a_cancelled_wait_leaves_the_line_and_who_is_behind_moves_up_at_once(autojump_clock):
    async with open_admission(steady(100)) as admission, trio.open_nursery() as nursery:
        line = Line(admission, nursery)
        for name, tokens in (("runs", 60), ("big", 90), ("small", 30)):
            line.come(name, tokens)
            await trio.sleep(1)
        line.scopes["big"].cancel()
    assert line.begun == {"runs": 0, "small": 3}
    assert counts(admission) == {"admit": 2, "wait": 2, "cancelled": 1}


async def test_a_cancelled_attempt_returns_its_lease_at_once(autojump_clock):
    async with open_admission(steady(100)) as admission, trio.open_nursery() as nursery:
        line = Line(admission, nursery)
        line.come("runs", CEILING)
        await trio.sleep(1)
        line.come("waits", CEILING)
        await trio.sleep(1)
        line.scopes["runs"].cancel()
    assert line.begun == {"runs": 0, "waits": 2}
    assert admission.n_reserved == 0


@pytest.mark.parametrize("granted_first", [True, False])
async def test_a_lease_that_is_given_to_somebody_cancelled_in_the_same_moment_goes_on(autojump_clock, granted_first):
    async with open_admission(steady(100)) as admission, trio.open_nursery() as nursery:
        line = Line(admission, nursery)
        async with admission.admit(wanted(CEILING)):
            for name in ("cancelled", "next"):
                line.come(name, CEILING)
                await trio.testing.wait_all_tasks_blocked()
            if not granted_first:
                line.scopes["cancelled"].cancel()
        line.scopes["cancelled"].cancel()  # no checkpoint since the lease was handed over
        await trio.sleep(1)
        assert admission.n_reserved == CEILING
    assert line.begun == ({"cancelled": 0, "next": 0} if granted_first else {"next": 0})
    assert admission.n_reserved == 0


async def test_a_recalled_session_leaves_the_line_and_may_not_begin(autojump_clock):
    async with open_admission(steady(100)) as admission, trio.open_nursery() as nursery:
        line = Line(admission, nursery)
        for name, tokens in (("runs", 60), ("parked", 90), ("small", 30)):
            line.come(name, tokens)
            await trio.sleep(1)
        admission.recall("parked")
        admission.recall("runs")  # has begun: nothing happens
    assert (line.begun, line.recalled) == ({"runs": 0, "small": 3}, {"parked": 3})
    assert counts(admission) == {"admit": 2, "wait": 2, "cancelled": 1}


# --- metrics -------------------------------------------------------------------------------------------------------


async def test_every_metric_of_a_busy_minute(autojump_clock):
    async with (
        open_admission(planned((0, 0.5), (3, 0.7), (20, 0.0)), max_wait_s=15) as admission,
        trio.open_nursery() as nursery,
    ):
        line = Line(admission, nursery)
        line.come("a", 45, seconds=10)
        await trio.sleep(1)
        line.come("b", 60, seconds=10)  # waits 9 s, for a
        line.come("p", 60, seconds=2, is_protected=True)
        await trio.sleep(1)
        line.come("c", 60, seconds=40)  # waits 15 s, passes by its age
        line.come("e", 60, seconds=40, is_train=False)
        await trio.sleep(1)
        line.come("d", 60)
        await trio.sleep_until(5)
        line.scopes["d"].cancel()
        await trio.sleep_until(19)
        first = admission.take_metrics()
        second_begins = admission.take_metrics()
    usages = [0.5, 0.5, *[0.7] * 8]  # at 0, 2, …, 18
    assert first == {
        "agentic_kv/admission/admit": 2,
        "agentic_kv/admission/bypass": 2,
        "agentic_kv/admission/bypass_protected": 1,
        "agentic_kv/admission/bypass_degraded": 0,
        "agentic_kv/admission/bypass_aged": 1,
        "agentic_kv/admission/wait": 3,
        "agentic_kv/admission/waiting": 3,
        "agentic_kv/admission/cancelled": 1,
        "agentic_kv/admission/wait_seconds_mean": pytest.approx((9 + 15) / 2),
        "agentic_kv/budget/ceiling": CEILING,
        "agentic_kv/budget/reserved": 60,
        "agentic_kv/budget/reserved_utilization": pytest.approx(60 / CEILING),
        "agentic_kv/budget/kv_token_usage_mean": pytest.approx(sum(usages) / len(usages)),
        "agentic_kv/budget/kv_token_usage_max": 0.7,
        "agentic_kv/budget/degraded": 0,
    }
    assert {name: value for name, value in second_begins.items() if value} == {
        "agentic_kv/budget/ceiling": CEILING,
        "agentic_kv/budget/reserved": 60,
        "agentic_kv/budget/reserved_utilization": pytest.approx(60 / CEILING),
    }, "counts begin anew, what is held is still held"


async def test_unknown_pools_are_told_as_degraded_and_have_no_numbers(autojump_clock):
    async with open_admission(silent) as admission:
        metrics = admission.take_metrics()
    assert metrics["agentic_kv/budget/degraded"] == 1
    names = ("ceiling", "kv_token_usage_mean", "kv_token_usage_max")
    assert [metrics[f"agentic_kv/budget/{name}"] for name in names] == [None] * 3


# --- any schedule --------------------------------------------------------------------------------------------------

arrivals = st.lists(
    st.fixed_dictionaries(
        {
            "at": st.integers(0, 40),
            "tokens": st.integers(1, 120),
            "seconds": st.integers(0, 30),
            "is_protected": st.sampled_from([False, False, False, True]),
            "cancel_after": st.none() | st.integers(0, 40),
            "recall_after": st.none() | st.integers(0, 40),
        }
    ),
    min_size=1,
    max_size=25,
)
pools = st.lists(st.tuples(st.integers(1, 5), st.sampled_from([0, 50, 100, 200]), st.sampled_from([0.0, 0.5, 0.95])))
"""(seconds until the next reading, tokens or 0 for none, usage)"""


@settings(deadline=None, max_examples=60)
@given(arrivals=arrivals, pools=pools, seed=st.integers(0, 1000))
def test_whatever_comes_no_lease_is_lost_no_ceiling_passed_and_nobody_overtaken(arrivals, pools, seed):
    begun, found = [], []

    async def source(capacity):
        capacity.follow("server")
        for seconds, total, usage in pools:
            if total:
                capacity.read("server", reading(total, usage))
            await trio.sleep(seconds)
        await trio.sleep_forever()

    async def attempt(admission, number, plan):
        await trio.sleep_until(plan["at"])
        name = str(number)
        reservation = wanted(plan["tokens"], name, is_protected=plan["is_protected"])
        deadline = float("inf") if plan["cancel_after"] is None else plan["at"] + plan["cancel_after"]
        with trio.CancelScope(deadline=deadline):
            async with trio.open_nursery() as nursery:
                if plan["recall_after"] is not None:
                    nursery.start_soon(recall, admission, name, plan["recall_after"])
                async with admission.admit(reservation) as may_begin:
                    if may_begin:
                        begun.append((number, trio.current_time() - plan["at"]))
                        await trio.sleep(plan["seconds"])
                nursery.cancel_scope.cancel()

    async def recall(admission, name, seconds):
        await trio.sleep(seconds)
        admission.recall(name)

    async def main():
        admission = Admission(AdmissionOptions(max_wait_s=15), source)
        settle = admission._decide

        def noting(ticket, decision):
            settle(ticket, decision)
            found.append((ticket, decision, admission.n_reserved, admission.ceiling))

        admission._decide = noting
        async with trio.open_nursery() as nursery:
            await nursery.start(admission.run)
            async with trio.open_nursery() as attempts:
                for number, plan in enumerate(arrivals):
                    attempts.start_soon(attempt, admission, number, plan)
            metrics = admission.take_metrics()
            assert (admission.n_reserved, admission.n_waiting) == (0, 0)
            nursery.cancel_scope.cancel()
        for ticket, decision, reserved, ceiling in found:
            if decision == "admit":
                assert reserved + ticket.n_tokens <= ceiling, "the lease is noted right after the decision"
            assert (decision == "degraded") <= (ceiling is None)
        in_order = [int(t.session) for t, decision, _, _ in found if decision in ("admit", "degraded")]
        arrived = sorted(in_order, key=lambda number: order.index(number))
        assert in_order == arrived, "of those who passed as the first of the line, nobody overtook another"
        assert all(waited <= 15 + 1e-9 for _, waited in begun)
        decided = {name: sum(d == name for _, d, _, _ in found) for name in ("admit", "protected", "degraded", "aged")}
        assert metrics["agentic_kv/admission/admit"] == decided["admit"]
        assert metrics["agentic_kv/admission/bypass"] == sum(decided.values()) - decided["admit"]
        told = sum(decided.values()) + metrics["agentic_kv/admission/cancelled"]
        assert told == n_entered[0], "everybody who came is counted once"

    order, n_entered = [], [0]
    arrive = Admission._arrive

    def noting_arrival(self, reservation):
        n_entered[0] += 1
        order.append(int(reservation.session))
        return arrive(self, reservation)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Admission, "_arrive", noting_arrival)
        run_virtual(main, seed=seed)
