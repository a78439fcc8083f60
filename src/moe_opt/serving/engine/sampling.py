"""Choosing the next tokens of all sequences of a step in one batched call.

The order is TGI's: watermark, penalties and grammar shape the logits; temperature, top-k, top-p and typical-p warp
those of the rows that sample. A row's randomness is a hash of its seed and of how many tokens it has generated, so it
does not depend on what else is in the batch, nor on preemption.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from moe_opt.modeling.kernels.native_rows import logsumexp
from moe_opt.serving.engine.types import SamplingParams

if TYPE_CHECKING:
    from moe_opt.serving.engine.grammar import GrammarState

_FEW = 128  # tokens that top-p looks at before it sorts a whole row
_WATERMARK_GAMMA = 0.5
_WATERMARK_DELTA = 2.0
_WATERMARK_KEY = 15485863  # TGI's hash key


class PenaltyState:
    """Which tokens a sequence has met. seen: bool [V], prompt and output. output_counts: float [V]."""

    def __init__(self, prompt_ids: Sequence[int], vocab_size: int, device: torch.device) -> None:
        self.seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.seen[torch.as_tensor(prompt_ids, device=device)] = True
        self.output_counts = torch.zeros(vocab_size, device=device)

    def add(self, token: int) -> None:
        self.seen[token] = True
        self.output_counts[token] += 1

    @staticmethod
    def wanted(params: SamplingParams) -> bool:
        return (
            params.repetition_penalty not in (None, 1.0)
            or bool(params.frequency_penalty)
            or bool(params.presence_penalty)
        )


@dataclasses.dataclass(slots=True)
class SampleRow:
    """One row of logits and what is to be done with it."""

    params: SamplingParams
    seed: int
    generated: int  # tokens generated before this one
    last_token: int
    penalties: PenaltyState | None
    grammar: GrammarState | None


@dataclasses.dataclass(slots=True)
class Sampled:
    """Per row of logits. top: (ids, logprobs) best first, as many as the row asked for. finite: False where the logits
    hold NaN or nothing at all was possible; the other fields of that row mean nothing."""

    tokens: list[int]
    logprobs: list[float]
    top: list[tuple[list[int], list[float]]]
    finite: list[bool]


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> Sampled:
    """Choose one token per row.

    Args:
        logits: [N, V], the model's raw logits; float32 is used throughout.
    """
    raw = logits.float()
    normaliser = logsumexp(raw)
    scores = _shape(raw, rows)
    tokens = _argmax(scores)
    sampling = [index for index, row in enumerate(rows) if row.params.do_sample]
    if sampling:
        chosen = torch.as_tensor(sampling, device=raw.device)
        part = scores if len(sampling) == len(rows) else scores.index_select(0, chosen)
        tokens = tokens.index_copy(
            0, chosen, _draw(_warp(part, [rows[i] for i in sampling]), [rows[i] for i in sampling])
        )
    logprobs = raw.gather(1, tokens.unsqueeze(1)).squeeze(1) - normaliser
    possible = scores.gather(1, tokens.unsqueeze(1)).squeeze(1)
    finite = torch.isfinite(logprobs) & torch.isfinite(possible)
    top: list[tuple[list[int], list[float]]] = [([], []) for _ in rows]
    most = max(row.params.top_n_tokens for row in rows)
    if most:
        best = raw.topk(min(most, raw.shape[1]), dim=-1)
        values = (best.values - normaliser.unsqueeze(1)).tolist()
        for index, (row, ids) in enumerate(zip(rows, best.indices.tolist(), strict=True)):
            count = row.params.top_n_tokens
            top[index] = (ids[:count], values[index][:count])
    return Sampled(tokens.tolist(), logprobs.tolist(), top, finite.tolist())


def _argmax(scores: torch.Tensor) -> torch.Tensor:
    """int64 [N], the first of equals. On a CPU by NumPy, whose argmax is 25 times as fast as torch's there."""
    if scores.device.type == "cpu":
        return torch.from_numpy(scores.numpy().argmax(-1))
    return scores.argmax(-1)


