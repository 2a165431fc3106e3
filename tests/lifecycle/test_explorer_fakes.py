"""What a bench is made of: fakes that can be made to fail, a client whose connection may break, the seeded schedule."""

from __future__ import annotations

import pytest
import trio
from scenarios import ask

from relax_trio.backend.base import Attempt, SamplingParams
from relax_trio.config.tree import RolloutConfig
from relax_trio.errors import AgentExecutionError, BackendRejected, BackendUnavailable, EngineFault
from relax_trio.ids import GroupId
from relax_trio.runtime.group import Group
from relax_trio.runtime.leases import LeaseDesk
from relax_trio.testing import (
    LIMITS,
    AgentExit,
    Bench,
    ConnectionBroken,
    FakeBackend,
    make_request,
    make_rows,
    prompt_of,
    prompt_text,
    run_virtual,
    seeded_schedule,
    turn,
    user,
)
from relax_trio.testing.codec import ByteCodec

SMALL = RolloutConfig(rollout_batch_size=1, n_samples_per_prompt=1)


def attempt(rid, session="G0/0-0"):
    prefix = ByteCodec().encode_opening([user("hi")], (), {})
    return Attempt(
        rid=rid,
        token_ids=prefix,
        sampling=SamplingParams(max_new_tokens=64, stop_token_ids=(0,)),
        session_key=session,
        response_start=len(prefix),
    )


# --- the fake backend ----------------------------------------------------------------------------------------------


async def test_one_attempt_fails_where_it_stands_and_the_others_go_on(autojump_clock):
    backend = FakeBackend([turn("four")], tokens_per_s=1.0)
    async with trio.open_nursery() as nursery:
        await nursery.start(backend.run)

        @nursery.start_soon
        async def doomed():
            with pytest.raises(BackendRejected, match="no"):
                await backend.generate(attempt("a"))
            assert trio.current_time() == 2.0

        @nursery.start_soon
        async def fine():
            await backend.generate(attempt("b", session="G1/0-0"))
            assert trio.current_time() == 5.0
            nursery.cancel_scope.cancel()

        await trio.sleep(2)
        assert sorted(backend.running) == ["a", "b"]
        backend.fail("a", BackendRejected("no"))
        backend.fail("a", BackendUnavailable("too late"))
        backend.fail("nobody", BackendRejected("no"))


async def test_a_backend_that_dies_ends_its_attempts_and_says_why(autojump_clock):
    backend = FakeBackend([turn("four")], tokens_per_s=1.0)
    with pytest.RaisesGroup(pytest.RaisesExc(EngineFault, match="out of memory")):
        async with trio.open_nursery() as nursery:
            await nursery.start(backend.run)

            @nursery.start_soon
            async def caller():
                with pytest.raises(BackendUnavailable):
                    await backend.generate(attempt("a"))

            await trio.sleep(1)
            backend.die("out of memory")
            backend.die("again")
    assert not backend.is_serving


async def test_a_backend_remembers_a_session_until_it_is_closed(autojump_clock):
    backend = FakeBackend([turn("four")], tokens_per_s=1.0)
    async with trio.open_nursery() as nursery:
        await nursery.start(backend.run)
        with trio.move_on_after(1):
            await backend.generate(attempt("a"))
        assert backend.remembered == {"G0/0-0"}
        await backend.close_session("G0/0-0")
        assert backend.remembered == frozenset()
        nursery.cancel_scope.cancel()


# --- fake agents ---------------------------------------------------------------------------------------------------


async def test_a_killed_agent_fails_its_session_with_its_exit_code(autojump_clock, events):
    async def agent(agent):
        await agent.client.chat(agent, prompt_of(agent))
        await trio.sleep_forever()

    bench = Bench()
    async with bench.engine(agent), bench.open_work(SMALL) as work, trio.open_nursery() as nursery:
        nursery.start_soon(work.run_step, 0)
        await trio.sleep(10)
        (resident,) = work.residents.all
        bench.launcher.kill("G0/0", 7)
        bench.launcher.kill("nobody", 7)
        await resident.ended.wait()
        assert trio.current_time() == 10.0
        nursery.cancel_scope.cancel()
    assert [(end.place, end.exit_code) for end in bench.launcher.ended][:1] == [("G0/0", 7)]
    assert AgentExecutionError.__name__ in next(e.fields["error"] for e in events if e.name == "session.failed")


