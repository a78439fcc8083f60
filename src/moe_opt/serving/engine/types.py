"""What crosses the engine's boundary: requests in, events out. Without torch, so that the API stays light."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from moe_opt.errors import MoEOptError
from moe_opt.modeling.score_item import ScoreItem

if TYPE_CHECKING:
    from moe_opt.serving.engine.kv_state import KVState

FinishReason = Literal["length", "eos_token", "stop_sequence"]
Phase = Literal["prefill", "decode"]


class EngineError(MoEOptError):
    """Base of what the engine reports about one request. The loop goes on."""


class InvalidRequestError(EngineError, ValueError):
    """The request can never run: too long, a parameter out of range, a grammar that does not compile (422)."""


class OverloadedError(EngineError):
    """The waiting queue is full; the request was not taken (429)."""


class GenerationError(EngineError):
    """Something failed while the request ran; it alone is finished with this error (424)."""


class EngineClosedError(EngineError):
    """The engine is draining or closed and takes no requests (503)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Grammar:
    """What the generated text must match.

    Attributes:
        type: "json" (value: a JSON schema, as a dict or a JSON string) or "regex" (value: the pattern, for all text).
    """

    type: Literal["json", "regex"]
    value: str | dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request chooses its tokens; names and meaning are TGI's. None or the neutral value switches a part off.

    Attributes:
        do_sample: False takes the best token after penalties and grammar (greedy), whatever the warpers say. TGI
            samples as soon as temperature, top_k, top_p or typical_p is set: the API decides that, not the engine.
        temperature: above 0. top_k: keep the k best, at least 1. top_p, typical_p: in (0, 1].
        repetition_penalty: above 0, 1 is none; divides positive and multiplies negative logits of every token of
            prompt and output (CTRL). frequency_penalty, presence_penalty: in [-2, 2], subtracted from the logit of a
            token once per occurrence in the output, or once if it occurred (OpenAI's definition).
        seed: int64; the same seed gives the same tokens whatever else is in the batch. None draws one.
        max_new_tokens: at least 1; None means as many as `max_total_tokens` leaves.
        stop: strings that end the request; the text up to and including the first one is returned.
        ignore_eos: go on after an end-of-sequence token.
        top_n_tokens: how many of the most likely tokens each event lists. decoder_input_details: prompt logprobs.
        watermark: Kirchenbauer et al. (arXiv 2301.10226), with TGI's gamma 0.5 and delta 2.
    """

    do_sample: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    top_n_tokens: int = 0
    decoder_input_details: bool = False
    watermark: bool = False
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        _require(self.temperature is None or _finite(self.temperature) > 0, "temperature", "above 0", self.temperature)
        _require(self.top_k is None or self.top_k >= 1, "top_k", "at least 1", self.top_k)
        for name in ("top_p", "typical_p"):
            value = getattr(self, name)
            _require(value is None or 0 < _finite(value) <= 1, name, "in (0, 1]", value)
        penalty = self.repetition_penalty
        _require(penalty is None or _finite(penalty) > 0, "repetition_penalty", "above 0", penalty)
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            _require(value is None or -2 <= _finite(value) <= 2, name, "in [-2, 2]", value)
        _require(self.seed is None or 0 <= self.seed < 2**64, "seed", "an unsigned 64-bit integer", self.seed)
        limit = self.max_new_tokens
        _require(limit is None or limit >= 1, "max_new_tokens", "at least 1", limit)
        _require(self.top_n_tokens >= 0, "top_n_tokens", "at least 0", self.top_n_tokens)
        _require(all(self.stop), "stop", "non-empty strings", self.stop)


def _finite(value: float) -> float:
    """The value, or NaN, which fails every comparison, for what is no finite number."""
    return float(value) if math.isfinite(value) else math.nan


def _require(condition: bool, name: str, what: str, value: Any) -> None:
    if not condition:
        raise InvalidRequestError(f"`{name}` must be {what}, got {value!r}")


@dataclasses.dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate. `best_of` and truncation are the API's: it submits several of these, or shorter ones.

    Attributes:
        request_id: unique among the requests in the engine. prompt_ids: token ids, at least one.
        exact: the experts that the router chose compute every token of this request, whatever the brownout setting,
            and it reads only KV pages that were computed so.
        adapter: salts the prefix cache; the engine runs the model's active adapter, whatever this says.
        expert_counts: ask for the router's choices (`FinishEvent.expert_counts`).
        generated_ids: output that another engine produced before this one goes on; it counts as generated, and events
            begin behind it. kv: KV of the first of all these tokens, where there is some; what it lacks is computed.
        hand_off: ask for the KV of the prompt (`FinishEvent.kv`), for another engine to go on with.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams = SamplingParams()
    exact: bool = False
    adapter: str | None = None
    expert_counts: bool = False
    generated_ids: tuple[int, ...] = ()
    kv: KVState | None = None
    hand_off: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Token:
    """A token as TGI shows it. `logprob` is that of the model's raw distribution (before penalties and warpers);
    None for the first prompt token. `text` is the piece that this token adds to the text so far: "" while a character
    is incomplete, and the whole character with the token that completes it."""

    id: int
    text: str
    logprob: float | None
    special: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token.

    Attributes:
        index: 0 for the first generated token. top_tokens: the `top_n_tokens` most likely, best first.
        phase: of the step that produced it ("prefill" whenever the step held a prefill row).
        threshold: brownout threshold that applied to this row in that step, 1 for exact output.
        browned_share: share of the step's expert assignments that their own expert did not compute, over all its
            browned rows and all MoE layers; 0 for an exact row or an exact step.
        time: `time.monotonic()` when the engine handed it over.
    """

    request_id: str
    index: int
    token: Token
    top_tokens: tuple[Token, ...] = ()
    phase: Phase = "decode"
    threshold: float = 1.0
    browned_share: float = 0.0
    time: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Timings:
    """Seconds. queue: submission to the first step that ran it; prefill: from there to the first token; decode: first
    to last token; inference = prefill + decode."""

    queue: float
    prefill: float
    decode: float

    @property
    def inference(self) -> float:
        return self.prefill + self.decode

    @property
    def time_to_first_token(self) -> float:
        return self.queue + self.prefill


@dataclasses.dataclass(frozen=True, slots=True)
class FinishEvent:
    """The last event of a request that ended well.

    Attributes:
        generated_text: all of the generated text, cut behind a stop sequence; special tokens left out.
        prompt_tokens, generated_tokens: counts. cached_tokens: prompt tokens whose KV came from the prefix cache.
        seed: the seed that was used, None for greedy. prefill: prompt tokens with logprobs (`decoder_input_details`).
        browned: whether any step of it ran below threshold 1 (cached pages included).
        browned_share: mean of its events' `browned_share`. lowest_threshold: of all its steps, prefill included.
        expert_counts: int64 [L, E], the router's choices for prompt tokens, prefix hits included; None unless asked.
        decode_expert_counts: the same for generated tokens.
        preemptions: how often it was recomputed because pages ran out.
        kv: KV of the prompt, where the request asked for it. imported_tokens: tokens whose KV came with the request.
    """

    request_id: str
    finish_reason: FinishReason
    generated_text: str
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    timings: Timings
    seed: int | None = None
    prefill: tuple[Token, ...] = ()
    browned: bool = False
    browned_share: float = 0.0
    lowest_threshold: float = 1.0
    expert_counts: np.ndarray | None = None
    decode_expert_counts: np.ndarray | None = None
    preemptions: int = 0
    kv: KVState | None = None
    imported_tokens: int = 0


Event = TokenEvent | FinishEvent


@dataclasses.dataclass(frozen=True, slots=True)
class StepReport:
    """What one engine step did; handed to `on_step` on the engine's thread, right after the step.

    Attributes:
        phase: "prefill" if any row was a prefill row. seconds: the whole step; forward_seconds: the model alone.
        requests, prefill_tokens, decode_tokens: what was in the batch.
        ttft: per first token produced, seconds since its request was submitted.
        tpot: per later token produced, seconds since the request's previous token.
        threshold: of the phase's brownout setting. active_experts: mean per MoE layer of distinct expert weights read,
            where `EngineConfig.step_statistics` asks for it, else None.
        time: `time.monotonic()` at the end of the step.
    """

    phase: Phase
    seconds: float
    forward_seconds: float
    requests: int
    prefill_tokens: int
    decode_tokens: int
    ttft: tuple[float, ...]
    tpot: tuple[float, ...]
    threshold: float
    browned_share: float
    active_experts: float | None
    time: float


@dataclasses.dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot, consistent between two steps.

    Pages: free + used + cached == total. `used` are held by running requests (shared ones counted once), `cached` hold
    a prefix that no running request reads and are reclaimed when needed.
    """

    running: int
    waiting: int
    total_pages: int
    free_pages: int
    used_pages: int
    cached_pages: int
    kv_tokens: int
    page_size: int
    steps: int
    prefill_tokens: int
    generated_tokens: int
    finished: int
    cancelled: int
    failed: int
    preemptions: int
    prefix_hit_tokens: int
    prefix_query_tokens: int
    last_step_seconds: float
    draining: bool


@dataclasses.dataclass(frozen=True, slots=True)
class BrownoutSetting:
    """Brownout of one phase, as `MoERuntime.brownout` reports it."""

    threshold: float
    strategy: str
    keep: str
    layers: tuple[int, ...] | None


@dataclasses.dataclass(frozen=True, slots=True)
class BrownoutStatus:
    """What browns out now. `ways` is None without united experts."""

    prefill: BrownoutSetting
    decode: BrownoutSetting
    ways: int | None


class EngineClient(Protocol):
    """What the API calls; `moe_opt.serving.engine.async_engine.AsyncEngine` is the one that runs a model:

    `AsyncEngine(model, tokenizer, config: EngineConfig, *, on_step: Callable[[StepReport], None] | None = None)`, where
    `model` is a loaded `MoEOptimizedForCausalLM` in eval mode. One event loop uses it; the model runs on a thread.
    """

    @property
    def max_total_tokens(self) -> int:
        """Prompt plus generated tokens that one request may have, resolved from config, model and pages."""
        ...

    @property
    def alive(self) -> bool:
        """Whether the engine's thread runs."""
        ...

    @property
    def group_leaves(self) -> bool:
        """Whether a rank of this engine's expert-parallel group wants to end, so that all have to."""
        ...

    def leave(self) -> None:
        """Tell the other ranks of an expert-parallel group that this one wants to end."""
        ...

    async def start(self) -> None: ...

    def submit(self, request: GenerationRequest) -> AsyncIterator[Event]:
        """Queue a request. Raises InvalidRequestError, OverloadedError or EngineClosedError at once, before anything
        is iterated. The iterator yields TokenEvents and one FinishEvent, or raises GenerationError, or
        InvalidRequestError for a grammar that does not compile. Closing the iterator cancels the request."""
        ...

    def cancel(self, request_id: str) -> None:
        """Stop a request; unknown and finished ids are ignored. Its iterator ends without a FinishEvent."""
        ...

    def stats(self) -> EngineStats: ...

    def brownout(self) -> BrownoutStatus: ...

    async def set_brownout(self, **settings: Any) -> None:
        """`MoERuntime.set_brownout` between two steps, with its keywords and its ConfigError."""
        ...

    def set_brownout_soon(self, **settings: Any) -> None:
        """The same without waiting, from any thread, also from `on_step`; a refusal is logged."""
        ...

    async def swap_united(self, united: Any) -> None:
        """Attach another `UnitedExperts`, or None to take them off, between two steps; thresholds stay where the new
        ones allow it."""
        ...

    async def score(self, items: Sequence[ScoreItem]) -> list[list[float]]:
        """Log-probabilities of each item's choices (`modeling.scoring.score_items`), exact whatever the brownout, no
        pages used. Runs between steps, a batch at a time."""
        ...

    async def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests and wait for those in flight; False if the timeout (seconds) came first."""
        ...

    async def close(self) -> None:
        """End the thread; what still runs gets EngineClosedError."""
        ...
