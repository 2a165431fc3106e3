"""The section `backend` of the configuration: the engine inside this process, and SGLang servers."""

from __future__ import annotations

from attrs import frozen

from relax_trio.config.option import fraction, not_negative, option, positive


@frozen(kw_only=True)
class BackendConfig:
    """The engine that serves the model."""

    hf_checkpoint: str | None = option(
        None, "Hugging Face checkpoint directory, or `demo` for the built-in model.", metavar="DIR"
    )
    rollout_backend: str = option(
        "embedded",
        "What generates: torch in this process, or SGLang servers.",
        why="needs no GPU and no second installation",
        choices=("embedded", "sglang"),
    )
    sglang_num_servers: int = option(1, "SGLang servers that the run starts.", unit="servers", check=positive)
    sglang_python: str | None = option(
        None, "Python that has SGLang installed; default: the one this runs in.", metavar="PATH"
    )
    sglang_args: tuple[str, ...] = option(
        (),
        "Flags of SGLang's own server, as they are: --sglang-tp-size 2 is its --tp-size 2. "
        "In a file: a list of such words, leading dashes included.",
        metavar="WORD",
        passes="sglang-",
    )
    sglang_gpus: tuple[int, ...] = option(
        (), "GPUs that the servers share out among them, in this order; default: all.", metavar="INDEX"
    )
    sglang_max_restarts: int = option(
        3, "How often one server is started again after it died or hung.", check=not_negative
    )
    sglang_start_timeout: float = option(
        600.0,
        "Time from a server's start until it generates.",
        unit="s",
        why="large weights load slowly",
        check=positive,
    )
    engine_health_timeout: float = option(
        30.0,
        "A server that is not well for so long gets no work; one of the run is started again.",
        unit="s",
        check=positive,
    )
    sglang_server: tuple[str, ...] = option((), "Use these servers instead of starting any.", metavar="URL")
    sglang_router_ip: str | None = option(
        None, "Use the workers of this SGLang router instead of starting servers.", metavar="HOST"
    )
    sglang_router_port: int = option(30000, "Port of the router.", check=positive)
    sglang_routing: str = option(
        "least_loaded",
        "Which server an attempt goes to: the one with the fewest, or always the same for a Session.",
        why="a Session's prefix is worth less than an idle server, until it is long",
        choices=("least_loaded", "session"),
    )
    sglang_update_recipe: str = option(
        "auto",
        "What happens to attempts while weights change: they end first, are aborted and resumed, put back into the "
        "server's queue, or go on in place with the old weights' cache (needs --allow-stale-kv).",
        why="retract where the server's version can do it, else abort",
        choices=("auto", "drain", "abort", "retract", "in_place"),
    )
    sglang_weight_transfer: str = option(
        "disk",
        "How new weights get to the servers: through a checkpoint directory, inside requests, or by broadcast (NCCL; "
        "Gloo to servers on the CPU).",
        choices=("disk", "tensor", "distributed"),
    )
    sglang_lora_transfer: str = option(
        "merged",
        "What servers get with --lora-rank: weights that have the adapter merged, or the adapter alone.",
        why="works with every server, and is served at full speed",
        choices=("merged", "adapter"),
    )
    colocate: bool = option(
        False,
        "Servers of the run give their GPU memory up while the trainer works: for trainer and servers on one GPU.",
    )
    allow_stale_kv: bool = option(False, "Let attempts use prefix caches that were computed under older weights.")
    agentic_session_lifecycle: bool = option(
        False, "Name the Session in each request to a server, and tell every server when it ends."
    )
    agentic_program_admission: bool = option(
        False,
        "Let attempts wait, in one line, until the servers' KV pools have room for all they are expected to hold.",
    )
    agentic_admission_headroom: float = option(
        0.90, "Share of all KV pools that admitted attempts may be expected to hold.", check=fraction
    )
    agentic_admission_pressure_threshold: float = option(
        0.92, "Nothing is admitted while a server's token usage is this or more.", check=fraction
    )
    agentic_admission_expected_decode_cap: int | None = option(
        None,
        "Most new tokens that an attempt is expected to make; default: all that it may.",
        unit="tokens",
        check=positive,
    )
    agentic_admission_max_wait_s: float = option(
        30.0,
        "Who waited so long for admission passes.",
        unit="s",
        why="bounds what a wrong reading costs",
        check=positive,
    )
    agentic_admission_scope: str = option("train", "Whose attempts admission holds up.", choices=("train", "all"))
    embedded_max_batch: int = option(64, "Attempts that decode together in the embedded engine.", check=positive)
    embedded_dtype: str = option("float32", "Weights of the embedded engine.", choices=("float32", "bfloat16"))
    embedded_threads: int | None = option(None, "Torch threads; default: one per core.", check=positive)
