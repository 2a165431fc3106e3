"""Rewards of complete Groups: what the agent exported stands, the reward hook is asked where there is none.

Not covered: what counts as a reward (value.py), credit (credit.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import trio

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


class RewardScorer:
    """Gives every Session its reward. One per run: its limit on concurrent hook calls is the run's.

    Args:
      args: every flag under its name, for hooks; they get a copy.
      cpu: where sync hooks run.

    Raises:
      ConfigError: `--custom-rm-path` can't be loaded.
    """

    def __init__(
        self, config: RewardConfig, args: SimpleNamespace, cpu: CpuPool, *, max_calls: int = MAX_CONCURRENT_CALLS
    ) -> None:
        self.config = config
        self._args = SimpleNamespace(**vars(args))
        self._cpu = cpu
        self._calls = trio.CapacityLimiter(max_calls)
        self._hook: Hook | None = None
        if config.custom_rm_path is not None:
            self._hook = load_hook("--custom-rm-path", config.custom_rm_path, parameters=("args", "sample"))

    async def score(self, samples: Sequence[Sample], *, evaluation: bool = False) -> None:
        """Set `reward` on the rows of Sessions that have none, and check all of them.

        A Session in which one context carries a reward has one. The hook gets `evaluation=` when it takes that keyword.

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
        if missing:
            await self._ask(self._required_hook(missing[0]), missing, evaluation)
        for sample in samples:
            if sample.reward is not None:
                primary_reward(sample, self.config.reward_key)

    def _required_hook(self, sample: Sample) -> Hook:
        if self._hook is None:
            raise CreditError(
                f"session {sample.place} has no reward: write `reward` into its session output, or name a reward hook "
                "by --custom-rm-path"
            )
        return self._hook

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
                self._args,
                view,
                place=sample.place,
                cpu=self._cpu,
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


def _session(sample: Sample) -> tuple[str, int]:
    return sample.group, sample.index
