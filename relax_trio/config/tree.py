"""The configuration as one frozen tree, built once and passed explicitly.

Each section is a frozen attrs class; each field is one flag (`field_name` → `--field-name`) and one YAML key. Derived
numbers are properties with their formula. Not covered: parsing (parse.py), files (yaml_file.py), the rules that need
the file system or several sections (check.py).
"""

from __future__ import annotations

import json
from pathlib import Path

from attrs import Factory, field, frozen

from relax_trio.config.backend_tree import BackendConfig
from relax_trio.config.option import (
    fraction,
    grace,
    image_key_json,
    log_room,
    module_names,
    not_negative,
    option,
    positive,
)
from relax_trio.config.train_tree import ESTIMATORS as ESTIMATORS
from relax_trio.config.train_tree import RewardConfig as RewardConfig
from relax_trio.config.train_tree import TrainConfig as TrainConfig


@frozen(kw_only=True)
class AgentConfig:
    """The agent process of a Session."""

    agent_command: str | None = option(
        None, "Shell command that runs the agent, through /bin/bash -c.", metavar="COMMAND"
    )
    agent_cwd: Path = option(Path(), "Working directory of the agent.", metavar="DIR")
    agent_env: dict[str, str] = option(
        factory=dict,
        help="Extra variables for the agent; the last duplicate wins; RELAX_* is refused.",
        metavar="KEY=VALUE",
    )
    agent_env_pass: tuple[str, ...] = option(
        (), "Names let through although they hold KEY, TOKEN, SECRET or PASSWORD.", metavar="NAME"
    )
    agent_env_clear: bool = option(False, "Start from a minimal environment instead of the parent's.")
    agent_login_shell: bool = option(False, "Run the command with bash -lc.", why="login files are slow and surprising")
    agent_preload: tuple[str, ...] = option(
        (),
        "Start agents as forks of a warm parent that has these modules imported; "
        "the command must be PYTHON FILE|-m MODULE ARGS.",
        metavar="MODULE[,MODULE…]",
        check=module_names,
    )
    agent_timeout: float = option(
        1800.0,
        "Active-time budget of a Session.",
        unit="s",
        why="long enough for tool-heavy tasks",
        check=positive,
    )
    agent_term_grace: float = option(
        5.0, "Time between SIGTERM and SIGKILL when an agent is ended.", unit="s", check=grace
    )
    agent_log_bytes: int = option(
        16 * 1024 * 1024,
        "Most of run.log that is kept: its start and its newest part.",
        unit="bytes",
        why="an agent that floods its output must not fill the disk",
        check=log_room,
    )
    keep_session_dirs: str = option(
        "failed",
        "Which Sessions' IO directories are kept under RUN_DIR/sessions.",
        choices=("never", "failed", "always"),
    )

    @property
    def preload_modules(self) -> tuple[str, ...]:
        """The names in `agent_preload`, each word of which may hold several between commas."""
        return tuple(name for word in self.agent_preload for name in word.split(","))


@frozen(kw_only=True)
class DataConfig:
    """The dataset of the run."""

    prompt_data: str | None = option(
        None, "Dataset: JSON Lines or Parquet; PATH@[a:b] takes a slice of the rows.", metavar="PATH"
    )
    input_key: str = option("input", "Row key of the prompt: a string or a message list.", metavar="KEY")
    label_key: str | None = option(None, "Row key of the label.", metavar="KEY")
    metadata_key: str = option("metadata", "Row key of the metadata object.", metavar="KEY")
    multimodal_keys: str | None = option(
        None,
        "Row key of the images, as JSON; each image has one <image> in the prompt.",
        metavar='{"image":KEY}',
        check=image_key_json,
    )
    rollout_shuffle: bool = option(False, "Shuffle the rows anew in each epoch.")
    rollout_seed: int = option(42, "Seed of the shuffle and of deterministic sampling.")

    @property
    def image_key(self) -> str | None:
        """The row key in `multimodal_keys`."""
        return None if self.multimodal_keys is None else str(json.loads(self.multimodal_keys)["image"])


