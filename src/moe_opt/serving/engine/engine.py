"""The engine's core: requests in, one step at a time, events out. Single-threaded and free of clocks' whims, so that
tests can drive it step by step; `async_engine.AsyncEngine` runs it on a thread."""

from __future__ import annotations

import dataclasses
import logging
import secrets
import time
from collections.abc import Callable
from collections.abc import Sequence as Listing
from typing import Any

import torch

from moe_opt.modeling.phase_settings import PHASES
from moe_opt.modeling.score_item import ScoreItem
from moe_opt.modeling.united import UnitedExperts, attach_united_experts, detach_united_experts
from moe_opt.serving.engine.config import EngineConfig
from moe_opt.serving.engine.grammar import GrammarCompiler, GrammarState
from moe_opt.serving.engine.kv_state import KVState
from moe_opt.serving.engine.model_runner import ModelRunner, Pass
from moe_opt.serving.engine.output import OutputProcessor, end_of_sequence_ids
from moe_opt.serving.engine.pages import PagePool
from moe_opt.serving.engine.sampling import PenaltyState, Sampled, SampleRow, prompt_logprobs, sample
from moe_opt.serving.engine.scheduler import Plan, Row, Scheduler
from moe_opt.serving.engine.score_job import ScoreJob
from moe_opt.serving.engine.sequence import Sequence
from moe_opt.serving.engine.types import (
    BrownoutSetting,
    BrownoutStatus,
    EngineStats,
    Event,
    FinishEvent,
    GenerationError,
    GenerationRequest,
    InvalidRequestError,
    OverloadedError,
    StepReport,
    TokenEvent,
)

logger = logging.getLogger(__name__)

# What a step says about a request: a token, the end, or that it failed.
Outcome = tuple[str, Event | Exception]


