"""Whether the flags of the engine agree with each other."""

from __future__ import annotations

from urllib.parse import urlsplit

from relax_trio.config.check_pause import keeps_stale_kv
from relax_trio.config.tree import Config

_OURS = {
    "--model-path": "--hf-checkpoint says which",
    "--model": "--hf-checkpoint says which",
    "--host": "servers listen on the loopback address",
    "--port": "each gets a free one",
    "--weight-version": "the run counts them",
    "--skip-tokenizer-init": "stop strings need the tokenizer",
    "--api-key": "servers of the run listen on the loopback address only",
}


def backend_problems(config: Config) -> list[str]:
    """Contradictions among the flags of the engine."""
    backend = config.backend
    given = [f"--sglang-{word.removeprefix('--')}" for word in backend.sglang_args if word.startswith("--")]
    if backend.rollout_backend != "sglang":
        given += ["--sglang-server"] if backend.sglang_server else []
        given += ["--sglang-router-ip"] if backend.sglang_router_ip else []
        given += ["--agentic-program-admission"] if backend.agentic_program_admission else []
        return [f"{given[0]} is given without --rollout-backend sglang"] if given else []
    problems = []
    external = bool(backend.sglang_server) or backend.sglang_router_ip is not None
    if external and given:
        problems.append(
            f"{given[0]} is for servers that the run starts, but --sglang-server or --sglang-router-ip names others"
        )
    if external and backend.sglang_num_servers != 1:
        problems.append(
            "--sglang-num-servers says how many the run starts, but --sglang-server or --sglang-router-ip names others"
        )
    if backend.sglang_server and backend.sglang_router_ip is not None:
        problems.append("--sglang-server and --sglang-router-ip exclude each other: name servers or a router")
    problems += [
        f"--sglang-{word.removeprefix('--')} can't be given: {_OURS[word]}"
        for word in backend.sglang_args
        if word in _OURS
    ]
    problems += [
        f"--sglang-server {url}: must be like http://HOST:PORT"
        for url in backend.sglang_server
        if not is_server_url(url)
    ]
    if len({url.rstrip("/") for url in backend.sglang_server}) < len(backend.sglang_server):
        problems.append("--sglang-server names a server twice")
    if backend.sglang_gpus and len(backend.sglang_gpus) % backend.sglang_num_servers:
        problems.append(
            f"--sglang-gpus: {len(backend.sglang_gpus)} GPUs can't be shared out evenly among "
            f"--sglang-num-servers {backend.sglang_num_servers}"
        )
    needs_stale_kv = backend.sglang_update_recipe == "in_place"
    if needs_stale_kv > backend.allow_stale_kv or backend.allow_stale_kv > keeps_stale_kv(config):
        problems.append(
            "--sglang-update-recipe in_place (or --partial-rollout-pause in_place) and --allow-stale-kv belong "
            "together: attempts then go on from a cache that older weights computed"
        )
    if config.rollout.deterministic and "--enable-deterministic-inference" not in backend.sglang_args:
        problems.append("--deterministic with SGLang needs --sglang-enable-deterministic-inference")
    return problems


def is_server_url(url: str) -> bool:
    """Whether it says where a server is, like http://HOST:PORT."""
    try:
        parts = urlsplit(url)
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        return is_whole and parts.path in ("", "/") and not parts.query
    except ValueError:
        return False


def backend_warnings(config: Config) -> list[str]:
    """What can be run but means something else than one may think."""
    rollout = config.rollout
    if config.backend.rollout_backend == "sglang" and (rollout.rollout_top_p < 1 or rollout.rollout_top_k != -1):
        return [
            "--rollout-top-p and --rollout-top-k with SGLang: its logprobs are those of the whole vocabulary, not of "
            "what is left after them, so the trainer's ratios are off"
        ]
    return []
