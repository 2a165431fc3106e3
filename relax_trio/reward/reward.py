"""Rewards of complete Groups: what the agent exported stands, the reward hook is asked where there is none.

Not covered: what counts as a reward (value.py), credit (credit.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import trio
from attrs import frozen

from relax_trio.config.tree import RewardConfig
from relax_trio.data.sample import Sample
from relax_trio.errors import CreditError, RewardError
from relax_trio.events import emit
from relax_trio.reward.hooks import Hook, call_hook, load_hook
from relax_trio.reward.value import checked_reward, primary_reward
from relax_trio.reward.view import HookSample, take_over
from relax_trio.sync.cpu import CpuPool

MAX_CONCURRENT_CALLS = 64
"""Reward hook calls in flight at once, over all Groups."""


@frozen(kw_only=True)
class RunHooks:
    """The hooks of a run, loaded, and what they are called with.

    Attributes:
      args: every flag under its name.
      cpu: where sync hooks run.
      rm: gives rewards, to one Session or (`--group-rm`) to a Group.
      keep: says which Groups are trained on.
      advantage: gives credit instead of the estimator's.
    """

    args: SimpleNamespace
    cpu: CpuPool
    rm: Hook | None
    keep: Hook | None
    advantage: Hook | None

    @classmethod
    def load(cls, config: RewardConfig, args: SimpleNamespace, cpu: CpuPool) -> RunHooks:
        """Import what the configuration names.

        Raises:
          ConfigError: a hook can't be loaded or called as documented.
        """
        rm_takes = ("args", "samples") if config.group_rm else ("args", "sample")
        return cls(
            args=SimpleNamespace(**vars(args)),
            cpu=cpu,
            rm=_load("--custom-rm-path", config.custom_rm_path, rm_takes),
            keep=_load("--dynamic-sampling-filter-path", config.dynamic_sampling_filter_path, ("args", "samples")),
            advantage=_load(
                "--agentic-custom-advantage-path", config.agentic_custom_advantage_path, ("metadata_by_slot",)
            ),
        )


def _load(flag: str, path: str | None, parameters: tuple[str, ...]) -> Hook | None:
    return None if path is None else load_hook(flag, path, parameters=parameters)


class RewardScorer:
    """Gives every Session its reward. One per run: its limit on concurrent hook calls is the run's.

    Args:
      args: every flag under its name, for hooks; they get a copy.
      cpu: where sync hooks run.
      max_calls: reward hook calls in flight at once.

    Attributes:
      hooks: every hook of the run.

    Raises:
      ConfigError: a hook can't be loaded.
    """

    def __init__(
        self, config: RewardConfig, args: SimpleNamespace, cpu: CpuPool, *, max_calls: int = MAX_CONCURRENT_CALLS
    ) -> None:
        self.config = config
        self.hooks = RunHooks.load(config, args, cpu)
        self._calls = trio.CapacityLimiter(max_calls)

    async def score(self, samples: Sequence[Sample], *, evaluation: bool = False) -> None:
        """Set `reward` on the rows of Sessions that have none, and check all of them.

        A Session in which one context carries a reward has one. The hook gets `evaluation=` when it takes that keyword.
        With `--group-rm` it is asked once for every Group that has a Session without reward, and is given all its rows;
        exported rewards stand. Where custom advantage gives the credit, no reward is needed, and only a Group's hook is
        asked for one.

        Raises:
          CreditError: a Session without reward and no hook to ask; a reward object without its `--reward-key`.
          RewardError: an exported reward that is none, or the first failing hook call; the other calls are cancelled.

        Cancellation: hook calls are cancelled (a sync one goes on unseen); rewards set so far stay.
        """
        await trio.lowlevel.checkpoint()
        for sample in samples:
            if sample.reward is not None:
                sample.reward = checked_reward(sample.reward, f"session {sample.place}: its exported reward")
        rewarded = {_session(sample) for sample in samples if sample.reward is not None}
        missing = [sample for sample in samples if _session(sample) not in rewarded]
        credited = self.hooks.advantage is not None and not evaluation
        if missing and self.config.group_rm and (self.hooks.rm is not None or not credited):
            await self._ask_groups(self._required_hook(missing[0]), samples, missing, evaluation)
        elif missing and not credited:
            await self._ask(self._required_hook(missing[0]), missing, evaluation)
        for sample in samples:
            if sample.reward is not None:
                primary_reward(sample, self.config.reward_key)

    def _required_hook(self, sample: Sample) -> Hook:
        if self.hooks.rm is None:
            raise CreditError(
                f"session {sample.place} has no reward: write `reward` into its session output, or name a reward hook "
                "by --custom-rm-path"
            )
        return self.hooks.rm

    async def _ask(self, hook: Hook, samples: Sequence[Sample], evaluation: bool) -> None:
        failures: list[RewardError] = []
        async with trio.open_nursery() as nursery:

            async def ask(sample: Sample) -> None:
                try:
                    async with self._calls:
                        await self._ask_one(hook, sample, evaluation)
                except RewardError as exc:
                    failures.append(exc)
                    nursery.cancel_scope.cancel(reason=f"the reward of {sample.place} failed")

            for sample in samples:
                nursery.start_soon(ask, sample, name=f"reward {sample.place}")
        if failures:
            raise failures[0]

    async def _ask_one(self, hook: Hook, sample: Sample, evaluation: bool) -> None:
        """One hook call. Its time limit begins when it is let in, not while it waits for its turn."""
        started_s = trio.current_time()
        view = HookSample(sample)
        optional = {"evaluation": evaluation}
        try:
            value = await call_hook(
                hook,
                self.hooks.args,
                view,
                place=sample.place,
                cpu=self.hooks.cpu,
                limit_s=self.config.rm_timeout,
                optional=optional,
            )
            reward = checked_reward(value, f"session {sample.place}: what {hook.path} returned")
            take_over(view, sample, hook.path)
        except RewardError as exc:
            summary = str(exc).partition("\n")[0]
            emit("reward.failed", place=sample.place, hook=hook.path, error=summary)
            raise
        sample.reward = reward
        emit("reward.scored", place=sample.place, hook=hook.path, seconds=trio.current_time() - started_s)

    async def _ask_groups(
        self, hook: Hook, samples: Sequence[Sample], missing: Sequence[Sample], evaluation: bool
    ) -> None:
        """One call for every Group among `missing`; exported rewards stand."""
        lacking = {_session(sample) for sample in missing}
        for group in dict.fromkeys(sample.group for sample in missing):
            rows = [sample for sample in samples if sample.group == group]
            views = [HookSample(sample) for sample in rows]
            async with self._calls:
                value = await call_hook(
                    hook,
                    self.hooks.args,
                    views,
                    place=group,
                    cpu=self.hooks.cpu,
                    limit_s=self.config.rm_timeout,
                    optional={"evaluation": evaluation},
                )
            for view, sample, given in zip(views, rows, _one_each(value, rows, hook.path), strict=True):
                take_over(view, sample, hook.path)
                if given is not None and _session(sample) in lacking:
                    sample.reward = checked_reward(given, f"session {sample.place}: what {hook.path} returned")
            self._refuse_unrewarded(rows, hook)

    def _refuse_unrewarded(self, rows: Sequence[Sample], hook: Hook) -> None:
        """Where rewards give the credit, every Session needs one."""
        rewarded = {_session(sample) for sample in rows if sample.reward is not None}
        left = [sample.place for sample in rows if _session(sample) not in rewarded]
        if left and self.hooks.advantage is None:
            raise CreditError(f"session {left[0]} has no reward: {hook.path} returned None for it")


def _one_each(value: object, rows: Sequence[Sample], hook: str) -> list[object]:
    """What a Group's hook returned, one item a row."""
    if isinstance(value, list | tuple) and len(value) == len(rows):
        return list(value)
    given = f"{len(value)} items" if isinstance(value, list | tuple) else type(value).__name__
    raise RewardError(
        f"group {rows[0].group}: {hook} returned {given} for {len(rows)} rows; with --group-rm it must return a list "
        "with one reward a row"
    )


def _session(sample: Sample) -> tuple[str, int]:
    return sample.group, sample.index
