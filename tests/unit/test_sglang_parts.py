"""Parts of the SGLang backend without a server: routing, stop strings over legs, snapshots, flags, GPUs, workers."""

from __future__ import annotations

import base64
import json
import pickle
import re
from array import array
from collections import Counter

import pytest
import torch
import trio
from builders_backend import make_model, save_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from sglang_router_wire import recorded_body, worker_at

from relax_trio.backend.base import WeightSource
from relax_trio.backend.lanes import Lanes
from relax_trio.backend.sglang.fleet import Fleet, Server
from relax_trio.backend.sglang.health import watch_health
from relax_trio.backend.sglang.snapshots import Snapshots
from relax_trio.backend.sglang.stops import cut_at_stop
from relax_trio.backend.sglang.transfer import buckets, serialize
from relax_trio.backend.sglang.wire import ServerInfo
from relax_trio.backend.sglang.workers import read_workers
from relax_trio.config.backend_tree import BackendConfig
from relax_trio.config.check_backend import backend_problems, backend_warnings
from relax_trio.config.parse import parse_config
from relax_trio.errors import BackendProtocolError, BackendUnavailable, ConfigError, WeightSyncError
from relax_trio.loop.servers import share_out

# --- lanes ------------------------------------------------------------------------------------------------------


async def test_no_more_requests_run_at_once_than_there_are_lanes_and_cancelled_ones_leave_theirs_free():
    at_once, most, n_served = 0, 0, 0

    async def serve(stream):
        nonlocal at_once, most, n_served
        while await stream.receive_some():
            at_once += 1
            most = max(most, at_once)
            await trio.sleep(0.02)
            at_once -= 1
            n_served += 1
            await stream.send_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")

    async def quiet(stream):
        try:
            await serve(stream)
        except trio.BrokenResourceError:
            pass

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, quiet, 0)
        lanes = Lanes(f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}", 3)
        with trio.move_on_after(0.01):
            async with trio.open_nursery() as callers:
                for _ in range(40):
                    callers.start_soon(lanes.request, "GET", "/")
        assert lanes.n_busy == 0
        with trio.fail_after(5):
            async with trio.open_nursery() as callers:
                for _ in range(12):
                    callers.start_soon(lanes.request, "GET", "/")
        await lanes.aclose()
        nursery.cancel_scope.cancel(reason="done")
    assert most <= 6  # three of them were cancelled, which the server does not see
    assert n_served >= 12


async def test_nobody_there_is_unavailable():
    lanes = Lanes("http://127.0.0.1:9", 1)
    with pytest.raises(BackendUnavailable, match=r"GET http://127\.0\.0\.1:9/x"):
        await lanes.request("GET", "/x")
    await lanes.aclose()


# --- routing ----------------------------------------------------------------------------------------------------


class Client:
    def __init__(self, url):
        self.url = url


def make_server(name):
    info = ServerInfo(version="v", max_context_len=10, max_total_tokens=10)
    return Server(name=name, client=Client(name), info=info, has_spans=True)


async def test_a_session_moves_only_when_its_server_comes_or_goes():
    fleet = Fleet("session")
    servers = [make_server(f"s{i}") for i in range(4)]
    for server in servers:
        fleet.admit(server)
    keys = [f"G{i}/0-0" for i in range(400)]
    before = {key: await fleet.choose(key) for key in keys}
    assert min(Counter(server.name for server in before.values()).values()) > 60
    fleet.lose(servers[2], "test")
    after = {key: await fleet.choose(key) for key in keys}
    assert all(after[key] is before[key] for key in keys if before[key] is not servers[2])
    fleet.admit(servers[2])
    assert {key: await fleet.choose(key) for key in keys} == before


async def test_who_waits_for_a_server_gets_the_next_one_or_hears_that_none_will_come(autojump_clock):
    fleet = Fleet()
    async with trio.open_nursery() as nursery:

        async def choose():
            assert (await fleet.choose("s")).name == "late"

        nursery.start_soon(choose)
        await trio.sleep(5)
        fleet.admit(make_server("late"))
    fleet.lose(fleet.servers[0], "gone")
    fleet.close("no server is left")
    with pytest.raises(BackendUnavailable, match="no server is left"):
        await fleet.choose("s")


