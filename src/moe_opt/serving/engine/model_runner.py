"""One forward pass for the rows of a plan: from sequences to packed tensors, from packed tensors to logits."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from moe_opt.errors import ConfigError
from moe_opt.modeling.kernels.native_modules import NativeModules
from moe_opt.modeling.phase_settings import PHASES
from moe_opt.modeling.score_item import ScoreItem
from moe_opt.modeling.scoring import plan_passes, run_pass, shares_prefixes
from moe_opt.modeling.step import StepStats
from moe_opt.serving.engine.attention import IMPLEMENTATION, AttentionBackend, LayerKV, Span
from moe_opt.serving.engine.attention_choice import choose_backend
from moe_opt.serving.engine.attention_cuda import VarlenAttention
from moe_opt.serving.engine.config import EngineConfig
from moe_opt.serving.engine.cuda_graphs import DecodeGraphs
from moe_opt.serving.engine.expert_counts import PageExpertCounts
from moe_opt.serving.engine.kv_pool import (
    LayerShape,
    check_family,
    find_layers,
    make_pool,
    pages_that_fit,
    release_pool,
)
from moe_opt.serving.engine.kv_state import fingerprint_of
from moe_opt.serving.engine.scheduler import Import, Plan, Row
from moe_opt.serving.engine.score_job import ScoreJob

_CHUNK_TOKENS = 64  # prompt tokens of a step from which `prefill_threads` pay


@dataclasses.dataclass(slots=True)
class Pass:
    """What a forward pass gave.

    Attributes:
        logits: [N, V] on the device. first_of_row: where each row's logits begin in it; a row has one (its last token)
            if it samples, `count` if the prompt's logprobs are wanted, else none.
        browned: per row, whether brownout applied to it. browned_share: of the expert assignments of those rows.
        active_experts: mean per MoE layer, None unless `step_statistics`.
    """

    logits: torch.Tensor
    first_of_row: list[int]
    browned: list[bool]
    threshold: float
    browned_share: float
    active_experts: float | None
    seconds: float


class ModelRunner:
    """Runs a model over the paged pool. While it is open, the model's attention belongs to the engine.

    Raises:
        UnsupportedModelError: see `kv_pool.check_family`. ConfigError: the model is in another engine already.
    """

    def __init__(self, model: Any, config: EngineConfig) -> None:
        check_family(model)
        if model.config._attn_implementation == IMPLEMENTATION:
            raise ConfigError("this model runs in an engine already: close that one first")
        self.model = model.eval()
        self.config = config
        self.runtime = model.moe_opt
        self.device = model.get_input_embeddings().weight.device
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        self._previous_attention = model.config._attn_implementation
        self._shares_prefixes = shares_prefixes(model)  # by its own attention, which scoring runs with
        self.passes = 0  # forward passes so far
        self.layers: list[LayerShape] = []
        self.pool: list[LayerKV] = []
        self._native: NativeModules | None = None
        model.set_attn_implementation(IMPLEMENTATION)
        try:
            self.layers = find_layers(model)
            devices = {str(layer.device) for layer in self.layers} | {str(self.device)}
            if len(devices) > 1:
                raise ConfigError(f"the engine runs on one device, but the model lies on {', '.join(sorted(devices))}")
            limit = config.max_total_tokens or self._longest()
            self.num_pages = pages_that_fit(config, self.layers, limit)
            self.max_total_tokens = min(limit, self.num_pages * config.page_size)
            self.backend = self._make_backend()
            # one page more than the scheduler knows of: padding of captured decode steps writes there
            self.pool = make_pool(self.layers, (self.num_pages + 1) * config.page_size, self.backend)
            self.counts: PageExpertCounts | None = None
            if config.record_experts:
                self.counts = PageExpertCounts(
                    self.num_pages + 1, self.runtime.num_layers, self.runtime.num_experts, self.device, config.page_size
                )
            self.graphs = self._make_graphs()
            self.fingerprint = fingerprint_of(model, self.layers)
            self._native = NativeModules(model) if self.device.type == "cpu" else None
        except BaseException:  # the model must not be left with a pool that nobody has
            self.close()
            raise

    def close(self) -> None:
        """Give the model its own attention back and free the pool."""
        release_pool(self.layers)
        if self._native is not None:
            self._native.remove()
        self.pool.clear()
        self.model.set_attn_implementation(self._previous_attention)

    def plan_scores(self, items: Sequence[ScoreItem]) -> ScoreJob:
        """Passes over the model's own attention that score choices; runs nothing, safe from any thread.

        Raises:
            ConfigError: an item without tokens, or longer than the model's positions.
        """
        passes = plan_passes(
            self.model, items, max_batch_tokens=self.config.max_batch_prefill_tokens, share=self._shares_prefixes
        )
        return ScoreJob(collections.deque(passes), [[0.0] * len(item.choices) for item in items])

    def score_pass(self, job: ScoreJob) -> None:
        """Run the next pass of a job, without brownout and without pages."""
        runtime = self.runtime
        # A group runs every pass at one threshold: there, these tokens are marked as ones that keep their experts.
        in_group = runtime.expert_parallel is not None
        thresholds = {} if in_group else {phase: runtime.brownout(phase).threshold for phase in PHASES}
        self.model.set_attn_implementation(self._previous_attention)
        if not in_group:
            runtime.set_brownout(threshold=1.0)
        try:
            with torch.inference_mode():
                run_pass(self.model, job.passes.popleft(), job.values, exact=in_group)
        finally:
            for phase, threshold in thresholds.items():
                runtime.set_brownout(threshold=threshold, phase=phase)
            self.model.set_attn_implementation(IMPLEMENTATION)
        self.passes += 1

    def run(self, plan: Plan) -> Pass:
        """Compute the rows of a plan. The pages of every row are there already."""
        rows = plan.rows
        started = time.perf_counter()
        settings = self.runtime.brownout(plan.phase)
        threshold = settings.threshold if settings.active else 1.0
        browned = [settings.active and not row.sequence.request.exact for row in rows]
        for part in plan.imports:
            self._write_kv(part)
        packed = self._tokens(rows)
        spans = self._spans(rows)
        wanted, first_of_row = _wanted_logits(rows)
        exact = None
        if settings.active and not all(browned):
            counts = torch.as_tensor([row.count for row in rows])
            exact = ~torch.as_tensor(browned).repeat_interleave(counts)
        if self.counts is not None:
            self.runtime.recorders.append(self.counts)
        self.passes += 1
        try:
            if self.graphs is not None and not plan.prefill:
                setting = (settings.active, settings.strategy, settings.keep, settings.layers)
                logits, step = self.graphs.run(packed, spans, exact, setting, plan.fresh_pages)
            else:
                threads = self.config.prefill_threads if packed.shape[1] >= len(rows) + _CHUNK_TOKENS else None
                with _torch_threads(threads):
                    logits = self._forward(plan, packed, spans, wanted, exact)
                step = self.runtime.last_step
        finally:
            if self.counts is not None:
                self.runtime.recorders.remove(self.counts)
        share, active = self._statistics(step, rows, browned)
        return Pass(logits, first_of_row, browned, threshold, share, active, time.perf_counter() - started)

    def idle(self) -> None:
        """Take part in a forward pass of the other ranks with one token of padding, in the scratch page."""
        slot = self.num_pages * self.config.page_size
        packed = torch.tensor([[0], [0], [slot], [self.num_pages]])
        if self.counts is not None:
            self.counts.begin(packed[3].to(self.device), [])
            self.runtime.recorders.append(self.counts)
        try:
            self.backend.begin([Span(0, 1, 1, [self.num_pages], [(slot, 1)])], packed[2].to(self.device))
            with torch.inference_mode(), self.runtime.batch([-1], "decode"):
                self.model(
                    input_ids=packed[:1].to(self.device), position_ids=packed[1:2].to(self.device), use_cache=False
                )
        finally:
            if self.counts is not None:
                self.runtime.recorders.remove(self.counts)
        self.passes += 1

    def weights_moved(self) -> None:
        """United experts came or went: captured steps read weights that are no more."""
        if self.graphs is not None:
            self.graphs.clear()

    def counts_of(self, pages: Sequence[int]) -> np.ndarray:
        """int64 [L, E]: the router's choices for the tokens in these pages."""
        assert self.counts is not None
        return self.counts.of(pages)

    def read_kv(self, pages: Sequence[int], tokens: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """(keys, values) per layer of the first `tokens` tokens in these pages, [tokens, kv_heads, dim] on the CPU."""
        slots = self._slots(pages, 0, tokens)
        keys = [layer.keys[slots].contiguous().cpu() for layer in self.pool]
        return keys, [layer.values[slots].contiguous().cpu() for layer in self.pool]

    def page_counts(self, pages: Sequence[int]) -> torch.Tensor | None:
        """[pages, L, E] on the CPU: the router's choices per page; None if they are not counted."""
        return None if self.counts is None else self.counts.of_pages(pages)

    def _write_kv(self, part: Import) -> None:
        size = self.config.page_size
        kv, pages = part.kv, part.sequence.pages
        start, end = part.first_page * size, min(part.last_page * size, len(kv.tokens))
        slots = self._slots(pages, start, end)
        with torch.inference_mode():
            for layer, keys, values in zip(self.pool, kv.keys, kv.values, strict=True):
                layer.keys[slots] = keys[start:end].to(layer.keys.device)
                layer.values[slots] = values[start:end].to(layer.values.device)
        if self.counts is not None:
            known = kv.counts if kv.page_size == size else None
            self.counts.put(
                pages[part.first_page : part.last_page],
                None if known is None else known[part.first_page : part.last_page],
            )

    def _slots(self, pages: Sequence[int], start: int, end: int) -> torch.Tensor:
        """int64 [end - start]: KV slots of tokens `start` to `end - 1` of a sequence with these pages."""
        size = self.config.page_size
        positions = np.arange(start, end)
        slots = np.asarray(pages, dtype=np.int64)[positions // size] * size + positions % size
        return torch.from_numpy(slots).to(self.device)

    # ------------------------------------------------------------- set-up

    def _longest(self) -> int:
        return int(self.model.config.get_text_config().max_position_embeddings)

    def _make_backend(self) -> AttentionBackend:
        widest = max(self.layers, key=lambda layer: layer.key_dim)
        heads = int(self.model.config.get_text_config().num_attention_heads)
        return choose_backend(self.device, self.config.page_size, heads, widest.kv_heads, widest.key_dim, widest.dtype)

    def _make_graphs(self) -> DecodeGraphs | None:
        backend = self.backend
        if not self.config.cuda_graphs or self.device.type != "cuda" or not isinstance(backend, VarlenAttention):
            return None
        return DecodeGraphs(
            self.model, backend, self.counts, self.device,
            max_batch=self.config.max_batch_size,
            max_pages=-(-self.max_total_tokens // self.config.page_size),
            scratch_page=self.num_pages,
            page_size=self.config.page_size,
        )  # fmt: skip

    # ------------------------------------------------------------- one step

    def _forward(
        self, plan: Plan, packed: torch.Tensor, spans: list[Span], wanted: list[int], exact: torch.Tensor | None
    ) -> torch.Tensor:
        """Logits [len(wanted), V]."""
        ids, positions, slots, pages = packed.to(self.device).unbind(0)
        if self.counts is not None:
            self.counts.begin(pages, plan.fresh_pages)
        self.backend.begin(spans, slots)
        tokens = packed.shape[1]
        everything = len(wanted) == tokens
        with torch.inference_mode(), self.runtime.batch(_token_rows(plan.rows, tokens), plan.phase, exact=exact):
            return self.model(
                input_ids=ids.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=0 if everything else torch.tensor(wanted, dtype=torch.int64, device=self.device),
            ).logits[0]

    def _tokens(self, rows: Sequence[Row]) -> torch.Tensor:
        """int64 [4, T] on the CPU: token ids, positions, KV slots, KV pages."""
        size = self.config.page_size
        total = sum(row.count for row in rows)
        packed = np.empty((4, total), dtype=np.int64)
        at = 0
        for row in rows:
            sequence = row.sequence
            if row.count == 1:
                page = sequence.pages[row.start // size]
                counted_in = page if row.start >= sequence.counted else self.num_pages
                packed[:, at] = sequence.tokens[row.start], row.start, page * size + row.start % size, counted_in
                at += 1
                continue
            end = at + row.count
            positions = np.arange(row.start, row.start + row.count)
            pages = np.asarray(sequence.pages, dtype=np.int64)[positions // size]
            packed[0, at:end] = sequence.tokens[row.start : row.start + row.count]
            packed[1, at:end] = positions
            packed[2, at:end] = pages * size + positions % size
            # counts that came with imported KV are not counted twice: the scratch page takes them
            packed[3, at:end] = np.where(positions >= sequence.counted, pages, self.num_pages)
            at = end
        return torch.from_numpy(packed)

    def _spans(self, rows: Sequence[Row]) -> list[Span]:
        size = self.config.page_size
        spans = []
        at = 0
        for row in rows:
            length = left = row.start + row.count
            runs = []
            for first, pages in row.sequence.runs:
                tokens = min(pages * size, left)
                runs.append((first * size, tokens))
                left -= tokens
                if not left:
                    break
            spans.append(Span(at, row.count, length, row.sequence.pages, runs))
            at += row.count
        return spans

    def _statistics(self, step: StepStats, rows: Sequence[Row], browned: list[bool]) -> tuple[float, float | None]:
        """(share of browned rows' assignments that were delegated, active experts per layer)."""
        share = 0.0
        if any(browned):
            tokens = sum(row.count for row in rows)
            touched = sum(row.count for row, brown in zip(rows, browned, strict=True) if brown)
            share = float(step.delegated_share.mean()) * tokens / touched
        active = float(step.active_experts.double().mean()) if self.config.step_statistics else None
        return share, active


@contextlib.contextmanager
def _torch_threads(wanted: int | None) -> Iterator[None]:
    """With so many threads of torch's on this thread; None changes nothing."""
    before = torch.get_num_threads()
    if wanted is None or wanted == before:
        yield
        return
    torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _wanted_logits(rows: Sequence[Row]) -> tuple[list[int], list[int]]:
    """(packed positions whose logits are needed, where each row's begin among them)."""
    wanted: list[int] = []
    first_of_row = []
    at = 0
    for row in rows:
        first_of_row.append(len(wanted))
        if not row.decode and row.sequence.request.params.decoder_input_details:
            wanted.extend(range(at, at + row.count))
        elif row.samples:
            wanted.append(at + row.count - 1)
        at += row.count
    return wanted, first_of_row


def _token_rows(rows: Sequence[Row], tokens: int) -> torch.Tensor:
    """int64 [T]: index of the row that each token belongs to."""
    if tokens == len(rows):
        return torch.arange(tokens)
    return torch.arange(len(rows)).repeat_interleave(torch.as_tensor([row.count for row in rows]))
