"""Processes that score: one in the caller's own, or several with prefixes routed to where they are promised."""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from moe_opt.cluster import Request, Worker
from moe_opt.cluster.prefill import Cost, PrefillScheduler, saturation_from_calibration, token_cost
from moe_opt.errors import ConfigError, MoEOptError, UnsupportedModelError
from moe_opt.flops import FlopsModel
from moe_opt.modeling.kernels.native_modules import NativeModules
from moe_opt.modeling.score_item import ScoreItem
from moe_opt.modeling.scoring import ScoreStats, common_prefix, score_items
from moe_opt.serving.saturation import calibrate

_BLOCK = 16
_LONGEST_ROUND = 8


@dataclass(frozen=True)
class ScorerSettings:
    """What a scoring process needs to know."""

    model_id: str
    dtype: str
    device: str | None
    max_batch_tokens: int
    share_prefixes: bool
    async_ep: str = "off"
    kernels: str = "auto"


class LocalScorer:
    """Scores in this process. `model` and `tokenizer` are loaded at once.

    A pass has `factor` times `max_batch_tokens`: with weights that stream in, as many as hide their transfer (Eq. 3).

    Args:
        factor: pins it; None measures it, which takes a few forward passes, for a model that streams.
    """

    def __init__(self, settings: ScorerSettings, factor: float | None = 1.0) -> None:
        import torch

        from moe_opt.config import MoEOptConfig
        from moe_opt.evaluation.command import load_model

        self.settings = settings
        on_cpu = settings.device == "cpu" or (settings.device is None and not torch.cuda.is_available())
        options = MoEOptConfig(
            async_ep=None if settings.async_ep == "off" else settings.async_ep,
            kernels="fused" if settings.kernels == "auto" and on_cpu else settings.kernels,
        )
        self.model, self.tokenizer = load_model(
            settings.model_id, dtype=settings.dtype, device=settings.device, moe_opt=options
        )
        self._native = NativeModules(self.model) if on_cpu and options.kernels == "fused" else None
        self.stats = ScoreStats()
        self.calibration = calibrate(self.model, settings.max_batch_tokens) if factor is None else None
        self.factor = factor or (self.calibration.factor if self.calibration is not None else 1.0)
        if self.streaming is not None:
            self.streaming.reset_times()

    @property
    def streaming(self) -> Any:
        """The model's `StreamedExperts`, None if its weights stay."""
        return getattr(self.model.moe_opt, "async_ep", None)

    @property
    def hidden_share(self) -> float:
        """Share of the transfer time that no layer waited for; nan without transfers."""
        return math.nan if self.streaming is None else float(self.streaming.hidden_share)

    def score(self, items: Sequence[ScoreItem]) -> list[list[float]]:
        return score_items(
            self.model,
            items,
            max_batch_tokens=round(self.settings.max_batch_tokens * self.factor),
            share_prefixes=self.settings.share_prefixes,
            stats=self.stats,
        )

    def close(self) -> None:
        """Give the model back."""
        if self._native is not None:
            self._native.remove()


