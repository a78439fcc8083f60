"""Perplexity and next-token accuracy, teacher-forced, in the two shapes that a server runs: prefill and decode."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from moe_opt.errors import ConfigError
from moe_opt.evaluation.losses import perplexity
from moe_opt.evaluation.texts import TokenRows

_CHUNK = 2048  # rows of logits turned to fp32 at a time; bounds memory for large vocabularies


class TokenScores(NamedTuple):
    """What a model said about N tokens, in NumPy."""

    predicted: NDArray[np.int64]  # [N] likeliest token
    target: NDArray[np.int64]  # [N] true token
    nll: NDArray[np.float32]  # [N] negative log-likelihood of the true token, nats
    row: NDArray[np.int64]  # [N] row of `TokenRows`

    @property
    def correct(self) -> NDArray[np.bool_]:
        return self.predicted == self.target

    @property
    def accuracy(self) -> float:
        return float(self.correct.mean())

    @property
    def perplexity(self) -> float:
        return perplexity(self.nll)


@dataclasses.dataclass
class ReadCounter:
    """Adds up what steps read from `model.moe_opt.last_step`; per layer, means over steps."""

    steps: int = 0
    active: torch.Tensor | None = None  # int64 [L]
    routed: torch.Tensor | None = None
    delegated: torch.Tensor | None = None  # float64 [L]

    def add(self, runtime: Any) -> None:
        step = runtime.last_step
        now = (step.active_experts, step.routed_experts, step.delegated_share)
        if self.active is None or self.routed is None or self.delegated is None:
            self.active, self.routed, self.delegated = now
        else:
            self.active, self.routed, self.delegated = (
                self.active + now[0],
                self.routed + now[1],
                self.delegated + now[2],
            )
        self.steps += 1

    def mean(self) -> dict[str, Any]:
        """experts_read and experts_routed (what exact output reads) per layer and step, their ratio, and the share of
        assignments that another expert (or none) computed."""
        if self.active is None or self.routed is None or self.delegated is None:
            raise ConfigError("no step was counted")
        active, routed = self.active / self.steps, self.routed / self.steps
        return {
            "steps": self.steps,
            "experts_read": float(active.mean()),
            "experts_read_per_layer": [round(float(v), 4) for v in active],
            "experts_routed": float(routed.mean()),
            "read_ratio": float(active.sum() / routed.sum()),
            "delegated_share": float((self.delegated / self.steps).mean()),
        }


@torch.no_grad()
def score_prefill(
    model: Any,
    rows: TokenRows,
    *,
    batch_size: int = 8,
    reads: ReadCounter | None = None,
    progress: Callable[[int], Any] | None = None,
) -> TokenScores:
    """Score every token with whole [B, S] batches as steps. Padding is neither scored nor counted by brownout.

    Args:
        model: a causal LM; with `reads` it must have `model.moe_opt`. progress: called with the tokens of each step.
    """
    found: list[TokenScores] = []
    for start in range(0, len(rows), batch_size):
        part = slice(start, start + batch_size)
        ids = rows.ids[part].to(model.device)
        mask = rows.attention[part]
        whole = bool(mask.all())
        logits = model(
            input_ids=ids, attention_mask=None if whole else mask.to(model.device, torch.int64), use_cache=False
        ).logits
        if reads is not None:
            reads.add(model.moe_opt)
        scored = rows.scored[part][:, 1:].to(model.device)
        row, _ = torch.nonzero(scored, as_tuple=True)
        found.append(_score(logits[:, :-1][scored], ids[:, 1:][scored], row + start))
        if progress is not None:
            progress(int(mask.sum()))
    return _joined(found)


@torch.no_grad()
def score_decode(
    model: Any,
    rows: TokenRows,
    *,
    batch_size: int = 32,
    prompt: int = 32,
    reads: ReadCounter | None = None,
    progress: Callable[[int], Any] | None = None,
) -> TokenScores:
    """Score tokens `prompt + 1` on of each row as a server decodes: `batch_size` rows move together, one token a step,
    with a KV cache. The true tokens are fed, so exact and browned-out output are compared on the same context.

    Brownout set for "decode" then acts on counts of one token a row. The first `prompt` tokens are one prefill step,
    which is neither scored nor counted in `reads`.

    Raises:
        ConfigError: padded rows, or rows no longer than the prompt.
    """
    length = rows.ids.shape[1]
    if rows.padded:
        raise ConfigError("decode scoring needs packed rows of one length")
    if not 1 <= prompt <= length - 2:
        raise ConfigError(f"a prompt of {prompt} tokens leaves nothing to decode in rows of {length}")
    found: list[TokenScores] = []
    for start in range(0, len(rows), batch_size):
        part = slice(start, start + batch_size)
        ids = rows.ids[part].to(model.device)
        scored = rows.scored[part].to(model.device)
        cache = model(input_ids=ids[:, :prompt], use_cache=True, logits_to_keep=1).past_key_values
        for place in range(prompt, length - 1):
            output = model(input_ids=ids[:, place : place + 1], past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            if reads is not None:
                reads.add(model.moe_opt)
            here = torch.nonzero(scored[:, place + 1]).squeeze(1)
            found.append(_score(output.logits[here, -1], ids[here, place + 1], here + start))
            if progress is not None:
                progress(ids.shape[0])
    return _joined(found)


def _score(logits: torch.Tensor, target: torch.Tensor, row: torch.Tensor) -> TokenScores:
    """logits [T, V], target int64 [T], row int64 [T]."""
    predicted, nll = [], []
    for start in range(0, logits.shape[0], _CHUNK):
        part = logits[start : start + _CHUNK].float()
        predicted.append(part.argmax(-1))
        nll.append(torch.nn.functional.cross_entropy(part, target[start : start + _CHUNK], reduction="none"))
    empty = torch.zeros(0, device=logits.device)
    return TokenScores(
        torch.cat([empty.long(), *predicted]).cpu().numpy(),
        target.cpu().numpy(),
        torch.cat([empty, *nll]).cpu().numpy(),
        row.cpu().numpy(),
    )


def _joined(parts: list[TokenScores]) -> TokenScores:
    """All parts, ordered by row, and within a row by place (parts come in order of place)."""
    predicted, target, nll, row = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(row, kind="stable")
    return TokenScores(predicted[order], target[order], nll[order], row[order])
