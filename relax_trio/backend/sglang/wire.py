"""What is said to an SGLang server and what it says, as plain functions over bytes: no HTTP, no waiting.

Every request is built here, field by field: nothing that an agent or a dataset says becomes a field. An answer is
checked before anybody builds on it.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Sequence
from typing import Literal, cast

from attrs import evolve, frozen

from relax_trio.backend.base import SamplingParams
from relax_trio.data.json import JsonObject, JsonValue, parse_json
from relax_trio.data.sample import VersionSpan
from relax_trio.errors import BackendError, BackendProtocolError, BackendRejected, BackendUnavailable
from relax_trio.ids import WeightVersion

Finish = Literal["stop", "length", "abort"]

_FINISHES: dict[str, Finish] = {"stop": "stop", "length": "length", "abort": "abort"}
_SEED_BITS = 31
_FORBIDDEN_BIAS = -1e9
"""Added to the logit of a token that may not be generated; whatever the temperature, no probability is left."""

_N_SHOWN = 500
_CONTEXT_WORDS = ("maximum context length", "the model's context length", "maximum allowed length")


@frozen(kw_only=True)
class WireImage:
    """An image as a server is sent it.

    Attributes:
      url: data: URL.
      key: hexadecimal name, 64 bits, under which the server may keep what its vision tower made of it.
    """

    url: str
    key: str


@frozen(kw_only=True)
class Leg:
    """What one `/generate` call brought.

    Attributes:
      token_ids, logprobs: `array('i')` and `array('d')`, equally long.
      finish: as the server says it.
      message: the server's words about an abort.
      prompt_len: tokens of the prompt as the server counts them; None where it never looked at it.
    """

    token_ids: array[int]
    logprobs: array[float]
    finish: Finish
    versions: tuple[VersionSpan, ...]
    stop_string: str | None = None
    cached_len: int = 0
    message: str = ""
    prompt_len: int | None = None

    def ended_at(self, n_tokens: int, stop_string: str) -> Leg:
        """The same leg, ended by a stop string after `n_tokens`."""
        versions, left = [], n_tokens
        for span in self.versions:
            if left > 0:
                versions.append(VersionSpan(version=span.version, n_tokens=min(span.n_tokens, left)))
            left -= span.n_tokens
        return evolve(
            self,
            token_ids=self.token_ids[:n_tokens],
            logprobs=self.logprobs[:n_tokens],
            finish="stop",
            versions=tuple(versions),
            stop_string=stop_string,
        )


@frozen(kw_only=True)
class ServerInfo:
    """What a server tells about itself.

    Attributes:
      version: SGLang's version.
      max_context_len: most tokens of prefix and completion that it really serves; it cuts longer ones silently.
      max_total_tokens: tokens of its KV cache.
      n_ranks: copies of serialized weights that it wants: one for each tensor-parallel rank.
      saves_memory: started with `--enable-memory-saver`, so that memory can be released.
      max_adapter_rank: of low-rank adapters that it takes; None: none.
      n_replicas, n_stages: data-parallel copies and pipeline stages.
      device: what it runs on, e.g. "cuda".
      watchdog_s: a batch that takes longer than this ends the server.
      model_path: what it serves: a directory on its machine, or a name.
    """

    version: str
    max_context_len: int
    max_total_tokens: int
    n_ranks: int = 1
    saves_memory: bool = False
    max_adapter_rank: int | None = None
    n_replicas: int = 1
    n_stages: int = 1
    device: str = "cuda"
    watchdog_s: float = 300.0
    model_path: str = ""


def generate_body(
    rid: str,
    token_ids: array[int],
    sampling: SamplingParams,
    max_new_tokens: int,
    session_id: str | None = None,
    *,
    images: Sequence[WireImage] = (),
    forbidden_ids: Sequence[int] = (),
    routing_key: str | None = None,
    adapter: str | None = None,
) -> bytes:
    """The body of `/generate` for one leg of an attempt.

    Every sampling parameter that a server could have a default of its own for is written out.

    Args:
      images: what the placeholders among `token_ids` stand for, one each.
      forbidden_ids: never generated; logprobs are those of the distribution without them.
      routing_key: names the Session to a server that schedules or counts by it; others take no notice.
      adapter: name of the adapter on the server that the tokens are to be of.
    """
    params: JsonObject = {
        "max_new_tokens": max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": False,
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "n": 1,
    }
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed % (1 << _SEED_BITS)
    if forbidden_ids:
        params["logit_bias"] = {str(token_id): _FORBIDDEN_BIAS for token_id in forbidden_ids}
    ids: list[JsonValue] = list(token_ids)
    body: JsonObject = {
        "rid": rid,
        "input_ids": ids,
        "sampling_params": params,
        "return_logprob": True,
        "stream": False,
    }
    if session_id is not None:
        body["session_id"] = session_id
    if routing_key is not None:
        body["routing_key"] = routing_key
    if adapter is not None:
        body["lora_path"] = adapter
    if images:
        body["image_data"] = [image.url for image in images]
        body["mm_hashes"] = [image.key for image in images]
    return json.dumps(body, separators=(",", ":")).encode()


def read_leg(status: int, body: bytes, what: str) -> Leg:
    """The answer to `/generate`.

    Args:
      what: names the attempt and the server, for errors.

    Raises:
      BackendRejected: refused for what was asked (400).
      BackendUnavailable: the server is in trouble (5xx).
      BackendProtocolError: the answer breaks SGLang's own contract.
    """
    answer = read_object(status, body, what)
    meta = answer.get("meta_info")
    if not isinstance(meta, dict):
        raise BackendProtocolError(f"{what}: the answer has no meta_info: {_shown(body)}")
    token_ids = _ids(answer.get("output_ids"), what)
    logprobs = _logprobs(meta.get("output_token_logprobs"), token_ids, what)
    reason = meta.get("finish_reason")
    finish = _FINISHES.get(str(reason.get("type"))) if isinstance(reason, dict) else None
    if not isinstance(reason, dict) or finish is None:
        raise BackendProtocolError(f"{what}: finish_reason is {reason!r}")
    matched, cached, prompt = reason.get("matched"), meta.get("cached_tokens"), meta.get("prompt_tokens")
    return Leg(
        token_ids=token_ids,
        logprobs=logprobs,
        finish=finish,
        versions=_spans(meta, len(token_ids), what),
        stop_string=matched if isinstance(matched, str) else None,
        cached_len=cached if isinstance(cached, int) else 0,
        message=str(reason.get("message") or ""),
        prompt_len=prompt if isinstance(prompt, int) else None,
    )


def has_spans(body: bytes) -> bool:
    """Whether the answer to `/generate` tells which version each token came from, and not only the last one."""
    meta = _object(body).get("meta_info")
    return isinstance(meta, dict) and isinstance(meta.get("weight_versions"), list)


def read_info(status: int, body: bytes, what: str) -> ServerInfo:
    """The answer to `/server_info`.

    Raises:
      BackendError: as `read_leg`.
    """
    answer = read_object(status, body, what)
    version, input_len, total = (answer.get(k) for k in ("version", "max_req_input_len", "max_total_num_tokens"))
    if not isinstance(version, str) or not isinstance(input_len, int) or not isinstance(total, int):
        raise BackendProtocolError(f"{what}: does not look like an SGLang server: {_shown(body)}")
    rank, device, watchdog_s = (answer.get(k) for k in ("max_lora_rank", "device", "watchdog_timeout"))
    return ServerInfo(
        version=version,
        # A prompt must be shorter than this, and prompt plus completion may be four longer: this serves both.
        max_context_len=input_len,
        max_total_tokens=total,
        n_ranks=_size(answer, "tp_size"),
        saves_memory=answer.get("enable_memory_saver") is True,
        max_adapter_rank=rank if answer.get("enable_lora") is True and isinstance(rank, int) else None,
        # Older servers count the data-parallel groups of attention with it, which are tensor-parallel ranks.
        n_replicas=1 if answer.get("enable_dp_attention") is True else _size(answer, "dp_size"),
        n_stages=_size(answer, "pp_size"),
        device=device if isinstance(device, str) else "cuda",
        watchdog_s=float(watchdog_s) if isinstance(watchdog_s, int | float) else 300.0,
        model_path=path if isinstance(path := answer.get("model_path"), str) else "",
    )


def read_object(status: int, body: bytes, what: str) -> JsonObject:
    """The JSON object that an answer holds; an error status becomes an error.

    Raises:
      BackendRejected: 4xx.
      BackendUnavailable: 5xx.
      BackendProtocolError: no JSON object, or a path that does not exist.
    """
    require_ok(status, body, what)
    try:
        value = parse_json(body)
    except ValueError as exc:
        raise BackendProtocolError(f"{what}: the answer is no JSON ({exc}): {_shown(body)}") from exc
    if not isinstance(value, dict):
        raise BackendProtocolError(f"{what}: the answer is no object: {_shown(body)}")
    return value


def require_ok(status: int, body: bytes, what: str) -> None:
    """Turn an error status into an error; see `read_object`."""
    if status == 200:
        return
    message = error_message(body)
    error: type[BackendError]
    if status >= 500:
        error = BackendUnavailable
    elif status in (404, 405):
        error = BackendProtocolError
    else:
        error = BackendRejected
        if any(words in message for words in _CONTEXT_WORDS):
            message = f"exceeds the context of the server: {message}"
    raise error(f"{what}: HTTP {status}: {message}")


def error_message(body: bytes) -> str:
    """The words of an error answer; SGLang and FastAPI have four shapes for them."""
    found = _object(body)
    error = found.get("error")
    for value in (
        error.get("message") if isinstance(error, dict) else error,
        found.get("message"),
        found.get("detail"),
    ):
        if isinstance(value, str):
            return value[:_N_SHOWN]
    return _shown(body)


def read_success(status: int, body: bytes, what: str) -> str:
    """The message of an answer `{"success": …, "message": …}` that tells of success.

    Raises:
      BackendError: the status or the answer tells of failure.
    """
    answer = read_object(status, body, what)
    message = str(answer.get("message"))
    if answer.get("success") is not True:
        raise BackendRejected(f"{what}: {message}")
    return message


def read_adapter_success(status: int, body: bytes, what: str) -> None:
    """As `read_success`, of the paths for adapters, which have other words for it.

    Raises:
      BackendError: the status or the answer tells of failure.
    """
    if status == 400 and isinstance(message := _object(body).get("error_message"), str):
        raise BackendRejected(f"{what}: {message[:_N_SHOWN]}")
    answer = read_object(status, body, what)
    if answer.get("success") is not True:
        raise BackendRejected(f"{what}: {answer.get('error_message')}")


def _size(answer: JsonObject, name: str) -> int:
    value = answer.get(name)
    return value if isinstance(value, int) else 1


def _object(body: bytes) -> JsonObject:
    try:
        value = parse_json(body)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _ids(value: JsonValue, what: str) -> array[int]:
    if not isinstance(value, list):
        raise BackendProtocolError(f"{what}: the answer has no output_ids")
    try:
        return array("i", value)  # type: ignore[arg-type]  # a list of anything else is the error below
    except (TypeError, OverflowError) as exc:
        raise BackendProtocolError(f"{what}: output_ids are no token ids: {exc}") from exc


def _logprobs(value: JsonValue, token_ids: array[int], what: str) -> array[float]:
    """`array('d')` of the first of each `[logprob, id, text]`; the ids must be those of the output."""
    rows = cast("list[list[float]]", value) if isinstance(value, list) else []
    if len(rows) != len(token_ids):
        raise BackendProtocolError(f"{what}: {len(rows)} logprobs for {len(token_ids)} tokens")
    try:
        logprobs = array("d", [row[0] for row in rows])
        ids = [row[1] for row in rows]
    except (TypeError, IndexError, KeyError) as exc:
        raise BackendProtocolError(f"{what}: output_token_logprobs are not [logprob, id, …]: {exc}") from exc
    if ids != token_ids.tolist():
        raise BackendProtocolError(f"{what}: the logprobs are not those of the output's tokens")
    if not all(map(math.isfinite, logprobs)):
        raise BackendProtocolError(f"{what}: a logprob is not finite")
    return logprobs


def _spans(meta: JsonObject, n_tokens: int, what: str) -> tuple[VersionSpan, ...]:
    """Versions of the tokens: spans where the server tells them, else its one version for all."""
    told = meta.get("weight_versions")
    if not isinstance(told, list):
        version = meta.get("weight_version")
        if not isinstance(version, str):
            raise BackendProtocolError(f"{what}: the answer names no weight version")
        return (VersionSpan(version=WeightVersion(version), n_tokens=n_tokens),) if n_tokens else ()
    spans: list[VersionSpan] = []
    at = 0
    for span in told:
        version, start, end = (span.get(k) if isinstance(span, dict) else None for k in ("version", "start", "end"))
        if not isinstance(version, str) or start != at or not isinstance(end, int) or end < at:
            raise BackendProtocolError(f"{what}: weight versions are not in one piece: {told!r}")
        if end > at:
            spans.append(VersionSpan(version=WeightVersion(version), n_tokens=end - at))
        at = end
    if at != n_tokens:
        raise BackendProtocolError(f"{what}: weight versions for {at} of {n_tokens} tokens")
    return tuple(spans)


def _shown(body: bytes) -> str:
    return body[:_N_SHOWN].decode(errors="replace").strip() or "(empty)"
