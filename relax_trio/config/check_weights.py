"""Whether the flags of how weights get to SGLang servers, and of memory that is lent to the trainer, agree."""

from __future__ import annotations

from relax_trio.config.tree import Config


def weight_problems(config: Config, *, trains: bool) -> list[str]:
    """Contradictions among them.

    Args:
      trains: the command has optimizer phases.
    """
    return _adapter_problems(config) + _colocate_problems(config, trains=trains)


def _adapter_problems(config: Config) -> list[str]:
    backend = config.backend
    if backend.sglang_lora_transfer != "adapter":
        return []
    flag = "--sglang-lora-transfer adapter"
    if backend.rollout_backend != "sglang":
        return [f"{flag} is given without --rollout-backend sglang"]
    problems = []
    if config.train.lora_rank is None:
        problems.append(f"{flag} is given without --lora-rank: there is no adapter to send")
    if backend.sglang_update_recipe in ("retract", "in_place"):
        problems.append(
            f"{flag} with --sglang-update-recipe {backend.sglang_update_recipe}: an attempt keeps the adapter that it "
            "began with, so it can't go on under new weights on the server; use abort or drain"
        )
    if config.rollout.pauses_attempts:
        problems.append(
            f"{flag} with --partial-rollout-pause {config.rollout.partial_rollout_pause}: a paused attempt would go on "
            "under the adapter that it began with; use abort"
        )
    if backend.sglang_weight_transfer == "distributed":
        problems.append(
            f"{flag} with --sglang-weight-transfer distributed: SGLang takes no adapter by broadcast; use disk "
            "or tensor"
        )
    if backend.colocate:
        problems.append(
            f"{flag} with --colocate: servers that release their memory need whole weights again; use "
            "--sglang-lora-transfer merged"
        )
    return problems


def _colocate_problems(config: Config, *, trains: bool) -> list[str]:
    backend, rollout = config.backend, config.rollout
    if not backend.colocate:
        return []
    if not trains:
        return ["--colocate is for training: nobody else needs the servers' memory here"]
    if backend.rollout_backend != "sglang":
        return ["--colocate needs --rollout-backend sglang: the embedded engine keeps its memory"]
    problems = []
    if backend.sglang_server or backend.sglang_router_ip is not None:
        problems.append(
            "--colocate is for servers that the run starts, but --sglang-server or --sglang-router-ip names others: "
            "these don't share the trainer's GPU"
        )
    if rollout.fully_async:
        problems.append(
            "--colocate and --fully-async exclude each other: attempts go on while the trainer needs the memory"
        )
    if backend.sglang_update_recipe == "in_place":
        problems.append(
            "--colocate with --sglang-update-recipe in_place: attempts can't keep a cache in memory that is released; "
            "use retract or abort"
        )
    if rollout.pauses_attempts and rollout.partial_rollout_pause == "in_place":
        problems.append(
            "--colocate with --partial-rollout-pause in_place: paused attempts can't keep a cache in memory that is "
            "released; use retract or abort"
        )
    if backend.sglang_weight_transfer == "distributed":
        problems.append(
            "--colocate with --sglang-weight-transfer distributed: NCCL joins no two processes on the same GPU; use "
            "disk or tensor"
        )
    return problems
