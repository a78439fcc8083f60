"""Expert counts of calibration prompts, asked of a running worker, and the signature model fitted on them (ELDR)."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import numpy as np

from moe_opt.cluster.signature import SignatureModel
from moe_opt.cluster.token_table import TokenTable
from moe_opt.errors import ConfigError, MoEOptError
from moe_opt.serving.router.signatures import decode_counts


@dataclasses.dataclass(frozen=True, slots=True)
class Calibration:
    """What N prompts used: prefill int64 [N, L, E], decode int64 [N, L, E] (top-k choices), and the prompts' ids."""

    prefill: np.ndarray
    decode: np.ndarray
    token_ids: list[list[int]]


async def collect(
    url: str,
    prompts: Sequence[str],
    *,
    output_tokens: int = 32,
    concurrency: int = 8,
    api_key: str | None = None,
    timeout: float = 300.0,
    on_done: Callable[[], None] | None = None,
) -> Calibration:
    """Let a worker of ours (or a router over such workers) answer every prompt greedily, and take its expert counts.

    Raises:
        MoEOptError: nobody answers there, or what answers does not count experts.
    """
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    gate = asyncio.Semaphore(concurrency)

    async def one(session: aiohttp.ClientSession, prompt: str) -> tuple[np.ndarray, np.ndarray, list[int]]:
        body = {
            "prompt": prompt, "max_tokens": output_tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, "return_expert_counts": True,
        }  # fmt: skip
        async with gate, session.post(url.rstrip("/") + "/v1/completions", json=body) as answer:
            said = await answer.json()
        if answer.status != 200:
            raise MoEOptError(f"{url} answers {answer.status}: {said.get('error', said)}")
        if not said.get("decode_expert_counts"):
            raise MoEOptError(f"{url} does not say which experts a request used: it needs a moe_opt worker")
        if on_done is not None:
            on_done()
        return (
            decode_counts(said["prefill_expert_counts"]),
            decode_counts(said["decode_expert_counts"]),
            said["prompt_token_ids"],
        )

    limit = aiohttp.ClientTimeout(total=timeout)
    try:
        async with aiohttp.ClientSession(headers=headers, timeout=limit) as session:
            found = await asyncio.gather(*(one(session, prompt) for prompt in prompts))
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise MoEOptError(f"{url}: {error or type(error).__name__}: start a worker with `moe-opt serve`") from error
    return Calibration(np.stack([f[0] for f in found]), np.stack([f[1] for f in found]), [f[2] for f in found])


def fit(calibration: Calibration, num_workers: int, **options: Any) -> SignatureModel:
    """The signature model, with a token table for workers that report no experts.

    Raises:
        ConfigError: too few prompts for so many workers.
    """
    tokens = calibration.decode.sum(axis=(1, 2), keepdims=True)
    if not tokens.all():
        raise ConfigError("some calibration prompts generated nothing: ask for at least 2 output tokens")
    probabilities = calibration.decode / np.maximum(1, calibration.decode.sum(axis=2, keepdims=True))
    model = SignatureModel.fit(calibration.prefill, probabilities, num_workers, **options)
    table = TokenTable.fit_counts(calibration.token_ids, calibration.prefill)
    return model.with_token_table(table)