async def test_a_doubted_server_gets_nothing_until_it_is_asked_at_once_and_trusted_or_lost(autojump_clock):
    fleet, answers = Fleet(), iter([(0.5, True), (2.0, False)])
    server = make_server("s")

    async def is_alive(timeout_s, *, paused):
        seconds, alive = next(answers)
        await trio.sleep(seconds)
        return alive

    server.client.is_alive = is_alive
    fleet.admit(server)
    async with trio.open_nursery() as nursery:

        async def keep():
            fleet.lose(server, await watch_health(server, fleet, 400.0))

        nursery.start_soon(keep)
        await trio.sleep(10)
        fleet.doubt(server)
        assert await fleet.choose("s") is server
        assert trio.current_time() == 10.5
        fleet.doubt(server)
        await server.gone.wait()
        assert trio.current_time() == 12.5
        fleet.close("no server is left")
        with pytest.raises(BackendUnavailable):
            await fleet.choose("s")


# --- stop strings -----------------------------------------------------------------------------------------------


def decode(ids):
    return "".join(map(chr, ids))


def chars(text):
    return array("i", map(ord, text))


@given(st.text("abx", max_size=12), st.text("abx", max_size=12), st.sampled_from(["ab", "aab", "xbx", "abab"]))
def test_a_stop_string_over_two_legs_is_found_where_one_decoding_finds_it(earlier, new, stop):
    found = cut_at_stop(decode, chars(earlier), chars(new), (stop,))

    ends = [
        at + len(stop)
        for at in range(len(earlier) + len(new))
        if (earlier + new).startswith(stop, at) and at < len(earlier) < at + len(stop)
    ]
    assert found == ((ends[0] - len(earlier), stop) if ends else None)


# --- snapshots --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    return make_model("qwen3")


@pytest.fixture
def snapshots(model, tmp_path):
    checkpoint = save_checkpoint(model, tmp_path / "checkpoint")
    (checkpoint / "tokenizer.json").write_text("{}")
    return Snapshots(tmp_path / "weights", checkpoint, "0")


async def test_a_snapshot_is_a_checkpoint_with_other_weights(snapshots, model):
    source = WeightSource(tensors={name: p.detach() + 1 for name, p in model.named_parameters()})

    await snapshots.publish("1", source)

    assert snapshots.version == "1"
    assert (snapshots.path / "tokenizer.json").read_text() == "{}"
    loaded = type(model).from_pretrained(snapshots.path).state_dict()
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded[name], parameter + 1)


async def test_what_the_run_has_not_written_stays_wherever_it_lies(model, tmp_path):
    checkpoint = save_checkpoint(model, tmp_path / "weights" / "weights-mine")
    snapshots = Snapshots(tmp_path / "weights", checkpoint, "0")
    source = WeightSource(tensors=dict(model.named_parameters()))
    await snapshots.publish("1", source)
    await snapshots.publish("2", source)
    assert sorted(path.name for path in checkpoint.parent.iterdir()) == ["weights-2", "weights-mine"]
    snapshots.remove()
    assert list(checkpoint.parent.iterdir()) == [checkpoint]


async def test_a_snapshot_stays_while_somebody_starts_from_it(snapshots, model):
    source = WeightSource(tensors=dict(model.named_parameters()))
    await snapshots.publish("1", source)
    with snapshots.held() as path:
        await snapshots.publish("2", source)
        assert path.is_dir()
    assert not path.exists()
    assert snapshots.path.is_dir()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.norm.weight"), "lack model.norm.weight"),
        (lambda t: t.update(extra=torch.ones(1)), "have unknown extra"),
        (lambda t: t.update({"model.norm.weight": torch.ones(3)}), "have misshapen model.norm.weight"),
    ],
)
async def test_weights_that_do_not_fit_are_named(snapshots, model, change, words):
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    change(tensors)
    with pytest.raises(WeightSyncError, match=words):
        await snapshots.publish("1", WeightSource(tensors=tensors))
    assert snapshots.version == "0"