async def test_an_agent_that_has_exited_cannot_be_killed(autojump_clock):
    """Its output stands, while it waits for its end."""

    bench = Bench()
    async with bench.engine(ask, end_s=5.0), bench.open_work(SMALL) as work, trio.open_nursery() as nursery:

        @nursery.start_soon
        async def late_killer():
            await trio.sleep(4)
            assert bench.launcher.live == ["G0/0"]
            bench.launcher.kill("G0/0")

        assert [group.id for group in (await work.run_step(0)).groups] == ["G0"]


@pytest.mark.parametrize("bug", [False, True])
async def test_an_exit_in_a_nursery_of_the_agent_is_an_exit_unless_there_is_a_bug_beside_it(autojump_clock, bug):
    async def agent(agent):
        async with trio.open_nursery() as outer, trio.open_nursery() as inner:

            @outer.start_soon
            async def fail():
                try:
                    await trio.sleep_forever()
                finally:
                    if bug:
                        raise ZeroDivisionError

            @inner.start_soon
            async def leave():
                await trio.sleep(1)
                raise AgentExit(3)

    bench = Bench()
    group = Group(
        id=GroupId("G0"),
        number=0,
        task=make_rows(1)[0],
        n_places=1,
        mode="train",
        limits=LIMITS,
        shared=None,
        leases=LeaseDesk(wanted=1),
    )
    bugs = 0
    try:
        async with bench.engine(agent) as shared:
            group.shared = shared
            outcome = await group.run()
            assert "exit code 3" in str(outcome.failure.error)
    except* ZeroDivisionError:
        bugs = 1
    except* AgentExit:
        assert bug, "it comes out beside the bug only"
    assert bugs == bug


async def test_an_exit_in_a_nursery_at_the_moment_of_the_agents_end_is_no_bug(autojump_clock):
    """The group then holds an exit and a cancellation: what the explorer found in `parallel_requests`."""

    async def agent(agent):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            await trio.sleep(1)
            bench.work.residents.all[0].drop("at the same moment")
            raise AgentExit(3)

    bench = Bench()
    async with bench.engine(agent), bench.open_work(SMALL) as work, trio.open_nursery() as nursery:
        nursery.start_soon(work.run_step, 0)
        await trio.sleep(1.5)
        nursery.cancel_scope.cancel()
    assert bench.launcher.ended[0].at_s == 1.0


async def test_the_next_launch_fails_before_those_that_were_planned(autojump_clock, events):
    bench = Bench()
    async with bench.engine(ask, launch_errors=[None, "planned"]), bench.open_work(SMALL) as work:
        bench.launcher.fail_next("at once")
        await work.run_step(0)
    errors = [e.fields["error"].rpartition(": ")[2] for e in events if e.name == "session.failed"]
    assert (errors, bench.launcher.n_opened) == (["at once"], 2)


# --- the client ----------------------------------------------------------------------------------------------------


async def test_a_client_that_comes_back_within_the_grace_joins_its_request(autojump_clock):
    async def agent(agent):
        exchange = agent.client.send(agent, make_request(prompt_of(agent)))
        await trio.sleep(1)
        exchange.hang_up()
        with pytest.raises(ConnectionBroken):
            await exchange.reply()
        await trio.sleep(1)
        assert (await agent.client.send(agent, make_request(prompt_of(agent), retry=True)).reply()).finish == "stop"
        agent.write_output({"reward": 1.0})

    bench = Bench()
    async with bench.engine(agent), bench.open_work(SMALL) as work:
        result = await work.run_step(0)
    assert result.seconds == 3.0, "the turn went on"
    assert len(bench.backend.attempts) == 1


async def test_a_client_that_stays_away_loses_its_request(autojump_clock):
    async def agent(agent):
        exchange = agent.client.send(agent, make_request(prompt_of(agent)))
        await trio.sleep(1)
        exchange.hang_up(for_good=True)
        await trio.sleep(1)
        await agent.client.chat(agent, user("anew"))
        agent.write_output({"reward": 1.0})

    bench = Bench()
    async with bench.engine(agent), bench.open_work(SMALL) as work:
        result = await work.run_step(0)
    assert result.seconds == 5.0
    assert [prompt_text(a.token_ids) for a in bench.backend.attempts] == [
        "<user>q0<assistant>",
        "<user>anew<assistant>",
    ]
    assert [len(group.samples) for group in result.groups] == [1], "the lost turn is no context"


async def test_chat_comes_back_by_itself_as_an_sdk_does(autojump_clock):
    async def agent(agent):
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def cut():
                await trio.sleep(1)
                bench.client.live[0].hang_up()

            await ask(agent)

    bench = Bench()
    async with bench.engine(agent), bench.open_work(SMALL) as work:
        assert (await work.run_step(0)).seconds == 3.0
    assert not bench.client.live


