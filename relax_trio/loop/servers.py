"""From the configuration to a backend over SGLang servers: own ones, named ones, or those of a router."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

from relax_trio.backend.admission import Admission, AdmissionOptions
from relax_trio.backend.base import Backend
from relax_trio.backend.checkpoint import require_config
from relax_trio.backend.sglang.backend import SGLangBackend, SGLangOptions
from relax_trio.backend.sglang.client import PauseMode
from relax_trio.backend.sglang.exchange import Recipe
from relax_trio.backend.sglang.external import ExternalServer, ExternalServers
from relax_trio.backend.sglang.keeper import Keeper
from relax_trio.backend.sglang.owned import OwnedServer, OwnedServers
from relax_trio.backend.sglang.readings import follow_servers
from relax_trio.backend.sglang.router import RouterServers
from relax_trio.backend.sglang.transfer import Transfer
from relax_trio.config.backend_tree import BackendConfig
from relax_trio.config.tree import Config
from relax_trio.data.json import JsonValue
from relax_trio.errors import ConfigError, boundary
from relax_trio.ids import WeightVersion
from relax_trio.loop import setup
from relax_trio.runtime.engine import MAX_INFLIGHT_ATTEMPTS, Engine, open_engine
from relax_trio.runtime.stop import Stop
from relax_trio.sync.cpu import CpuPool
from relax_trio.sync.process import Warden
from relax_trio.tokens.codec import ChatCodec

SNAPSHOTS_DIR = "weights"
LOGS_DIR = "servers"

LONGEST_PAUSE_S = 3 * 24 * 3600
"""How long a server of the run may hold attempts in place, thrice over."""

_PAUSES: dict[str, PauseMode] = {"retract": "retract", "in_place": "in_place"}
_RECIPES: dict[str, Recipe] = {r: r for r in ("auto", "drain", "abort", "retract", "in_place")}
_TRANSFERS: dict[str, Transfer] = {t: t for t in ("disk", "tensor", "distributed")}
_TENSOR_PARALLEL = ("--tp-size", "--tp", "--tensor-parallel-size")
_PIPELINE_PARALLEL = ("--pp-size", "--pp", "--pipeline-parallel-size")
_DATA_PARALLEL = ("--dp-size", "--dp", "--data-parallel-size")


def open_run_engine(
    config: Config,
    checkpoint: Path,
    codec: ChatCodec,
    version: WeightVersion,
    *,
    cpu: CpuPool,
    run_dir: Path,
    servers_dir: Path | None = None,
    adapter: Path | None = None,
    stop: Stop,
) -> AbstractAsyncContextManager[Engine]:
    """An engine over what `--rollout-backend` says.

    Args:
      servers_dir: gets logs and weights of the run's own servers; None: `run_dir`.
      adapter: directory of the adapter on top of `checkpoint`, where SGLang servers are given it by itself.

    Raises:
      ConfigError: as `make_backend`.
    """
    warden = Warden()
    backend = make_backend(
        config, checkpoint, codec, version, warden=warden, run_dir=servers_dir or run_dir, adapter=adapter
    )
    return open_engine(
        config,
        backend=backend,
        codec=codec,
        cpu=cpu,
        run_dir=run_dir,
        stop=stop,
        warden=warden,
        admission=make_admission(config, backend),
    )


def make_backend(
    config: Config,
    checkpoint: Path,
    codec: ChatCodec,
    version: WeightVersion,
    *,
    warden: Warden,
    run_dir: Path,
    adapter: Path | None = None,
) -> Backend:
    """What `--rollout-backend` says, not started yet.

    Raises:
      ConfigError: it can't be run with this checkpoint.
    """
    if config.backend.rollout_backend == "sglang":
        return make_sglang_backend(config, checkpoint, codec, version, warden=warden, run_dir=run_dir, adapter=adapter)
    return setup.make_backend(config, checkpoint, codec, version)


def make_sglang_backend(
    config: Config,
    checkpoint: Path,
    codec: ChatCodec,
    version: WeightVersion,
    *,
    warden: Warden,
    run_dir: Path,
    adapter: Path | None = None,
) -> SGLangBackend:
    """The backend, not started yet.

    Raises:
      ConfigError: the checkpoint's sizes can't be read, or conversations are allowed to be longer than the model.
    """
    vocab_len, model_len = model_sizes(checkpoint)
    lens = (config.rollout.rollout_max_context_len, config.eval.eval_max_context_len)
    known = [length for length in lens if length is not None]
    if known and model_len is not None and max(known) > model_len:
        raise ConfigError(
            f"--rollout-max-context-len or --eval-max-context-len is {max(known)} tokens, but {checkpoint} was made "
            f"for {model_len}; lower it"
        )
    backend = config.backend
    options = SGLangOptions(
        max_context_len=max(known) if lens[0] is not None else None,
        vocab_len=vocab_len,
        routing="session" if backend.sglang_routing == "session" else "least_loaded",
        session_lifecycle=backend.agentic_session_lifecycle,
        recipe=_RECIPES[backend.sglang_update_recipe],
        transfer=_TRANSFERS[backend.sglang_weight_transfer],
        adapter_rank=config.train.lora_rank if backend.sglang_lora_transfer == "adapter" else None,
        pause=_PAUSES[config.rollout.partial_rollout_pause] if config.rollout.pauses_attempts else None,
        lends_memory=backend.colocate,
        pads=codec.vision.pads,
    )
    return SGLangBackend(
        checkpoint,
        version,
        snapshot_dir=run_dir / SNAPSHOTS_DIR,
        keepers=_keepers(config, warden, run_dir),
        options=options,
        decode=codec.decode,
        adapter=adapter,
    )


def lend_memory(config: Config, backend: Backend) -> Callable[[], AbstractAsyncContextManager[None]]:
    """Opens a block in which the trainer has the servers' GPU memory, where `--colocate` asks for it."""
    if config.backend.colocate and isinstance(backend, SGLangBackend):
        return backend.lend_memory
    return nullcontext