def test_tensors_travel_inside_the_message_and_not_by_reference():
    bucket = [("a", torch.arange(6).reshape(2, 3)), ("b", torch.ones(2, dtype=torch.bfloat16)[::2])]

    raw = base64.b64decode(serialize(bucket))

    assert b"rebuild_storage" not in raw
    for (name, tensor), (name_back, back) in zip(bucket, pickle.loads(raw), strict=True):
        assert name == name_back
        assert torch.equal(tensor, back)


def test_buckets_hold_everything_once_and_none_is_empty():
    tensors = {f"t{i}": torch.zeros(i) for i in range(1, 9)}

    split = list(buckets(tensors, size=40))

    assert [name for bucket in split for name, _ in bucket] == list(tensors)
    assert all(split)
    assert len(split) > 2


# --- router -----------------------------------------------------------------------------------------------------


def workers_of(name):
    return list(read_workers(recorded_body(name)[1], "/workers of r").values())


def test_the_workers_of_a_router_are_read_as_it_tells_them():
    assert workers_of("20_workers_none") == []
    (worker,) = workers_of("21_workers_one")
    assert (worker.model, worker.is_healthy, worker.unfit) == ("models/tiny-qwen3", True, None)
    assert len(workers_of("21_workers_two")) == 2
    (left,) = workers_of("24_workers_after_delete")
    assert left in workers_of("21_workers_two")
    assert [worker.is_healthy for worker in workers_of("25_workers_unhealthy")] == [False]


def test_older_routers_tell_urls_or_no_model():
    """0.1.9 and 0.2.2, as they answered."""
    assert list(read_workers(b'{"urls":["http://a:1","http://b:2"]}', "r")) == ["http://a:1", "http://b:2"]
    told = {"id": "http://a:1", "url": "http://a:1", "model_id": "unknown", "worker_type": "regular"}
    told |= {"is_healthy": True, "connection_mode": "Http"}
    (worker,) = read_workers(json.dumps({"workers": [told]}).encode(), "r").values()
    assert (worker.url, worker.model, worker.unfit) == ("http://a:1", None, None)


def test_ranks_of_one_server_are_one_worker_at_its_own_url():
    (worker,) = workers_of("26_workers_dp_aware")
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+", worker.url)
    urls = ["http://a:1@0", "http://a:1@1", "http://b:1/@0", "http://[::1]:30000", "http://c/"]
    listed = {"workers": [worker_at(url, is_healthy=url != "http://a:1@1") for url in urls]}
    found = read_workers(json.dumps(listed).encode(), "r")
    assert list(found) == ["http://a:1", "http://b:1", "http://[::1]:30000", "http://c"]
    assert found["http://a:1"].is_healthy


def test_a_worker_that_serves_no_attempt_by_itself_is_unfit():
    unfit = {worker.url: worker.unfit for worker in workers_of("26_workers_prefill_decode")}
    assert sorted(reason.split()[3] for reason in unfit.values()) == ["decode", "prefill"]
    for fields in ({"url": "grpc://a:1"}, {"url": "http://a:1", "connection_mode": "GRPC"}):
        listed = {"workers": [worker_at(**fields)]}
        (worker,) = read_workers(json.dumps(listed).encode(), "r").values()
        assert worker.unfit == "it does not speak HTTP"


@pytest.mark.parametrize("body", [b"", b"[1", b'{"workers": 3}', b"3", b'{"workers": [{"id": 1}]}', b"[]"])
def test_a_router_that_says_something_else_is_refused(body):
    with pytest.raises(BackendProtocolError, match="/workers of r: "):
        read_workers(body, "/workers of r")


# --- flags ------------------------------------------------------------------------------------------------------


def parse(*words):
    return parse_config(words).config