@frozen(kw_only=True)
class RolloutConfig:
    """Sizes, sampling and retries of rollout."""

    use_agentic_rollout: bool = option(True, "Accepted for compatibility: this is the only path.")
    num_rollout: int | None = option(
        None, "Rollout steps of the run; default: one epoch.", unit="steps", check=positive
    )
    rollout_batch_size: int = option(8, "Groups that a step trains on.", unit="Groups", check=positive)
    n_samples_per_prompt: int = option(8, "Sessions per Group.", unit="Sessions", check=positive)
    over_sampling_batch_size: int | None = option(
        None, "Groups at work at once; default: --rollout-batch-size.", unit="Groups", check=positive
    )
    agentic_concurrency: int | None = option(
        None,
        "Most Groups resident at once, from first process to last; default: --over-sampling-batch-size.",
        unit="Groups",
        check=positive,
    )
    rollout_temperature: float = option(1.0, "Sampling temperature; 0 is greedy.", check=not_negative)
    rollout_top_p: float = option(1.0, "Nucleus sampling mass.", check=fraction)
    rollout_top_k: int = option(-1, "Sample from the k likeliest tokens; -1: from all.")
    rollout_max_response_len: int = option(1024, "Limit of one turn.", unit="tokens", check=positive)
    rollout_max_context_len: int | None = option(
        None, "Limit of a conversation; default: the model's.", unit="tokens", check=positive
    )
    rollout_stop: tuple[str, ...] = option((), "Stop strings of every turn.", metavar="TEXT")
    rollout_stop_token_ids: tuple[int, ...] = option((), "Stop token ids besides the end of turn.", metavar="ID")
    agentic_session_retries: int = option(
        2, "New Sessions at a place after a failure that is not the agent's.", check=not_negative
    )
    agentic_agent_retries: int = option(
        0,
        "New Sessions at a place after the agent failed.",
        why="an agent's failure is usually its own",
        check=not_negative,
    )
    max_row_failures: int = option(3, "Failures after which a row is set aside.", check=positive)
    agentic_reasoning_parser: str | None = option(None, "Reasoning parser by its SGLang name.", metavar="NAME")
    agentic_tool_call_parser: str | None = option(None, "Tool-call parser by its SGLang name.", metavar="NAME")
    agentic_unechoed_reasoning: str = option(
        "restore", "What an assistant message without its reasoning means.", choices=("restore", "fork")
    )
    dedup_shared_turns: bool = option(
        False,
        "Train a response that several contexts of a Session hold in the first of them only.",
        why="each context is complete by itself",
    )
    agentic_prelaunch: bool = option(
        False,
        "Start the next step's Groups while permits are free: during the step, the optimizer phase and eval.",
    )
    partial_rollout: bool = option(
        False, "Keep unfinished Groups across steps: attempts are aborted at the close and resumed in the next step."
    )
    partial_rollout_max_aborted_count: int = option(
        3,
        "Aborted attempts after which a Session is protected: never interrupted again; a close waits for it.",
        why="bounds how many weight versions one Session can span",
        check=positive,
    )
    partial_rollout_pause: str = option(
        "abort",
        "What partial rollout does with attempts at a close: abort and resume them, or pause SGLang servers until the "
        "next step, with attempts put back into their queues or held in place (where weights change, needs "
        "--allow-stale-kv).",
        why="works with every engine, and costs an engine that dies between steps no Session",
        choices=("abort", "retract", "in_place"),
    )
    agentic_abort_grace: float = option(
        10.0,
        "How long an aborted attempt may take to come back before it is given up.",
        unit="s",
        check=positive,
    )
    use_dynamic_global_batch_size: bool = option(
        False, "With partial rollout and oversampling: a step also trains on the surplus Groups that are complete."
    )
    fully_async: bool = option(False, "Train while rollout goes on; excludes --partial-rollout.")
    max_staleness: int | None = option(
        None,
        "Fully async: drop a Group whose oldest turn is more versions old when it is trained; default: no limit.",
        unit="versions",
        check=not_negative,
    )
    custom_generate_function_path: str | None = option(
        None, "Accepted with a warning; agentic rollout ignores it.", metavar="PATH"
    )
    deterministic: bool = option(False, "Same seed, same rewards: fixed widths, derived seeds, training in row order.")

    @property
    def retains_groups(self) -> bool:
        """Whether unfinished and surplus Groups outlive the close of a step."""
        return self.partial_rollout or self.fully_async

    @property
    def pauses_attempts(self) -> bool:
        """Whether the engine is paused at a close, where nothing else has to be generated until the next step."""
        return self.partial_rollout and self.partial_rollout_pause != "abort"

    @property
    def n_work_groups(self) -> int:
        """Groups at work at once: `over_sampling_batch_size` or `rollout_batch_size`."""
        return self.over_sampling_batch_size or self.rollout_batch_size

    @property
    def n_resident_groups(self) -> int:
        """Group permits shared by Prepare and Runtime: `agentic_concurrency` or `n_work_groups`."""
        return self.agentic_concurrency or self.n_work_groups

    @property
    def n_train_sessions(self) -> int:
        """T = agentic_concurrency * n_samples_per_prompt: the most train Sessions resident at once."""
        return self.n_resident_groups * self.n_samples_per_prompt


