"""Whether attempts can be paused between steps (`--partial-rollout-pause`) with what else was asked for."""

from __future__ import annotations

from relax_trio.config.tree import Config


def pause_problems(config: Config, *, trains: bool) -> list[str]:
    """Contradictions of `--partial-rollout-pause`.

    Args:
      trains: weights change between steps.
    """
    rollout, backend = config.rollout, config.backend
    mode = rollout.partial_rollout_pause
    flag = f"--partial-rollout-pause {mode}"
    if mode == "abort":
        return []
    if not rollout.partial_rollout:
        return [f"{flag} is given without --partial-rollout: nothing outlives a step"]
    if backend.rollout_backend != "sglang":
        return [f"{flag} needs --rollout-backend sglang: the embedded engine can't pause attempts; leave it at abort"]
    problems = []
    if mode == "in_place" and trains and not backend.allow_stale_kv:
        problems.append(
            f"{flag} needs --allow-stale-kv: attempts go on under new weights from a cache that older ones computed"
        )
    if backend.sglang_update_recipe not in ("auto", mode):
        problems.append(
            f"{flag} and --sglang-update-recipe {backend.sglang_update_recipe} say different things of attempts while "
            "weights change; leave the recipe at auto"
        )
    return problems


def keeps_stale_kv(config: Config) -> bool:
    """Whether attempts go on from a cache of older weights, where weights change."""
    in_place = config.rollout.pauses_attempts and config.rollout.partial_rollout_pause == "in_place"
    return in_place or config.backend.sglang_update_recipe == "in_place"