async def test_a_killed_agents_request_ends_with_its_session(autojump_clock):
    bench = Bench()
    async with bench.engine(ask), bench.open_work(SMALL) as work, trio.open_nursery() as nursery:

        @nursery.start_soon
        async def killer():
            await trio.sleep(1)
            bench.launcher.kill("G0/0")

        result = await work.run_step(0)
    assert (result.n_failed_sessions, result.seconds) == (1, 4.0)


async def test_an_error_reply_ends_the_agent(autojump_clock):
    async def agent(agent):
        with pytest.raises(AgentExit):
            await agent.client.chat(agent, user("x" * 2000))
        assert "maximum context length" in agent.log
        await ask(agent)

    bench = Bench()
    async with bench.engine(agent), bench.open_work(SMALL) as work:
        assert len((await work.run_step(0)).groups) == 1


# --- the bench -----------------------------------------------------------------------------------------------------


async def test_a_stopped_bench_refuses_requests_and_leaves_the_work(autojump_clock, events):
    bench, went_on = Bench(), False
    async with bench.engine(ask):
        async with bench.open_work(SMALL) as work, trio.open_nursery() as nursery:
            nursery.start_soon(work.run_step, 0)
            await trio.sleep(1)
            bench.stop()
            await trio.sleep(1)
        assert bench.is_work_closed
        assert (work.rows.n_taken, work.rows.n_given_back) == (1, 1)
        went_on = trio.current_time() == 1.0
    assert went_on, "the engine outlives the work"
    assert bench.sessions.closing


async def test_a_bench_has_one_work_inside_an_engine(autojump_clock):
    bench = Bench()
    with pytest.raises(AssertionError, match="needs an engine"):
        async with bench.open_work(SMALL):
            pass
    async with bench.engine(ask):
        async with bench.open_work(SMALL):
            pass
        with pytest.raises(AssertionError, match="has one work"):
            async with bench.open_work(SMALL):
                pass


# --- the schedule --------------------------------------------------------------------------------------------------


async def interleaved():
    order = []
    async with trio.open_nursery() as nursery:
        for name in "abcdefgh":

            async def task(name=name):
                await trio.sleep(1)
                order.append(name)

            nursery.start_soon(task)
    return "".join(order), trio.current_time()


def test_a_schedule_is_a_function_of_its_seed():
    orders = {seed: run_virtual(interleaved, seed=seed)[0] for seed in range(8)}

    assert len(set(orders.values())) > 4
    assert {seed: run_virtual(interleaved, seed=seed)[0] for seed in range(8)} == orders
    assert run_virtual(interleaved)[1] == 1.0


def test_a_seeded_block_leaves_the_scheduler_as_it_was():
    with seeded_schedule("outer"):
        first = trio.run(interleaved, clock=trio.testing.MockClock(autojump_threshold=0))[0]
    with seeded_schedule("outer"):
        run_virtual(interleaved, seed="inner")
        assert trio.run(interleaved, clock=trio.testing.MockClock(autojump_threshold=0))[0] == first


def test_a_worker_thread_on_the_virtual_clock_is_an_error():
    async def main():
        await trio.to_thread.run_sync(print)

    with pytest.raises(AssertionError, match="a worker thread on the virtual clock"):
        run_virtual(main)
    assert trio.run(trio.to_thread.run_sync, str) == ""


def test_a_trio_that_cannot_be_seeded_is_refused(monkeypatch):
    monkeypatch.delattr("trio._core._run._r")
    with pytest.raises(Exception, match="can't be seeded"), seeded_schedule(1):
        pass


# --- found by the explorer -----------------------------------------------------------------------------------------


async def test_a_group_in_line_whose_place_has_just_left_is_passed_over(autojump_clock):
    """Its own task takes it out of the line a moment later; a lease given meanwhile would break the barrier."""
    desk = LeaseDesk()
    leaving, dropped, staying = groups = [
        Group(
            id=GroupId(f"G{number}"),
            number=number,
            task=make_rows(1)[0],
            n_places=1,
            mode="train",
            limits=LIMITS,
            shared=None,
            leases=desk,
        )
        for number in range(3)
    ]
    for group in groups:
        group.barrier.arrive(0)
    with desk.in_line(leaving), desk.in_line(dropped), desk.in_line(staying):
        assert desk.n_ready == 3
        leaving.barrier.withdraw(0)
        dropped.drop("a test")
        assert desk.n_ready == 1
        desk.want(3)
        assert [group.lease.is_set() for group in groups] == [False, False, True]
        leaving.barrier.arrive(0)
        desk.want(1)
        assert leaving.lease.is_set(), "it is back before its task ran"
