"""One forward pass for the rows of a plan: from sequences to packed tensors, from packed tensors to logits."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from moe_opt.errors import ConfigError
from moe_opt.serving.engine.attention import IMPLEMENTATION, AttentionBackend, GatherAttention, RunsAttention, Span
from moe_opt.serving.engine.config import EngineConfig
from moe_opt.serving.engine.expert_counts import PageExpertCounts
from moe_opt.serving.engine.kv_pool import check_family, find_layers, make_pool, pages_that_fit, release_pool
from moe_opt.serving.engine.scheduler import Plan, Row


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
        model.set_attn_implementation(IMPLEMENTATION)
        try:
            self.layers = find_layers(model)
            limit = config.max_total_tokens or self._longest()
            self.num_pages = pages_that_fit(config, self.layers, limit)
            self.max_total_tokens = min(limit, self.num_pages * config.page_size)
            self.backend = self._make_backend()
            # one page more than the scheduler knows of: padding of captured decode steps writes there
            self.pool = make_pool(self.layers, (self.num_pages + 1) * config.page_size, self.backend)
        except BaseException:
            model.set_attn_implementation(self._previous_attention)
            raise
        self.counts: PageExpertCounts | None = None
        if config.record_experts:
            self.counts = PageExpertCounts(
                self.num_pages + 1, self.runtime.num_layers, self.runtime.num_experts, self.device
            )

    def close(self) -> None:
        """Give the model its own attention back and free the pool."""
        release_pool(self.layers)
        self.pool.clear()
        self.model.set_attn_implementation(self._previous_attention)

    def run(self, plan: Plan) -> Pass:
        """Compute the rows of a plan. The pages of every row are there already."""
        rows = plan.rows
        started = time.perf_counter()
        settings = self.runtime.brownout(plan.phase)
        threshold = settings.threshold if settings.active else 1.0
        browned = [settings.active and not row.sequence.request.exact for row in rows]
        ids, positions, slots, pages = self._tokens(rows)
        if self.counts is not None:
            self.counts.begin(pages, plan.fresh_pages)
        self.backend.begin(self._spans(rows), slots)
        wanted, first_of_row = _wanted_logits(rows)
        everything = len(wanted) == ids.shape[0]
        exact = None
        if settings.active and not all(browned):
            counts = torch.as_tensor([row.count for row in rows])
            exact = ~torch.as_tensor(browned).repeat_interleave(counts)
        if self.counts is not None:
            self.runtime.recorders.append(self.counts)
        try:
            with torch.inference_mode(), self.runtime.batch(_token_rows(rows, ids.shape[0]), plan.phase, exact=exact):
                logits = self.model(
                    input_ids=ids.unsqueeze(0),
                    position_ids=positions.unsqueeze(0),
                    use_cache=False,
                    logits_to_keep=0 if everything else torch.tensor(wanted, dtype=torch.int64, device=self.device),
                ).logits[0]
        finally:
            if self.counts is not None:
                self.runtime.recorders.remove(self.counts)
        share, active = self._statistics(rows, browned)
        return Pass(logits, first_of_row, browned, threshold, share, active, time.perf_counter() - started)

    def counts_of(self, pages: Sequence[int]) -> np.ndarray:
        """int64 [L, E]: the router's choices for the tokens in these pages."""
        assert self.counts is not None
        return self.counts.of(pages)

    # ------------------------------------------------------------- set-up

    def _longest(self) -> int:
        return int(self.model.config.get_text_config().max_position_embeddings)

    def _make_backend(self) -> AttentionBackend:
        if self.device.type == "cpu":
            return RunsAttention()
        return GatherAttention(self.device, self.config.page_size)

    # ------------------------------------------------------------- one step

    def _tokens(self, rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """int64 [T] each, on the device: token ids, positions, KV slots, KV pages."""
        size = self.config.page_size
        total = sum(row.count for row in rows)
        packed = np.empty((4, total), dtype=np.int64)
        at = 0
        for row in rows:
            sequence = row.sequence
            if row.count == 1:
                page = sequence.pages[row.start // size]
                packed[:, at] = sequence.tokens[row.start], row.start, page * size + row.start % size, page
                at += 1
                continue
            end = at + row.count
            positions = np.arange(row.start, row.start + row.count)
            pages = np.asarray(sequence.pages, dtype=np.int64)[positions // size]
            packed[0, at:end] = sequence.tokens[row.start : row.start + row.count]
            packed[1, at:end] = positions
            packed[2, at:end] = pages * size + positions % size
            packed[3, at:end] = pages
            at = end
        ids, positions, slots, pages = torch.from_numpy(packed).to(self.device).unbind(0)
        return ids, positions, slots, pages

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

    def _statistics(self, rows: Sequence[Row], browned: list[bool]) -> tuple[float, float | None]:
        """(share of browned rows' assignments that were delegated, active experts per layer)."""
        step = self.runtime.last_step
        share = 0.0
        if any(browned):
            tokens = sum(row.count for row in rows)
            touched = sum(row.count for row, brown in zip(rows, browned, strict=True) if brown)
            share = float(step.delegated_share.mean()) * tokens / touched
        active = float(step.active_experts.double().mean()) if self.config.step_statistics else None
        return share, active


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
