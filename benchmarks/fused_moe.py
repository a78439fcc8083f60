"""The fused decode kernel beside `grouped_mm` and beside the time to read the activated weights, on a GPU.

    python benchmarks/fused_moe.py                          # Qwen3-30B-A3B's and gpt-oss-20b's layers, batches 1-256
    python benchmarks/fused_moe.py --shape 128 8 2048 768   # experts, top-k, hidden, intermediate

"of bandwidth": bytes of the activated experts' weights by the time, as a share of what a copy of 1 GiB reaches in the
same run. Each figure is the median of captured-graph replays, the kernels taking turns.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import write_result
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moe_opt.modeling.kernels.fused_experts import FusedWeights, fused_experts

SHAPES = {"Qwen3-30B-A3B": (128, 8, 2048, 768, "silu"), "gpt-oss-20b": (32, 4, 2880, 2880, "gpt_oss")}
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def graph_of(run: Callable[[], Any]) -> Callable[[], None]:
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def microseconds(replays: dict[str, Callable[[], None]], rounds: int = 50) -> dict[str, float]:
    found: dict[str, list[float]] = {name: [] for name in replays}
    flush = torch.empty(64 << 20, dtype=torch.int32, device="cuda")  # weights must come from memory, not from L2
    for _ in range(rounds):
        for name, replay in replays.items():
            flush.zero_()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            replay()
            end.record()
            torch.cuda.synchronize()
            found[name].append(1e3 * start.elapsed_time(end))
    return {name: statistics.median(values) for name, values in found.items()}


def bandwidth() -> float:
    """Bytes per second that a copy reads and writes."""
    source = torch.empty(1 << 28, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / (microseconds({"copy": graph_of(lambda: target.copy_(source))})["copy"] * 1e-6)


class Layer:
    """What `grouped_mm` reads of an experts module."""

    def __init__(self, experts: int, hidden: int, inner: int, activation: str) -> None:
        oss = activation == "gpt_oss"
        self.num_experts, self.has_gate, self.has_bias, self.is_transposed = experts, True, oss, oss
        self.has_post_expert_norm = self._is_expert_parallel = False
        shape = (experts, hidden, 2 * inner) if oss else (experts, 2 * inner, hidden)
        down = (experts, inner, hidden) if oss else (experts, hidden, inner)

        def draw(*size: int) -> torch.Tensor:
            return torch.randn(*size, device="cuda", dtype=torch.bfloat16) / 32

        self.gate_up_proj, self.down_proj = draw(*shape), draw(*down)
        self.gate_up_proj_bias = draw(experts, 2 * inner) if oss else None
        self.down_proj_bias = draw(experts, hidden) if oss else None
        self._oss = oss

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        if self._oss:
            gate, up = gate_up[..., ::2].clamp(max=7.0), gate_up[..., 1::2].clamp(-7.0, 7.0)
            return (up + 1) * gate * torch.sigmoid(gate * 1.702)
        gate, up = gate_up.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=4, metavar=("EXPERTS", "TOP_K", "HIDDEN", "INTERMEDIATE"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("fused_moe.py measures a GPU, and there is none here")
    shapes = {"given": (*args.shape, "silu")} if args.shape else SHAPES
    peak = bandwidth()
    print(f"a copy reaches {peak / 1e9:,.0f} GB/s")
    rows = []
    for name, (experts, top_k, hidden, inner, activation) in shapes.items():
        layer = Layer(experts, hidden, inner, activation)
        oss = activation == "gpt_oss"
        storage = FusedWeights(
            layer.gate_up_proj, layer.down_proj, layer.gate_up_proj_bias, layer.down_proj_bias,
            transposed=oss, interleaved=oss, activation=activation,
        )  # fmt: skip
        print(f"{name}\n{'batch':>6} {'experts':>8} {'fused':>10} {'grouped_mm':>11} {'ratio':>6} {'of bandwidth':>13}")
        for batch in BATCHES:
            x = torch.randn(batch, hidden, device="cuda", dtype=torch.bfloat16)
            ids = torch.rand(batch, experts, device="cuda").topk(top_k).indices
            gates = torch.rand(batch, top_k, device="cuda", dtype=torch.bfloat16)
            with torch.inference_mode():
                times = microseconds(
                    {
                        "fused": graph_of(partial(fused_experts, x, ids, gates, storage)),
                        "grouped_mm": graph_of(partial(ALL_EXPERTS_FUNCTIONS["grouped_mm"], layer, x, ids, gates)),
                    }
                )
            active = int(ids.unique().numel())
            size = active * 3 * hidden * inner * 2
            share = size / (times["fused"] * 1e-6) / peak
            rows.append({"shape": name, "batch": batch, "experts": active, **times, "share_of_bandwidth": share})
            print(
                f"{batch:6} {active:8} {times['fused']:7.1f} us {times['grouped_mm']:8.1f} us "
                f"{times['grouped_mm'] / times['fused']:5.2f}x {100 * share:11.0f} %"
            )
    print("wanted: 80 % of bandwidth at batches 1 to 32")
    write_result("fused_moe", {"copy_gb_per_second": peak / 1e9, "rows": rows})


if __name__ == "__main__":
    main()