def _shape(raw: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Logits after watermark, penalties and grammar; `raw` itself where no row asks for any of them."""
    watermarked = [i for i, row in enumerate(rows) if row.params.watermark]
    penalised = [i for i, row in enumerate(rows) if row.penalties is not None]
    constrained = [i for i, row in enumerate(rows) if row.grammar is not None]
    if not (watermarked or penalised or constrained):
        return raw
    scores = raw.clone()
    for index in watermarked:
        scores[index, _green_list(rows[index].last_token, raw.shape[1]).to(raw.device)] += _WATERMARK_DELTA
    if penalised:
        _penalise(scores, penalised, rows)
    if constrained:
        masks = [(index, grammar) for index in constrained if (grammar := rows[index].grammar) is not None]
        for index, grammar in masks:
            grammar.mask(scores[index])
    return scores


def _penalise(scores: torch.Tensor, indices: list[int], rows: Sequence[SampleRow]) -> None:
    chosen = torch.as_tensor(indices, device=scores.device)
    part = scores.index_select(0, chosen)
    states = [state for index in indices if (state := rows[index].penalties) is not None]
    params = [rows[index].params for index in indices]
    seen = torch.stack([state.seen for state in states])
    counts = torch.stack([state.output_counts for state in states])
    repetition = _column([p.repetition_penalty or 1.0 for p in params], part)
    part = torch.where(seen, torch.where(part < 0, part * repetition, part / repetition), part)
    part = part - counts * _column([p.frequency_penalty or 0.0 for p in params], part)
    part = part - (counts > 0) * _column([p.presence_penalty or 0.0 for p in params], part)
    scores.index_copy_(0, chosen, part)


def _green_list(last_token: int, vocab_size: int) -> torch.Tensor:
    """Token ids that the watermark favours behind `last_token` (Kirchenbauer et al., algorithm 2)."""
    generator = torch.Generator().manual_seed(_WATERMARK_KEY * last_token)
    return torch.randperm(vocab_size, generator=generator)[: int(vocab_size * _WATERMARK_GAMMA)]


def _warp(scores: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Temperature, top-k, top-p, typical-p; what they exclude becomes -inf."""
    params = [row.params for row in rows]
    scores = scores / _column([p.temperature or 1.0 for p in params], scores)
    if any(p.top_k is not None for p in params):
        scores = _top_k(scores, [p.top_k or scores.shape[1] for p in params])
    if any(p.top_p is not None and p.top_p < 1 for p in params):
        scores = _top_p(scores, [1.0 if p.top_p is None else p.top_p for p in params])
    typical = [index for index, p in enumerate(params) if p.typical_p is not None and p.typical_p < 1]
    if typical:
        chosen = torch.as_tensor(typical, device=scores.device)
        part = _typical_p(scores.index_select(0, chosen), [params[index].typical_p or 1.0 for index in typical])
        scores = scores.index_copy(0, chosen, part)
    return scores


def _top_k(scores: torch.Tensor, ks: list[int]) -> torch.Tensor:
    width = scores.shape[1]
    limits = [min(k, width) for k in ks]
    # rows without top-k keep all, whatever the longest list of the others is
    longest = max((k for k in limits if k < width), default=width)
    best = scores.topk(longest, dim=-1).values
    position = torch.as_tensor([min(k, longest) - 1 for k in limits], device=scores.device)
    lowest = best.gather(1, position.unsqueeze(1))
    keeps_all = torch.as_tensor([k >= width for k in limits], device=scores.device).unsqueeze(1)
    return scores.masked_fill((scores < lowest) & ~keeps_all, float("-inf"))


def _top_p(scores: torch.Tensor, ps: list[float]) -> torch.Tensor:
    """Keep the smallest set of best tokens that holds probability p. Most sets are small, so the best few are looked
    at first; only rows that need more are sorted in full."""
    # in float64: near p = 1 the rounding of a float32 sum is as large as the probability of a token
    limit = torch.tensor([p if p < 1 else 2.0 for p in ps], dtype=torch.float64, device=scores.device).unsqueeze(1)
    highest = scores.amax(-1, keepdim=True)
    total = (scores - highest).exp().sum(-1, keepdim=True, dtype=torch.float64)
    few = min(_FEW, scores.shape[1])
    best = scores.topk(few, dim=-1).values
    probs = (best - highest).exp().double() / total
    lowest, enough = _lowest_kept(best, probs, limit)
    rest = [index for index, (done, p) in enumerate(zip(enough.tolist(), ps, strict=True)) if not done and p < 1]
    if rest:
        chosen = torch.as_tensor(rest, device=scores.device)
        ordered = scores[chosen].sort(dim=-1, descending=True).values
        probs = (ordered - highest[chosen]).exp().double() / total[chosen]
        lowest[chosen] = _lowest_kept(ordered, probs, limit[chosen])[0]
    keeps_all = torch.as_tensor([p >= 1 for p in ps], device=scores.device).unsqueeze(1)
    return scores.masked_fill((scores < lowest) & ~keeps_all, float("-inf"))


def _lowest_kept(ordered: torch.Tensor, probs: torch.Tensor, limit: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(lowest score kept [N, 1], whether the limit was reached [N]) of scores in descending order."""
    before = probs.cumsum(-1) - probs
    kept = (before < limit).sum(-1, keepdim=True).clamp_min(1)
    return ordered.gather(1, kept - 1), kept.squeeze(1) < ordered.shape[1]


def _typical_p(scores: torch.Tensor, ps: list[float]) -> torch.Tensor:
    """Locally typical sampling (Meister et al., arXiv 2202.00666): tokens whose surprise is nearest the entropy."""
    logprobs = scores.log_softmax(-1)
    probs = logprobs.exp()
    entropy = -(probs * logprobs.clamp_min(torch.finfo(logprobs.dtype).min)).sum(-1, keepdim=True)
    distance = (-logprobs - entropy).abs()
    _, order = distance.sort(dim=-1, stable=True)
    in_order = probs.gather(1, order)
    before = in_order.cumsum(-1) - in_order
    drop = before >= _column(ps, scores)
    drop[:, 0] = False
    return scores.masked_fill(torch.zeros_like(drop).scatter_(1, order, drop), float("-inf"))


def _draw(scores: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """int64 [N]: inverse transform sampling, one uniform number per row."""
    cdf = scores.softmax(-1).cumsum(-1)
    uniform = torch.as_tensor(
        uniforms([row.seed for row in rows], [row.generated for row in rows]), dtype=cdf.dtype, device=cdf.device
    )
    target = (uniform * cdf[:, -1]).unsqueeze(1)
    index = torch.searchsorted(cdf, target, right=True).squeeze(1)
    # rounding may put the target on the very end
    return torch.where(index < scores.shape[1], index, scores.argmax(-1))


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """float64 [N] in [0, 1): splitmix64 of seed and position, a counter instead of a generator with state."""
    with np.errstate(over="ignore"):
        state = np.array(seeds, dtype=np.uint64)
        state = _mix(state) + (np.array(positions, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        bits = _mix(state)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(value: np.ndarray) -> np.ndarray:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(1)


def prompt_logprobs(logits: torch.Tensor, next_tokens: Sequence[int]) -> list[float]:
    """Logprob of each following prompt token. logits: [n, V], raw."""
    raw = logits.float()
    ids = torch.as_tensor(next_tokens, device=raw.device).unsqueeze(1)
    return (raw.gather(1, ids).squeeze(1) - raw.logsumexp(-1)).tolist()
