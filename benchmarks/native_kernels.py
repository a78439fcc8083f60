"""The CPU kernels beside what torch runs in their place: experts, attention, linear layers and the small operations.

    python benchmarks/native_kernels.py

Every figure is the median of interleaved runs over several layers' weights, so that neither side finds its weights in
the nearest cache. Ratios above 1 are ours.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from common import write_result
from transformers import Qwen2MoeConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.qwen2_moe.modeling_qwen2_moe import (
    Qwen2MoeExperts,
    Qwen2MoeMLP,
    Qwen2MoeRMSNorm,
    Qwen2MoeTopKRouter,
    apply_rotary_pos_emb,
)

from moe_opt.modeling.brownout import delegate_per_group
from moe_opt.modeling.kernels.native import library
from moe_opt.modeling.kernels.native_experts import native_experts_or_none
from moe_opt.modeling.kernels.native_modules import NativeModules
from moe_opt.modeling.kernels.native_rows import rotary_or_none
from moe_opt.serving.engine.attention import AttentionBackend, LayerKV, RunsAttention, Span
from moe_opt.serving.engine.attention_native import NativeAttention

LAYERS = 4
# hidden size, intermediate size, experts, top-k
SHAPES = {"demo model": (256, 48, 32, 4), "Qwen3-30B-A3B, 32 of 128 experts": (2048, 768, 32, 2)}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def compare(ours: Callable[[], Any], theirs: Callable[[], Any], runs: int) -> dict[str, float]:
    """Median microseconds of both, a call each in turn."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(2):
        ours(), theirs()
    for _ in range(runs):
        for function, found in zip((ours, theirs), times, strict=True):
            started = time.perf_counter()
            function()
            found.append(time.perf_counter() - started)
    mine, other = (statistics.median(found) / LAYERS * 1e6 for found in times)
    return {"ours_us": round(mine, 1), "torch_us": round(other, 1), "ratio": round(other / mine, 2)}


def experts(name: str, dtype: torch.dtype, tokens: int, runs: int) -> dict[str, float]:
    width, inner, count, top_k = SHAPES[name]
    config = Qwen2MoeConfig(
        hidden_size=width, moe_intermediate_size=inner, num_experts=count, num_experts_per_tok=top_k
    )
    modules = [Qwen2MoeExperts(config).to(dtype).requires_grad_(False) for _ in range(LAYERS)]
    for module in modules:
        for parameter in module.parameters():
            parameter.normal_(std=0.05)
    hidden = torch.randn(tokens, width, dtype=dtype)
    ids = torch.stack([torch.randperm(count)[:top_k] for _ in range(tokens)])
    shares = torch.rand(tokens, top_k)
    grouped = ALL_EXPERTS_FUNCTIONS["grouped_mm"]
    return compare(
        lambda: [native_experts_or_none(module, hidden, ids, shares, any_number=True) for module in modules],
        lambda: [grouped(module, hidden, ids, shares) for module in modules],
        runs,
    )


def attend(
    spans: list[Span], slots: torch.Tensor, query: torch.Tensor, key: torch.Tensor, cached: int, runs: int
) -> dict[str, float]:
    """Our attention beside the portable one over `cached` tokens. query [T, heads, 64], key [T, KV heads, 64]."""
    loaded = library.load()
    assert loaded is not None

    def layers_of(backend: AttentionBackend) -> list[LayerKV]:
        backend.begin(spans, slots)
        pool = lambda: torch.randn(2, cached, 64).to(key.dtype).transpose(0, 1)  # noqa: E731
        return [LayerKV(index, pool(), pool(), 64, None, backend) for index in range(LAYERS)]

    ours, theirs = layers_of(NativeAttention(loaded)), layers_of(RunsAttention())
    return compare(
        lambda: [layer.owner.attend(layer, query, key, key, 0.125, None) for layer in ours],
        lambda: [layer.owner.attend(layer, query, key, key, 0.125, None) for layer in theirs],
        runs,
    )


def attention(dtype: torch.dtype, rows: int, context: int, runs: int) -> dict[str, float]:
    spans = [Span(row, 1, context, [], [(row * context, context)]) for row in range(rows)]
    query, key = torch.randn(rows, 4, 64, dtype=dtype), torch.randn(rows, 2, 64, dtype=dtype)
    slots = torch.arange(rows) * context + context - 1
    return attend(spans, slots, query, key, rows * context, runs)


def linear(width: int, columns: int, rows: int, runs: int) -> dict[str, float]:
    plain = [torch.nn.Linear(width, columns, dtype=torch.bfloat16) for _ in range(LAYERS)]
    taken = torch.nn.ModuleList(torch.nn.Linear(width, columns, dtype=torch.bfloat16) for _ in range(LAYERS))
    NativeModules(taken)
    x = torch.randn(rows, width, dtype=torch.bfloat16)
    return compare(lambda: [layer(x) for layer in taken], lambda: [layer(x) for layer in plain], runs)


