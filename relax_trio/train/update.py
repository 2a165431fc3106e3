"""A policy and its AdamW: gradients that add up, optimizer steps, and phases that can be undone.

Plain blocking code for a worker thread: the caller hands in what to ask between micro-batches. Which rows share an
optimizer step is phase.py's work.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from attrs import evolve

from relax_trio.errors import TrainError
from relax_trio.train.objective import objective
from relax_trio.train.offload import park, parked, unpark
from relax_trio.train.packing import Batch, MicroBatching, idle_batch
from relax_trio.train.policy import Policy
from relax_trio.train.reference import Reference
from relax_trio.train.schedule import learning_rate
from relax_trio.train.sequences import tell_away
from relax_trio.train.settings import TrainerSettings
from relax_trio.train.stats import OptimizerStep, StepStats
from relax_trio.train.targets import Targets
from relax_trio.train.team import ALONE, Team
from relax_trio.train.weights import put_back, snapshot, undo_point

_CPU = torch.device("cpu")


class Updater:
    """A policy and its optimizer.

    Attributes:
      policy: the model being trained.
      team: the processes that train it together.
      reference: the policy that training is kept near; None without a KL term.
      settings: loss, optimizer, distribution.
      n_phases: completed phases.
      n_steps: optimizer steps tried, the skipped ones included: the schedule's position.
      weights: a copy of the model's weights as of the last completed phase.
      in_phase: a phase is open, or could not be undone: model and optimizer are then no state to go on from.
    """

    def __init__(
        self, policy: Policy, settings: TrainerSettings, reference: Reference | None = None, team: Team = ALONE
    ) -> None:
        self.policy = policy
        self.team = team
        self.reference = reference
        self.settings = settings
        self.n_phases = 0
        self.n_steps = 0
        self._publish()
        self.in_phase = False
        self._before: dict[str, Any] | None = None  # what undoing the open phase needs, from its first step on
        self._parameters = [p for p in policy.model.parameters() if p.requires_grad]
        train = settings.train
        # Norm scales and biases are not decayed: shrinking them regularizes nothing.
        matrices = [p for p in self._parameters if p.dim() >= 2]
        others = [p for p in self._parameters if p.dim() < 2]
        self._optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": train.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=train.lr,
            betas=(train.adam_beta1, train.adam_beta2),
            eps=train.adam_eps,
        )
        if settings.shares_gpu:
            park(self._optimizer, _CPU)

    # --- one optimizer step -------------------------------------------------------------------------------------

    def accumulate(self, targets: Sequence[Targets], stats: StepStats, check_stop: Callable[[], None]) -> None:
        """Add the undivided gradient of some micro-batches to the parameters' `grad`, their numbers to `stats`.

        Args:
          targets: rows of one optimizer step, all of them or a part.
          stats: gets sums, gap and ratio; not the normalizer and the divisor.
          check_stop: raises to give up; asked before each micro-batch.
        """
        self._look_around(targets, check_stop)
        own = StepStats()
        for target in self.team.rounds(targets):
            check_stop()
            if target is None:
                self._idle()
            else:
                self._backward(target, own)
        stats.join(self.team.join(own, StepStats))

    def step(self, stats: StepStats) -> OptimizerStep:
        """Divide the gradient that was added up, clip it, make the optimizer step and drop the gradient.

        A gradient that isn't finite, or whose numbers in `stats` aren't, is dropped without a step.

        A copy of the optimizer's state (8 bytes a parameter) is kept from the phase's first step to its end. No
        sooner: with the gradient complete, no activations compete for the memory.

        Args:
          stats: of all rows of the optimizer step.
        """
        assert self.in_phase, "optimizer steps are made in phases"
        if self._before is None:
            self._before = copy.deepcopy(self.state())
        lr = learning_rate(self.settings.train, self.n_steps, self.settings.n_total)
        done = OptimizerStep(number=self.n_steps, lr=lr, norm=self._apply(lr, stats))
        self.n_steps += 1
        return done

    def score(self, batches: Sequence[Batch], check_stop: Callable[[], None]) -> list[torch.Tensor]:
        """(K,) logprobs of each micro-batch under the weights as they are; `check_stop` as in `accumulate`."""
        return Reference(self.policy, self.settings.distribution, self.team).score(batches, check_stop)

    def check_vocabulary(self, batches: Sequence[Batch]) -> None:
        """Refuse token ids that the model doesn't have.

        Raises:
          TrainError: naming the range of the ids.
        """
        highest = max((int(batch.ids.max()) for batch in batches), default=0)
        lowest = min((int(batch.ids.min()) for batch in batches), default=0)
        if highest >= self.policy.n_vocab or lowest < 0:
            raise TrainError(
                f"token ids run from {lowest} to {highest}, but the trained model has {self.policy.n_vocab} tokens; "
                "rollout and trainer must use the same checkpoint"
            )

    # --- phases: all or nothing ---------------------------------------------------------------------------------

    def begin_phase(self) -> None:
        """From here on optimizer steps can be made, and undone."""
        assert not self.in_phase, "one phase at a time"
        self.in_phase = True
        if self.settings.shares_gpu:
            unpark(self._optimizer)

    def end_phase(self) -> None:
        """Count the phase; `weights` become those of now."""
        self._publish()
        self.n_phases += 1
        self._leave_phase()

    def undo_phase(self) -> None:
        """Make model, optimizer and counters what they were at `begin_phase`."""
        self._optimizer.zero_grad(set_to_none=True)
        if self._before is not None:
            put_back(self.policy.model, self._undo_point)
            self._optimizer.load_state_dict(self._before["optimizer"])
            self.n_steps = self._before["n_steps"]
        self._leave_phase()

    def _publish(self) -> None:
        self.weights = snapshot(self.policy.model)
        if self.settings.shares_gpu and self.weights.tensors is not None:
            self.weights = evolve(self.weights, tensors=parked(self.weights.tensors, _CPU))
        self._undo_point = undo_point(self.policy.model, self.weights)

    def _leave_phase(self) -> None:
        self._before = None
        self.in_phase = False
        if self.settings.shares_gpu:
            park(self._optimizer, _CPU)

    # --- checkpoints --------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a resumed run needs besides the weights; tensors are the live ones."""
        return {"optimizer": self._optimizer.state_dict(), "n_phases": self.n_phases, "n_steps": self.n_steps}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over `state()` of another run; learning rate and other settings stay those of this run.

        Raises:
          KeyError, TypeError, ValueError: it is of another model or not a state at all.
        """
        own = [{k: v for k, v in group.items() if k != "params"} for group in self._optimizer.param_groups]
        self._optimizer.load_state_dict(self._own_part(state["optimizer"]))
        for group, options in zip(self._optimizer.param_groups, own, strict=True):
            group.update(options)
        for parameter, values in self._optimizer.state.items():
            if any(v.shape != parameter.shape for v in values.values() if torch.is_tensor(v) and v.dim()):
                raise ValueError("the optimizer's tensors don't have the model's shapes")
        self.n_phases = int(state["n_phases"])
        self.n_steps = int(state["n_steps"])
        if self.settings.shares_gpu:
            park(self._optimizer, _CPU)

    def _own_part(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The optimizer's state with this process's shards in place of whole tensors."""
        order = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        moments = {
            number: {name: self.team.sharded(value, order[number]) for name, value in values.items()}
            for number, values in state["state"].items()
        }
        return {**state, "state": moments}

    # --- parts of an optimizer step -----------------------------------------------------------------------------

    @property
    def batching(self) -> MicroBatching:
        """How rows are divided among forward passes."""
        train = self.settings.train
        if not train.use_dynamic_batch_size:
            return MicroBatching(size=train.micro_batch_size)
        return MicroBatching(max_tokens=train.max_tokens_per_gpu, packed=self.policy.packs, multiple=self.team.n)

    def _backward(self, targets: Targets, stats: StepStats) -> None:
        logprobs, entropy = self.policy.score(targets.batch, self.settings.distribution)  # (K,), (K,)
        result = objective(logprobs, entropy, targets, self.settings)
        torch.autograd.backward(result.loss)
        stats.add(result.sums, result.gap, result.ratios)

    def _look_around(self, targets: Sequence[Targets], check_stop: Callable[[], None]) -> None:
        """Where the loss looks at whole Sessions: score those that lie in several micro-batches once more before."""
        train = self.settings.train
        divided = [target for target in targets if target.sequences.is_divided]
        by_ratio = self.settings.estimator == "gspo" and any(target.old is not None for target in divided)
        if not by_ratio and not (divided and train.use_opsm):
            return
        scored = self.score([target.batch for target in divided], check_stop)
        news = [logprobs.double().cpu() for logprobs in scored]
        # Without old logprobs the policy is its own old one: every ratio is 1.
        olds = [new if target.old is None else target.old for target, new in zip(divided, news, strict=True)]
        tell_away(
            [target.sequences for target in divided],
            [new - old for new, old in zip(news, olds, strict=True)],
            [new - target.rollout for new, target in zip(news, divided, strict=True)],
        )

    def _idle(self) -> None:
        """Take part in the other processes' forward and backward passes, adding nothing."""
        logprobs, _ = self.policy.score(idle_batch(), self.settings.distribution)  # (0,)
        torch.autograd.backward(logprobs.sum())

    def _apply(self, lr: float, stats: StepStats) -> float:
        """Divide, clip and step; returns the gradient norm before clipping, NaN or infinite when it was skipped."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                # Sharded gradients are means over the processes.
                parameter.grad.div_(stats.divisor / self.team.n)
        bound = self.settings.train.clip_grad
        norm = float(
            self.team.whole(torch.nn.utils.clip_grad_norm_(self._parameters, bound if bound > 0 else math.inf))
        )
        if not stats.finite:
            norm = math.nan
        if math.isfinite(norm):
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm
