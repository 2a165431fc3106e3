"""The primitives of sync/ on the virtual clock."""

from __future__ import annotations

import pytest
import trio
from trio.testing import assert_checkpoints, assert_no_checkpoints

from relax_trio.sync.barrier import PresenceBarrier
from relax_trio.sync.budget import ActiveBudget
from relax_trio.sync.cleanup import cleanup_scope
from relax_trio.sync.gate import Gate
from relax_trio.sync.services import Services


async def test_a_gate_holds_while_it_is_shut_and_tells_why(autojump_clock):
    gate = Gate(shut="not yet")
    with assert_no_checkpoints():
        assert (gate.is_open, gate.reason) == (False, "not yet")
    with trio.move_on_after(5) as scope:
        await gate.wait_open()
    assert scope.cancelled_caught

    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def flicker():
            await trio.sleep(1)
            with assert_no_checkpoints():
                gate.open()
                gate.shut("again")  # a waiter that was woken is held again
            await trio.sleep(1)
            gate.open()

        await gate.wait_open()

    assert trio.current_time() == 7.0
    with assert_checkpoints():
        await gate.wait_open()


async def test_a_budget_counts_active_time_only(autojump_clock):
    budget = ActiveBudget(10.0)
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def drive():
            await trio.sleep(1000)
            with assert_no_checkpoints():
                budget.resume()
            await trio.sleep(4)
            budget.pause()
            assert budget.remaining_s == 6.0
            await trio.sleep(500)
            budget.resume()
            budget.resume()  # once is enough

        with budget.scope:
            await trio.sleep_forever()

    assert trio.current_time() == 1510.0
    assert budget.is_spent
    assert budget.remaining_s == 0.0


async def test_a_barrier_is_full_only_while_everybody_is_present(autojump_clock):
    barrier = PresenceBarrier(2)
    with assert_no_checkpoints():
        barrier.arrive(0)
        barrier.arrive(0)
        barrier.arrive(1)
        assert (barrier.is_full, barrier.n_present) == (True, 2)
        barrier.withdraw(1)
        assert (barrier.is_full, barrier.n_present) == (False, 1)
        barrier.withdraw(0)
        assert barrier.n_present == 1  # one of two requests of place 0 still lives
        barrier.arrive(1)
    await barrier.wait_full()


async def test_a_cleanup_is_shielded_and_bounded(autojump_clock, events):
    with trio.CancelScope() as scope:
        scope.cancel()
        try:
            await trio.sleep_forever()
        finally:
            with cleanup_scope(3.0, "the thing"):
                await trio.sleep(2)
            with cleanup_scope(3.0, "the other thing"):
                await trio.sleep(20)

    assert trio.current_time() == 5.0
    assert [(e.name, e.fields["what"]) for e in events] == [("cleanup.timed_out", "the other thing")]


@pytest.mark.parametrize("seconds", [0, -1, 31, float("inf")])
def test_a_cleanup_without_a_bound_is_refused(seconds):
    with pytest.raises(ValueError, match="clean-up"), cleanup_scope(seconds, "x"):
        pass


async def test_services_outlive_the_work_and_stop_in_reverse_order(autojump_clock):
    story = []

    def service(name):
        async def run(*, task_status):
            task_status.started(name.upper())
            try:
                await trio.sleep_forever()
            finally:
                with cleanup_scope(2.0, name):
                    await trio.sleep(1)
                story.append((name, trio.current_time()))

        return run

    with trio.move_on_after(5):
        async with Services.open() as services:
            assert await services.start(service("first"), name="first") == "FIRST"
            await services.start(service("second"), name="second")
            try:
                await trio.sleep_forever()
            finally:
                with cleanup_scope(2.0, "work"):
                    await trio.sleep(1)
                story.append(("work", trio.current_time()))

    assert story == [("work", 6.0), ("second", 7.0), ("first", 8.0)]


async def test_a_service_that_fails_ends_the_work(autojump_clock):
    async def failing(*, task_status):
        task_status.started()
        await trio.sleep(3)
        raise RuntimeError("broken")

    with pytest.RaisesGroup(pytest.RaisesExc(RuntimeError, match="broken")):
        async with Services.open() as services:
            await services.start(failing, name="failing")
            await trio.sleep_forever()

    assert trio.current_time() == 3.0


async def test_a_service_that_cannot_start_says_so_bare(autojump_clock):
    async def unable(*, task_status):
        await trio.lowlevel.checkpoint()
        raise OSError("no port")

    with pytest.RaisesGroup(pytest.RaisesExc(OSError, match="no port")):
        async with Services.open() as services:
            with pytest.raises(OSError, match="no port"):
                await services.start(unable, name="unable")
            await services.start(unable, name="unable")