class Engine:
    """Continuous batching of one model.

    Args:
        model: a loaded `MoEOptimizedForCausalLM`; its attention belongs to the engine until `close`.
        tokenizer: its tokenizer. on_step: called after every step, on the thread that calls `step`.

    Raises:
        UnsupportedModelError, ConfigError: the engine cannot serve this model, or not with these bounds.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        config: EngineConfig | None = None,
        *,
        on_step: Callable[[StepReport], None] | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        self.runner = ModelRunner(model, self.config)
        self.pool = PagePool(self.runner.num_pages, self.config.page_size)
        self.scheduler = Scheduler(self.config, self.pool)
        eos_ids = end_of_sequence_ids(model, tokenizer)
        self.output = OutputProcessor(tokenizer, eos_ids)
        self.grammars = GrammarCompiler(tokenizer, self.runner.vocab_size, sorted(eos_ids))
        self._on_step = on_step
        self._sequences: dict[str, Sequence] = {}
        self._serial = 0
        self._steps = 0
        self._prefill_tokens = 0
        self._generated_tokens = 0
        self._finished = self._cancelled = self._failed = 0
        self._last_step_seconds = 0.0
        self._closed = False
        self.wanted_thresholds = {phase: self.runner.runtime.brownout(phase).threshold for phase in PHASES}

    # ------------------------------------------------------------- requests

    @property
    def max_total_tokens(self) -> int:
        """Prompt plus generated tokens that one request may have."""
        return self.runner.max_total_tokens

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    def check_request(self, request: GenerationRequest) -> None:
        """Raises InvalidRequestError for a request that could never run. Safe from any thread."""
        if not request.prompt_ids:
            raise InvalidRequestError("the prompt has no tokens")
        ids = request.prompt_ids + request.generated_ids
        highest, lowest = max(ids), min(ids)
        if lowest < 0 or highest >= self.runner.vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise InvalidRequestError(f"token id {wrong} is outside the vocabulary of {self.runner.vocab_size}")
        wanted = request.params.max_new_tokens or 1
        if len(request.prompt_ids) + wanted > self.max_total_tokens:
            raise InvalidRequestError(
                f"{len(request.prompt_ids)} prompt tokens and `max_new_tokens` {wanted} are more than the "
                f"{self.max_total_tokens} tokens that a request may have"
            )

    def add(self, request: GenerationRequest, grammar: GrammarState | None = None) -> None:
        """Queue a request.

        Args:
            grammar: the compiled `request.params.grammar`, if the caller did that already.

        Raises:
            InvalidRequestError, OverloadedError.
        """
        self.check_request(request)
        if request.request_id in self._sequences:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use")
        bound = self.config.max_waiting + self.config.max_batch_size
        if len(self._sequences) >= bound:
            raise OverloadedError(f"{bound} requests run or wait already: try again later")
        if request.kv is not None and not self.takes(request):
            request = dataclasses.replace(request, kv=None)
        params = request.params
        if params.grammar is not None and grammar is None:
            grammar = self.grammars.compile(params.grammar)
        limit = params.max_new_tokens or self.max_total_tokens - len(request.prompt_ids)
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        sequence = Sequence(request, self._serial, limit, seed, arrival=time.monotonic())
        sequence.grammar = grammar
        sequence.detokenizer = self.output.detokenizer(request.prompt_ids)
        if PenaltyState.wanted(params):
            sequence.penalties = PenaltyState(request.prompt_ids, self.runner.vocab_size, self.runner.device)
        self._replay(sequence)
        self._serial += 1
        self._sequences[request.request_id] = sequence
        self.scheduler.add(sequence)

    def _replay(self, sequence: Sequence) -> None:
        """Take in the output that another engine produced, as if it had been produced here."""
        for token in sequence.request.generated_ids:
            if sequence.finish_reason is not None:
                raise InvalidRequestError("generated_ids go on behind the request's end")
            sequence.tokens.append(token)
            if sequence.penalties is not None:
                sequence.penalties.add(token)
            self.output.take(sequence, token)

    def takes(self, request: GenerationRequest) -> bool:
        """Whether the KV that came with a request is of use to it here; without it everything is computed."""
        kv = request.kv
        if kv is None or request.params.decoder_input_details or (request.exact and kv.browned_from is not None):
            return False
        if kv.fingerprint != self.runner.fingerprint:
            logger.warning("KV of another model came with request %s: it is computed here", request.request_id)
            return False
        return kv.covers([*request.prompt_ids, *request.generated_ids])

    def cancel(self, request_id: str) -> bool:
        """Stop a request and free its pages; False if it is not here (any more)."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return False
        self.scheduler.remove(sequence)
        self._cancelled += 1
        return True

    # ------------------------------------------------------------- brownout

    def brownout(self) -> BrownoutStatus:
        """The settings of both phases, and the ways of the united experts."""
        runtime = self.runner.runtime
        phases = {}
        for phase in ("prefill", "decode"):
            found = runtime.brownout(phase)
            layers = None if found.layers is None else tuple(sorted(found.layers))
            phases[phase] = BrownoutSetting(found.threshold, found.strategy, found.keep, layers)
        ways = runtime.united_config.ways if runtime.united_config is not None else None
        return BrownoutStatus(phases["prefill"], phases["decode"], ways)

    def set_brownout(self, **settings: Any) -> None:
        """`MoERuntime.set_brownout`; applies from the next step on, in an expert-parallel group with the lowest
        threshold that a rank wants."""
        self.runner.runtime.set_brownout(**settings)
        if settings.get("threshold") is not None:
            phase = settings.get("phase")
            for name in PHASES if phase is None else (phase,):
                self.wanted_thresholds[name] = self.runner.runtime.brownout(name).threshold

    def swap_united(self, united: UnitedExperts | None) -> None:
        """Exchange the united experts, or take them off (None). Nothing that runs fails; KV pages that old ones had a
        part in are not reused."""
        if united is None:
            detach_united_experts(self.runner.model)
        else:
            attach_united_experts(self.runner.model, united)
        self.runner.weights_moved()
        self.scheduler.forget_browned()

    def idle(self) -> None:
        """A step of an expert-parallel group in which this rank has nothing to do."""
        self.runner.idle()

    def plan_scores(self, items: Listing[ScoreItem]) -> ScoreJob:
        """The passes that score these items (`EngineClient.score`); safe from any thread."""
        return self.runner.plan_scores(items)

    def score_pass(self, job: ScoreJob) -> None:
        """Run the next pass of a job; it may stand between any two steps."""
        self.runner.score_pass(job)

    # ------------------------------------------------------------- the step

    def step(self) -> list[Outcome]:
        """Run one batch. Returns what happened to whom, in order; empty if there was nothing to do."""
        started = time.monotonic()
        over = [s for s in self.scheduler.waiting if s.finish_reason is not None]
        if over:  # continued requests that had ended already
            return [self._end_replayed(sequence, started) for sequence in over]
        try:
            plan = self.scheduler.schedule(reuse_browned=self._browning())
        except Exception as error:  # a bug, then: nothing that was planned with it can be trusted
            logger.exception("scheduling failed with %d requests", len(self._sequences))
            return [self._fail(sequence, error) for sequence in list(self._sequences.values())]
        rows = plan.rows
        if not rows:
            return []
        try:
            result = self.runner.run(plan)
            outcomes, ttft, tpot = self._outcomes(rows, result, started)
        except Exception as error:  # a failed step ends the requests in it, not the engine
            if self.runner.runtime.expert_parallel is not None:
                raise  # the other ranks wait in the middle of it
            logger.exception("engine step failed with %d requests", len(rows))
            return [self._fail(row.sequence, error) for row in rows if self._holds(row.sequence)]
        self._count(plan, result, started, ttft, tpot)
        return outcomes

    def _browning(self) -> bool:
        runtime = self.runner.runtime
        return runtime.brownout("prefill").active or runtime.brownout("decode").active

    def _holds(self, sequence: Sequence) -> bool:
        return self._sequences.get(sequence.request.request_id) is sequence

    def _outcomes(
        self, rows: list[Row], result: Pass, started: float
    ) -> tuple[list[Outcome], list[float], list[float]]:
        for row, browned, first in zip(rows, result.browned, result.first_of_row, strict=True):
            self.scheduler.computed(row, browned)
            sequence = row.sequence
            if sequence.started is None:
                sequence.started = started
            if browned:
                sequence.lowest_threshold = min(sequence.lowest_threshold, result.threshold)
            if not row.decode and sequence.request.params.decoder_input_details:
                self._prompt_details(row, result.logits[first : first + row.count])
        sampling = [index for index, row in enumerate(rows) if row.samples]
        outcomes: list[Outcome] = []
        ttft: list[float] = []
        tpot: list[float] = []
        if not sampling:
            return outcomes, ttft, tpot
        sampled = self._sample(rows, sampling, result)
        phase = "decode" if all(row.decode for row in rows) else "prefill"
        now = time.monotonic()
        for position, index in enumerate(sampling):
            sequence = rows[index].sequence
            browned = result.browned[index]
            if sequence.first_token is None:
                ttft.append(now - sequence.arrival)
            else:
                tpot.append(now - (sequence.last_token or now))
            try:
                event, finished = self._accept(
                    sequence, sampled, position, phase, result.threshold if browned else 1.0,
                    result.browned_share if browned else 0.0, now,
                )  # fmt: skip
            except Exception as error:  # one request's grammar or text must not hurt the others
                outcomes.append(self._fail(sequence, error))
                continue
            outcomes.append((sequence.request.request_id, event))
            if finished is not None:
                outcomes.append((sequence.request.request_id, finished))
        return outcomes, ttft, tpot

    def _sample(self, rows: list[Row], sampling: list[int], result: Pass) -> Sampled:
        last_logits = []
        choices = []
        for index in sampling:
            row = rows[index]
            sequence = row.sequence
            extra = row.count - 1 if not row.decode and sequence.request.params.decoder_input_details else 0
            last_logits.append(result.first_of_row[index] + extra)
            choices.append(
                SampleRow(
                    sequence.request.params,
                    sequence.seed,
                    sequence.generated,
                    sequence.tokens[-1],
                    sequence.penalties,
                    sequence.grammar,
                )
            )
        logits = result.logits
        if len(last_logits) != logits.shape[0]:
            logits = logits[last_logits]
        return sample(logits, choices)

    def _accept(
        self,
        sequence: Sequence,
        sampled: Sampled,
        position: int,
        phase: Any,
        threshold: float,
        share: float,
        now: float,
    ) -> tuple[TokenEvent, FinishEvent | None]:
        if not sampled.finite[position]:
            raise GenerationError("the model's logits hold no finite value that may be chosen")
        token = sampled.tokens[position]
        if sequence.first_token is None:
            sequence.first_token = now
            if self._wants_counts(sequence):
                sequence.prefill_counts = self.runner.counts_of(sequence.pages)
        sequence.last_token = now
        sequence.tokens.append(token)
        sequence.browned_share_sum += share
        if sequence.penalties is not None:
            sequence.penalties.add(token)
        event = self.output.token_event(sequence, token, sampled, position, phase, threshold, share, now)
        self._generated_tokens += 1
        if sequence.finish_reason is None:
            return event, None
        counts = self.runner.counts_of(sequence.pages) if self._wants_counts(sequence) else None
        kv = self._export(sequence) if sequence.request.hand_off else None
        finish = self.output.finish_event(sequence, counts, kv)
        del self._sequences[sequence.request.request_id]
        self.scheduler.remove(sequence)
        self._finished += 1
        return event, finish

    def _export(self, sequence: Sequence) -> KVState:
        """The KV of the prompt, copied out of the pages, which are free at once."""
        tokens = sequence.prompt_tokens
        pages = sequence.pages[: -(-tokens // self.config.page_size)]
        keys, values = self.runner.read_kv(pages, tokens)
        return KVState(
            tokens=sequence.request.prompt_ids,
            keys=keys,
            values=values,
            counts=self.runner.page_counts(pages),
            page_size=self.config.page_size,
            browned_from=sequence.browned_from,
            lowest_threshold=sequence.lowest_threshold,
            fingerprint=self.runner.fingerprint,
        )

    def _end_replayed(self, sequence: Sequence, now: float) -> Outcome:
        sequence.started = sequence.first_token = sequence.last_token = now
        del self._sequences[sequence.request.request_id]
        self.scheduler.remove(sequence)
        self._finished += 1
        return sequence.request.request_id, self.output.finish_event(sequence, None)

    def _wants_counts(self, sequence: Sequence) -> bool:
        return sequence.request.expert_counts and self.runner.counts is not None

    def _prompt_details(self, row: Row, logits: torch.Tensor) -> None:
        """Logprobs of prompt tokens, each from the logits of the one before it. logits: [count, V] of the row."""
        sequence = row.sequence
        known = sequence.prefill_logprobs
        prompt = sequence.request.prompt_ids
        if not known:
            known.append(self.output.prompt_token(prompt, 0, None))
        last = min(row.start + row.count, len(prompt) - 1)
        # after a preemption the first ones are known already
        wanted = range(max(row.start + 1, len(known)), last + 1)
        if not wanted:
            return
        found = prompt_logprobs(
            logits[wanted.start - row.start - 1 : last - row.start], prompt[wanted.start : last + 1]
        )
        known.extend(self.output.prompt_token(prompt, index, value) for index, value in zip(wanted, found, strict=True))

    def _fail(self, sequence: Sequence, error: Exception) -> Outcome:
        self._sequences.pop(sequence.request.request_id, None)
        self.scheduler.remove(sequence)
        self._failed += 1
        if not isinstance(error, GenerationError):
            error = GenerationError(f"the request failed while it ran: {type(error).__name__}: {error}")
        return sequence.request.request_id, error

    def _count(self, plan: Plan, result: Pass, started: float, ttft: list[float], tpot: list[float]) -> None:
        now = time.monotonic()
        prefill_tokens = sum(row.count for row in plan.prefill)
        self._steps += 1
        self._prefill_tokens += prefill_tokens
        self._last_step_seconds = now - started
        if self._on_step is None:
            return
        report = StepReport(
            phase="prefill" if plan.prefill else "decode",
            seconds=now - started,
            forward_seconds=result.seconds,
            requests=len(plan.rows),
            prefill_tokens=prefill_tokens,
            decode_tokens=len(plan.decode),
            ttft=tuple(ttft),
            tpot=tuple(tpot),
            threshold=result.threshold,
            browned_share=result.browned_share,
            active_experts=result.active_experts,
            time=now,
        )
        try:
            self._on_step(report)
        except Exception:  # an observer's mistake is not a request's
            logger.exception("on_step failed")

    # ------------------------------------------------------------- state

    def stats(self) -> EngineStats:
        """A snapshot, consistent between two steps."""
        scheduler = self.scheduler
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            total_pages=self.pool.num_pages,
            free_pages=self.pool.free,
            used_pages=self.pool.used,
            cached_pages=self.pool.cached,
            kv_tokens=sum(sequence.computed for sequence in scheduler.running),
            page_size=self.config.page_size,
            steps=self._steps,
            prefill_tokens=self._prefill_tokens,
            generated_tokens=self._generated_tokens,
            finished=self._finished,
            cancelled=self._cancelled,
            failed=self._failed,
            preemptions=scheduler.preemptions,
            prefix_hit_tokens=scheduler.prefix_hit_tokens,
            prefix_query_tokens=scheduler.prefix_query_tokens,
            last_step_seconds=self._last_step_seconds,
            draining=False,
        )

    def check(self) -> None:
        """Assert that no page and no request is lost; for tests and debugging."""
        self.pool.check()
        running, waiting = self.scheduler.running, list(self.scheduler.waiting)
        assert {id(s) for s in self._sequences.values()} == {id(s) for s in running + waiting}
        held: dict[int, int] = {}
        for sequence in running:
            for page in sequence.pages:
                held[page] = held.get(page, 0) + 1
        assert all(not sequence.pages for sequence in waiting)
        assert all(int(self.pool.references[page]) == count for page, count in held.items())
        assert self.pool.used == len(held)
        assert self.pool.free + self.pool.used + self.pool.cached == self.pool.num_pages

    def close(self) -> None:
        """Cancel everything and give the model its attention back."""
        if self._closed:
            return
        self._closed = True
        for request_id in list(self._sequences):
            self.cancel(request_id)
        self.runner.close()