@frozen(kw_only=True)
class EvalConfig:
    """Evaluation between steps."""

    eval_prompt_data: tuple[str, ...] = option(
        (),
        "Datasets: NAME PATH [KEY=VALUE …] …, a KEY being an eval flag that holds for one of them alone.",
        metavar="NAME PATH",
    )
    eval_interval: int | None = option(
        None, "Evaluate before the first and after every N steps.", unit="steps", check=positive
    )
    n_samples_per_eval_prompt: int = option(1, "Sessions per eval row.", unit="Sessions", check=positive)
    eval_temperature: float = option(0.0, "Sampling temperature in eval.", why="greedy", check=not_negative)
    eval_max_response_len: int | None = option(
        None, "Limit of one turn in eval; default: the rollout's.", unit="tokens", check=positive
    )
    eval_max_context_len: int | None = option(
        None, "Limit of a conversation in eval; default: the rollout's.", unit="tokens", check=positive
    )
    eval_input_key: str | None = option(None, "Row key of the prompt in eval; default: --input-key.", metavar="KEY")
    eval_label_key: str | None = option(None, "Row key of the label in eval; default: --label-key.", metavar="KEY")
    agentic_eval_concurrency: int | None = option(
        None,
        "Resident eval Groups; default: ceil(T / samples per eval prompt).",
        unit="Groups",
        check=positive,
    )


@frozen(kw_only=True)
class ServerConfig:
    """The model API server."""

    host: str = option("127.0.0.1", "Address to listen on.", why="agents run here")
    port: int = option(0, "Port to listen on; 0 takes a free one.", check=not_negative)
    max_request_bytes: int = option(64 * 1024 * 1024, "Largest request body.", unit="bytes", check=positive)
    agentic_retry_grace: float = option(
        5.0, "How long a request goes on after its client left.", unit="s", check=not_negative
    )


@frozen(kw_only=True)
class OutputConfig:
    """Where evidence goes."""

    output_dir: Path | None = option(None, "Run directory; default: runs/<date>-<time>.", metavar="DIR")
    save_debug_rollout_data: str | None = option(
        None, "Dump every step's samples to PATH with {rollout_id} in it.", metavar="PATH"
    )
    use_tensorboard: bool = option(False, "Write metrics to RUN_DIR/tensorboard too; needs relax-trio[tensorboard].")
    use_wandb: bool = option(False, "Tell metrics to Weights & Biases too; needs relax-trio[wandb].")
    wandb_project: str = option("relax-trio", "Project of the W&B run.", metavar="NAME")
    wandb_group: str | None = option(None, "Group of the W&B run.", metavar="NAME")
    wandb_mode: str = option("online", "offline keeps the W&B run in RUN_DIR/wandb.", choices=("online", "offline"))
    stall_warning: float = option(
        60.0, "Log a wait longer than this with its chain of owners.", unit="s", check=positive
    )


@frozen(kw_only=True)
class Config:
    """The whole configuration: one section per concern."""

    agent: AgentConfig = field(default=Factory(AgentConfig))
    data: DataConfig = field(default=Factory(DataConfig))
    rollout: RolloutConfig = field(default=Factory(RolloutConfig))
    eval: EvalConfig = field(default=Factory(EvalConfig))
    backend: BackendConfig = field(default=Factory(BackendConfig))
    reward: RewardConfig = field(default=Factory(RewardConfig))
    train: TrainConfig = field(default=Factory(TrainConfig))
    server: ServerConfig = field(default=Factory(ServerConfig))
    output: OutputConfig = field(default=Factory(OutputConfig))
