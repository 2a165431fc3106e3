"""`--eval-prompt-data NAME PATH [KEY=VALUE …] …` as datasets, each with its own keys, Group size and concurrency.

A KEY is the name of an evaluation flag, whose value then holds for this dataset alone. Also what all of it needs of an
executor that runs a bounded number of agents. Not covered: reading the files (data/dataset.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from attrs import field, frozen

from relax_trio.config.tree import Config
from relax_trio.errors import ConfigError

FLAG = "--eval-prompt-data"

OWN = ("eval_input_key", "eval_label_key", "n_samples_per_eval_prompt", "agentic_eval_concurrency")
"""What a dataset may have of its own."""

_NUMBERS = OWN[2:]


@frozen
class EvalWords:
    """One dataset as it was written."""

    name: str
    path: str
    own: dict[str, str] = field(factory=dict)


@frozen(kw_only=True)
class EvalSpec:
    """One dataset to evaluate on.

    Attributes:
      path: PATH or PATH@[a:b].
      n_samples: Sessions per row, G_d.
      concurrency: resident Groups, C_d.
    """

    name: str
    path: str
    input_key: str
    label_key: str | None
    n_samples: int
    concurrency: int

    @property
    def n_sessions(self) -> int:
        """E_d = C_d * G_d: the most of its Sessions at once."""
        return self.concurrency * self.n_samples


def read_eval_words(words: Sequence[str]) -> list[EvalWords]:
    """Split the words of the flag into datasets.

    Raises:
      ConfigError: a path is missing, or a KEY=VALUE stands in front of every dataset, is unknown or has a wrong value.
    """
    found: list[EvalWords] = []
    left = list(words)
    while left:
        word = left.pop(0)
        key, is_pair, value = word.partition("=")
        if is_pair:
            if not found:
                raise ConfigError(f"{FLAG}: {word} stands in front of the first NAME PATH")
            found[-1].own[_checked_key(word, key, value)] = value
        elif not left:
            raise ConfigError(f"{FLAG} takes pairs NAME PATH, but holds {len(words)} words: {' '.join(words)}")
        else:
            found.append(EvalWords(word, left.pop(0)))
    return found


def eval_specs(config: Config) -> tuple[EvalSpec, ...]:
    """The datasets to evaluate on, in their order.

    C_d is the dataset's or the flag's `agentic_eval_concurrency`, else ceil(T / G_d) with T train Sessions.

    Raises:
      ConfigError: as `read_eval_words`.
    """
    data, evaluation = config.data, config.eval
    specs = []
    for words in read_eval_words(evaluation.eval_prompt_data):
        n_samples = int(words.own.get("n_samples_per_eval_prompt", evaluation.n_samples_per_eval_prompt))
        concurrency = words.own.get("agentic_eval_concurrency", evaluation.agentic_eval_concurrency)
        specs.append(
            EvalSpec(
                name=words.name,
                path=words.path,
                input_key=words.own.get("eval_input_key") or evaluation.eval_input_key or data.input_key,
                label_key=words.own.get("eval_label_key") or evaluation.eval_label_key or data.label_key,
                n_samples=n_samples,
                concurrency=int(concurrency or math.ceil(config.rollout.n_train_sessions / n_samples)),
            )
        )
    return tuple(specs)


def required_slots(config: Config) -> int:
    """Agents that an executor shared by train and eval must be able to run at once: fewer can hang at a barrier.

    T without evaluation; max(T, E_peak) where train Sessions are gone when an evaluation begins; T + E_peak where they
    stay (prelaunch, partial rollout, fully async). E_peak is the greatest E_d: datasets are evaluated one by one.
    """
    rollout = config.rollout
    n_train = rollout.n_train_sessions
    n_peak = max((spec.n_sessions for spec in eval_specs(config)), default=0) if config.eval.eval_interval else 0
    return n_train + n_peak if rollout.retains_groups or rollout.agentic_prelaunch else max(n_train, n_peak)


def _checked_key(word: str, key: str, value: str) -> str:
    name = key.removeprefix("--").replace("-", "_")
    if name not in OWN:
        raise ConfigError(f"{FLAG}: {word}: a dataset may have {', '.join(OWN)} of its own, not {key}")
    if name in _NUMBERS and not (value.isascii() and value.isdecimal() and int(value) > 0):
        raise ConfigError(f"{FLAG}: {word}: must be a number greater than 0")
    if not value:
        raise ConfigError(f"{FLAG}: {word} has no value")
    return name