class ScorerPool:
    """Several processes, each with the model. Items go where their prefix is promised, up to the saturation threshold.

    Work goes out in rounds: a round closes when every process is saturated or the items are gone, and the next begins
    when all have answered. What runs together is then a matter of the items alone, not of timing, so that a restarted
    job gives the same numbers.

    Args:
        factor: as for `LocalScorer`; measured by each process, and the largest counts for all.
        scheduler: who decides what goes where; `cluster.prefill_baselines` has others to compare with.
        sort: queue items by their prompts; False takes them in the order they come.
    """

    def __init__(
        self,
        settings: ScorerSettings,
        processes: int,
        config: Any,
        factor: float | None = 1.0,
        scheduler: type[PrefillScheduler] = PrefillScheduler,
        sort: bool = True,
    ) -> None:
        self.stats = ScoreStats()
        self._scheduler = scheduler
        self._sort = sort
        try:
            flops = FlopsModel.from_config(config)
            self._cost: Cost = flops.prefill
            reference = flops.prefill(settings.max_batch_tokens)
        except (ConfigError, UnsupportedModelError):
            self._cost, reference = token_cost, float(settings.max_batch_tokens)
        context = multiprocessing.get_context("spawn")
        threads = max(1, (os.cpu_count() or 1) // processes)
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(processes):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, settings, threads, factor), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)
        factors = [self._receive(pipe) for pipe in self._pipes]  # loaded, or why not
        self.factor = max(factors)
        for pipe in self._pipes:
            pipe.send(self.factor)
        self.saturation = saturation_from_calibration(reference, (1.0, self.factor))
        self._hidden: list[float] = []

    def score(self, items: Sequence[ScoreItem]) -> list[list[float]]:
        workers = [Worker(index, max_running=len(items)) for index in range(len(self._pipes))]
        # Nothing is kept from one round to the next, so that siblings have to meet in one: like beside like.
        order = list(range(len(items)))
        if self._sort:
            order.sort(key=lambda number: tuple(items[number].prompt))
        scheduler = self._scheduler(self._cost, self._round([items[number] for number in order]), _BLOCK)
        waiting = [
            Request(number, len(items[number].prompt), block_hashes=_blocks(items[number].prompt)) for number in order
        ]
        out: list[list[float]] = [[] for _ in items]
        while waiting:
            assigned = scheduler.schedule(waiting, workers)
            share: list[list[int]] = [[] for _ in workers]
            for assignment in assigned:
                share[int(str(assignment.worker_id))].append(int(str(assignment.request_id)))
            for pipe, numbers in zip(self._pipes, share, strict=True):
                if numbers:
                    pipe.send([items[number] for number in numbers])
            for index, numbers in enumerate(share):
                if not numbers:
                    continue
                values, stats, hidden = self._receive(self._pipes[index])
                self._hidden.append(hidden)
                for number, value in zip(numbers, values, strict=True):
                    out[number] = value
                self._add(stats)
                scheduler.removed(index)  # nothing is kept from one round to the next: no KV
            done = {number for numbers in share for number in numbers}
            waiting = [request for request in waiting if request.id not in done]
        return out

    def _round(self, items: Sequence[ScoreItem]) -> float:
        """FLOPs that a process gets before it is closed: its fair share of the items, so that one round does for them,
        but at least the saturation threshold and at most `_LONGEST_ROUND` times as much. Each round ends with a wait
        for the slowest."""
        total = 0.0
        before: list[int] = []
        for item in items:
            prompt = list(item.prompt)
            known = common_prefix(before, prompt)
            total += self._cost(len(prompt) - known, known)
            before = prompt
        share = total / len(self._pipes)
        return max(self.saturation, min(_LONGEST_ROUND * self.saturation, share))

    @property
    def hidden_share(self) -> float:
        """Mean over the rounds of the processes; nan without transfers."""
        known = [share for share in self._hidden if not math.isnan(share)]
        return sum(known) / len(known) if known else math.nan

    def _add(self, stats: ScoreStats) -> None:
        for name in ("items", "choices", "asked", "prompt_tokens", "computed", "passes"):
            setattr(self.stats, name, getattr(self.stats, name) + getattr(stats, name))
        self.stats.segments.extend(stats.segments)

    def _receive(self, pipe: Connection) -> Any:
        try:
            kind, value = pipe.recv()
        except EOFError as error:
            raise MoEOptError(
                "a scoring process died (out of memory?); start the same command again to go on"
            ) from error
        if kind == "error":
            raise MoEOptError(value)
        return value

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()


def _blocks(prompt: Sequence[int]) -> tuple[int, ...]:
    """A chain of hashes over blocks of tokens, as the scheduler matches them."""
    chain, before = [], 0
    for start in range(0, len(prompt) - _BLOCK + 1, _BLOCK):
        before = hash((before, *prompt[start : start + _BLOCK]))
        chain.append(before)
    return tuple(chain)


def _serve(pipe: Connection, settings: ScorerSettings, threads: int, factor: float | None) -> None:
    """A scoring process: items in, values and statistics out, until the pipe closes."""
    import torch

    torch.set_num_threads(threads)
    try:
        scorer = LocalScorer(settings, factor)
    except Exception as error:  # whatever it is, the parent says it and ends
        pipe.send(("error", str(error)))
        return
    pipe.send(("ready", scorer.factor))
    try:
        scorer.factor = pipe.recv()
    except EOFError:
        return
    while True:
        try:
            items = pipe.recv()
        except EOFError:
            return
        scorer.stats = ScoreStats()
        try:
            pipe.send(("done", (scorer.score(items), scorer.stats, scorer.hidden_share)))
        except Exception as error:
            pipe.send(("error", str(error)))


def flops_of(stats: ScoreStats, config: Any) -> float:
    """FLOPs of what was computed (Eq. 2), nan for families that are not modelled."""
    try:
        model = FlopsModel.from_config(config)
    except (ConfigError, UnsupportedModelError):
        return math.nan
    return math.fsum(model.prefill(new, before) for new, before in stats.segments)