def make_admission(config: Config, backend: Backend) -> Admission | None:
    """What `--agentic-program-admission` asks for, not started yet; None where it is off or nothing has servers."""
    options = config.backend
    if not options.agentic_program_admission or not isinstance(backend, SGLangBackend):
        return None
    return Admission(
        AdmissionOptions(
            headroom=options.agentic_admission_headroom,
            pressure_threshold=options.agentic_admission_pressure_threshold,
            expected_decode_cap=options.agentic_admission_expected_decode_cap,
            max_wait_s=options.agentic_admission_max_wait_s,
            scope="all" if options.agentic_admission_scope == "all" else "train",
        ),
        partial(follow_servers, lambda: backend.servers),
    )


def _keepers(whole: Config, warden: Warden, run_dir: Path) -> list[Keeper]:
    config = whole.backend
    external = ExternalServers(
        start_timeout_s=config.sglang_start_timeout,
        health_timeout_s=config.engine_health_timeout,
        max_inflight=MAX_INFLIGHT_ATTEMPTS,
    )
    if config.sglang_router_ip is not None:
        return [RouterServers(external, f"http://{config.sglang_router_ip}:{config.sglang_router_port}")]
    if config.sglang_server:
        return [ExternalServer(external, url) for url in config.sglang_server]
    gpus = share_out(config, torch.cuda.device_count())
    require_apart(config, gpus, torch.cuda.device_count())
    owned = OwnedServers(
        warden=warden,
        python=config.sglang_python or sys.executable,
        args=config.sglang_args + extra_flags(whole),
        log_dir=run_dir / LOGS_DIR,
        gpus=gpus,
        max_restarts=config.sglang_max_restarts,
        start_timeout_s=config.sglang_start_timeout,
        health_timeout_s=config.engine_health_timeout,
        max_inflight=MAX_INFLIGHT_ATTEMPTS,
    )
    return [OwnedServer(owned, index) for index in range(config.sglang_num_servers)]