def test_flags_of_the_server_are_passed_on_as_they_are_and_ours_are_not():
    config = parse(
        *("--rollout-backend", "sglang", "--sglang-tp-size", "2", "--sglang-max-restarts", "5"),
        *("--sglang-enable-metrics", "--sglang-lora-paths", "a=b", "c=d", "--sglang-json=--x", "--sglang-tp-size", "4"),
    )

    assert config.backend.sglang_args == (
        *("--tp-size", "2", "--enable-metrics", "--lora-paths", "a=b", "c=d", "--json", "--x", "--tp-size", "4"),
    )
    assert config.backend.sglang_max_restarts == 5


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--sglang-tp-size", "2"), "without --rollout-backend sglang"),
        (("--sglang-server", "http://a:1"), "without --rollout-backend sglang"),
        (("--rollout-backend", "sglang", "--sglang-port", "3"), "--sglang-port can't be given"),
        (("--rollout-backend", "sglang", "--sglang-server", "a:1"), "must be like http://HOST:PORT"),
        (("--rollout-backend", "sglang", "--sglang-server", "http://[::1"), "must be like http://HOST:PORT"),
        (("--rollout-backend", "sglang", "--sglang-server", "http://a:b"), "must be like http://HOST:PORT"),
        (("--rollout-backend", "sglang", "--sglang-server", "http://a:1/v1"), "must be like http://HOST:PORT"),
        (
            ("--rollout-backend", "sglang", "--sglang-server", "http://a:1", "--sglang-num-servers", "2"),
            "names others",
        ),
        (("--rollout-backend", "sglang", "--sglang-server", "http://a:1", "http://a:1/"), "names a server twice"),
        (("--rollout-backend", "sglang", "--sglang-model", "other"), "--hf-checkpoint says which"),
        (("--rollout-backend", "sglang", "--sglang-server", "http://a:1", "http://a:1"), "names a server twice"),
        (("--rollout-backend", "sglang", "--sglang-server", "http://a:1", "--sglang-tp-size", "2"), "names others"),
        (
            ("--rollout-backend", "sglang", "--sglang-server", "http://a:1", "--sglang-router-ip", "b"),
            "exclude each other",
        ),
        (("--rollout-backend", "sglang", "--sglang-update-recipe", "in_place"), "--allow-stale-kv belong together"),
        (("--rollout-backend", "sglang", "--allow-stale-kv"), "--allow-stale-kv belong together"),
        (
            ("--rollout-backend", "sglang", "--sglang-num-servers", "2", "--sglang-gpus", "0", "1", "2"),
            "can't be shared out evenly",
        ),
        (("--rollout-backend", "sglang", "--deterministic"), "--sglang-enable-deterministic-inference"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(words, problem):
    (found,) = backend_problems(parse(*words))

    assert problem in found


def test_a_cut_vocabulary_is_warned_about_because_sglang_does_not_renormalize():
    assert backend_warnings(parse("--rollout-backend", "sglang", "--rollout-top-p", "0.9"))
    assert not backend_warnings(parse("--rollout-backend", "sglang"))
    assert not backend_warnings(parse("--rollout-top-p", "0.9"))


def gpus(n_gpus, **fields):
    return share_out(BackendConfig(**fields), n_gpus)


def test_gpus_are_shared_out_in_order():
    assert gpus(0, sglang_num_servers=2) == ()
    assert gpus(8) == ()
    assert gpus(8, sglang_num_servers=2, sglang_args=("--tp-size", "2")) == ("0,1", "2,3")
    assert gpus(8, sglang_num_servers=2, sglang_args=("--tp", "2", "--dp-size", "2")) == ("0,1,2,3", "4,5,6,7")
    assert gpus(8, sglang_num_servers=2, sglang_gpus=(4, 5, 6, 7)) == ("4,5", "6,7")
    attention = ("--tp-size", "4", "--dp-size", "4", "--enable-dp-attention")
    assert gpus(8, sglang_num_servers=2, sglang_args=attention) == ("0,1,2,3", "4,5,6,7")
    with pytest.raises(ConfigError, match="need 4 GPUs each, but there are 4"):
        gpus(4, sglang_num_servers=2, sglang_args=("--tp-size", "4"))