def prefill(tokens: int, before: int, runs: int) -> dict[str, float]:
    """A chunk of `tokens` behind `before` cached ones: 4 heads of 64 over 2 KV heads."""
    length = before + tokens
    spans, slots = [Span(0, tokens, length, [], [(0, length)])], torch.arange(before, length)
    query, key = (torch.randn(tokens, heads, 64, dtype=torch.bfloat16) for heads in (4, 2))
    return attend(spans, slots, query, key, length, runs)


def part(make: Callable[[], torch.nn.Module], rows: int, runs: int) -> dict[str, float]:
    """A module that `NativeModules` takes, against itself. Its input has 256 columns."""
    plain = [make().to(torch.bfloat16) for _ in range(LAYERS)]
    for module in plain:
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.05)
    taken = copy.deepcopy(torch.nn.ModuleList(plain))
    NativeModules(taken)
    x = torch.randn(rows, 256, dtype=torch.bfloat16)
    return compare(lambda: [module(x) for module in taken], lambda: [module(x) for module in plain], runs)


def rotary(rows: int, runs: int) -> dict[str, float]:
    loaded = library.load()
    assert loaded is not None
    ours = rotary_or_none(apply_rotary_pos_emb, loaded)
    assert ours is not None
    q, k = (torch.randn(1, rows, heads, 64, dtype=torch.bfloat16).transpose(1, 2) for heads in (4, 2))
    cos, sin = (torch.randn(1, rows, 64, dtype=torch.bfloat16) for _ in range(2))
    return compare(
        lambda: [ours(q, k, cos, sin) for _ in range(LAYERS)],
        lambda: [apply_rotary_pos_emb(q, k, cos, sin) for _ in range(LAYERS)],
        runs,
    )


def brownout_plan(rows: int, runs: int) -> dict[str, float]:
    """Against NumPy, which runs where the kernels are not in use."""
    ids = torch.stack([torch.randperm(32)[:4] for _ in range(rows)])
    shares, groups = torch.rand(rows, 4), torch.arange(32) // 8

    def plan(native: bool) -> None:
        with mock.patch.object(library, "if_loaded", library.load if native else lambda: None):
            for _ in range(LAYERS):
                delegate_per_group(ids, shares, 0.4, groups, "partial")

    return compare(lambda: plan(True), lambda: plan(False), runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15)
    args = parser.parse_args()
    if library.load() is None:
        raise SystemExit("the kernels could not be compiled here (see the log): there is nothing to measure")
    torch.manual_seed(0)
    results: dict[str, dict[str, float]] = {}

    def show(name: str, found: dict[str, float]) -> None:
        results[name] = found
        print(
            f"{name:68}{found['ours_us']:>10,.0f} us {found['torch_us']:>10,.0f} us{found['ratio']:>8.2f}x", flush=True
        )

    print(f"{'':68}{'ours':>13}{'torch':>14}{'ratio':>9}")
    with torch.inference_mode():
        for name in SHAPES:
            for label, dtype in DTYPES.items():
                for tokens in (1, 8, 32, 128, 512):
                    show(f"experts, {name}, {label}, {tokens} tokens", experts(name, dtype, tokens, args.runs))
        for dtype in DTYPES:
            for rows, context in ((1, 512), (8, 512), (32, 128), (32, 512)):
                show(
                    f"attention, {dtype}, {rows} rows of {context}", attention(DTYPES[dtype], rows, context, args.runs)
                )
        for width, columns in ((256, 256), (2048, 2048), (256, 8192)):
            for rows in (1, 32, 512):
                show(f"linear, bfloat16, {width} x {columns}, {rows} rows", linear(width, columns, rows, args.runs))
        for tokens, before in ((64, 0), (512, 0), (512, 1536)):
            show(f"prefill attention, bfloat16, {tokens} tokens behind {before}", prefill(tokens, before, args.runs))
        config = Qwen2MoeConfig(hidden_size=256, num_experts=32, num_experts_per_tok=4)
        for rows in (1, 32, 512):
            show(f"router, 256 to 32, bfloat16, {rows} rows", part(lambda: Qwen2MoeTopKRouter(config), rows, args.runs))
            mlp = lambda: Qwen2MoeMLP(config, intermediate_size=192)  # noqa: E731
            show(f"gated MLP, 256 to 192, bfloat16, {rows} rows", part(mlp, rows, args.runs))
            show(f"norm, 256, bfloat16, {rows} rows", part(lambda: Qwen2MoeRMSNorm(256), rows, args.runs))
            show(f"rotary embedding, 6 heads of 64, bfloat16, {rows} rows", rotary(rows, args.runs))
        for rows in (1, 32):
            show(f"brownout's plan, 32 experts, {rows} rows, against NumPy", brownout_plan(rows, args.runs))
    write_result("native_kernels", {"threads": torch.get_num_threads(), "results": results})


if __name__ == "__main__":
    main()