def extra_flags(config: Config) -> tuple[str, ...]:
    """Flags that servers of the run need for what is asked of them, but for those that the user gave."""
    backend, lora_rank = config.backend, config.train.lora_rank
    wanted: list[tuple[str, ...]] = []
    if backend.agentic_program_admission:
        wanted.append(("--enable-metrics",))
    if backend.colocate:
        wanted.append(("--enable-memory-saver",))
    if config.rollout.pauses_attempts and config.rollout.partial_rollout_pause == "in_place":
        wanted.append(("--watchdog-timeout", str(LONGEST_PAUSE_S)))  # which a batch that is held would set off
    if backend.sglang_lora_transfer == "adapter" and lora_rank is not None:
        targets = config.train.lora_target_modules
        modules = ("all",) if targets == ("all-linear",) else targets
        # One adapter and none at all: requests of nobody, as for health, name none.
        wanted += [("--enable-lora",), ("--max-lora-rank", str(lora_rank)), ("--max-loras-per-batch", "2")]
        wanted.append(("--lora-target-modules", *modules))
        if ("--device", "cpu") in pairwise(backend.sglang_args):
            wanted.append(("--lora-backend", "torch_native"))
    return tuple(word for flag in wanted if flag[0] not in backend.sglang_args for word in flag)


def share_out(config: BackendConfig, n_gpus: int) -> tuple[str, ...]:
    """CUDA_VISIBLE_DEVICES of each server; empty: each sees what this process sees.

    A server takes tensor × pipeline × data parallel sizes; with attention data parallelism the data parallel ranks are
    the tensor parallel ones.

    Raises:
      ConfigError: there are not enough.
    """
    n_servers = config.sglang_num_servers
    gpus = config.sglang_gpus or tuple(range(n_gpus))
    if not gpus or (n_servers == 1 and not config.sglang_gpus):
        return ()
    words = config.sglang_args
    n_each = _size(words, _TENSOR_PARALLEL) * _size(words, _PIPELINE_PARALLEL)
    if "--enable-dp-attention" not in words:
        n_each *= _size(words, _DATA_PARALLEL)
    if n_each * n_servers > len(gpus):
        raise ConfigError(
            f"--sglang-num-servers {n_servers} need {n_each} GPUs each, but there are {len(gpus)}; "
            "lower --sglang-num-servers or --sglang-tp-size"
        )
    if config.sglang_gpus:
        n_each = len(gpus) // n_servers
    return tuple(",".join(map(str, gpus[i * n_each : (i + 1) * n_each])) for i in range(n_servers))


def require_apart(config: BackendConfig, gpus: tuple[str, ...], n_gpus: int) -> None:
    """Refuse a broadcast of weights between two processes on one GPU, which NCCL can't do.

    Args:
      gpus: from `share_out`.
      n_gpus: GPUs that this process sees; it broadcasts from the first of them.

    Raises:
      ConfigError: a server has that one, too.
    """
    if (
        config.sglang_weight_transfer != "distributed"
        or not n_gpus
        or ("--device", "cpu") in pairwise(config.sglang_args)
    ):
        return
    if not gpus or "0" in {gpu for shares in gpus for gpu in shares.split(",")}:
        raise ConfigError(
            "--sglang-weight-transfer distributed: a server has GPU 0, which weights are broadcast from, and NCCL "
            "joins no two processes on one GPU; give servers others with --sglang-gpus, or use disk or tensor"
        )


def _size(words: tuple[str, ...], names: tuple[str, ...]) -> int:
    """The value of the last of `names` among another program's words; 1 where there is none."""
    found = [value for word, value in pairwise(words) if word in names]
    return int(found[-1]) if found and found[-1].isdecimal() else 1


def model_sizes(checkpoint: Path) -> tuple[int, int | None]:
    """Token ids that the model takes, and the longest context it was made for, if its config.json says so.

    Raises:
      ConfigError: there is no readable config.json with a vocab_size.
    """
    require_config(checkpoint)
    with boundary(ConfigError, f"{checkpoint}: config.json can't be read", OSError, ValueError):
        config: JsonValue = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config", config) if isinstance(config, dict) else None
    vocab_len = text.get("vocab_size") if isinstance(text, dict) else None
    if not isinstance(text, dict) or not isinstance(vocab_len, int):
        raise ConfigError(f"{checkpoint}: config.json has no vocab_size")
    position = text.get("max_position_embeddings")
    return vocab_len, position if isinstance(position, int) else None
