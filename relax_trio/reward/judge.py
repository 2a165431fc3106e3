"""What becomes of a complete Group: its rewards, whether it is kept, its credit. One call, one verdict."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

from relax_trio.data.sample import Sample
from relax_trio.errors import CreditError
from relax_trio.events import emit
from relax_trio.reward.advantage import custom_credits, metadata_by_slot
from relax_trio.reward.credit import assign_credit, several_contexts
from relax_trio.reward.filters import read_verdict
from relax_trio.reward.hooks import Hook, call_hook
from relax_trio.reward.reward import RewardScorer
from relax_trio.reward.view import HookSample
from relax_trio.sync.cpu import CpuPool


async def judge_group(samples: Sequence[Sample], scorer: RewardScorer, *, assigns_credit: bool) -> str | None:
    """Reward one Group, filter it, and set the credit of its rows.

    Args:
      samples: all rows of the Group, in order of place and export.
      assigns_credit: False for rollout without training, which has neither filter nor credit.

    Returns:
      Why the Group is not trained on (a filter or the custom advantage gave it up), None where it is.

    Raises:
      RewardError: a hook failed, or a reward is none.
      CreditError: rewards or custom advantages that no credit can be made from, or several contexts of a Session
        where one outcome would be all of their credit, or without dynamic batch sizes.

    Cancellation: as `call_hook`; rows may have rewards already.
    """
    await scorer.score(samples)
    if not assigns_credit:
        return None
    hooks = scorer.hooks
    if hooks.keep is not None and (reason := await _filtered(samples, hooks.keep, hooks.args, hooks.cpu, scorer)):
        return reason
    if hooks.advantage is None:
        assign_credit(samples, scorer.config)
        return None
    return await _custom(samples, hooks.advantage, hooks.cpu, scorer)


async def _filtered(
    samples: Sequence[Sample], hook: Hook, args: SimpleNamespace, cpu: CpuPool, scorer: RewardScorer
) -> str | None:
    group = samples[0].group
    views = [HookSample(sample) for sample in samples]
    value = await call_hook(hook, args, views, place=group, cpu=cpu, limit_s=scorer.config.rm_timeout)
    verdict = read_verdict(value, f"group {group}: {hook.flag} {hook.path}")
    if verdict.keep:
        return None
    emit("group.filtered", group=group, reason=verdict.reason)
    return f"filtered by {hook.path}{f': {verdict.reason}' if verdict.reason else ''}"


async def _custom(samples: Sequence[Sample], hook: Hook, cpu: CpuPool, scorer: RewardScorer) -> str | None:
    group = samples[0].group
    fanned_out = several_contexts(samples)
    if fanned_out is not None and not scorer.hooks.args.use_dynamic_batch_size:
        raise CreditError(
            f"{fanned_out}, so that the rows of a step are as many as agents make them: bound a forward pass by "
            "tokens, with --use-dynamic-batch-size --max-tokens-per-gpu N"
        )
    value = await call_hook(
        hook, metadata_by_slot(samples), place=group, cpu=cpu, limit_s=scorer.config.rm_timeout, error=CreditError
    )
    if value is None:
        emit("group.filtered", group=group, reason=f"{hook.path} returned None")
        return f"given up by {hook.path} (None)"
    for sample, credit in zip(samples, custom_credits(value, samples, hook.path), strict=True):
        sample.advantage = credit
    return None
