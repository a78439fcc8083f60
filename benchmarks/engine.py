"""The engine against Transformers' continuous batching, and against a forward pass with nothing around it.

    python benchmarks/engine.py --model examples/demo_model              # 32 requests of 512 tokens, float32
    python benchmarks/engine.py --model examples/demo_model --dtype bfloat16 --threads 2

Step: one decode step of the engine beside one forward pass of the stock model over the same number of tokens and the
same past, held in one dense tensor per layer without pages, lengths or sampling ("bare"). They take turns. Throughput:
the same requests through the engine, through `generate_batch` (continuous batching) and through `generate` (one static
batch), in one run. Ratios are what counts; a busy machine slows all of them.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from common import interleaved, median_ms, write_result
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
    ContinuousBatchingConfig,
    GenerationConfig,
)

import moe_opt  # noqa: F401  (the moe_opt keyword)
from moe_opt.serving.engine.config import EngineConfig
from moe_opt.serving.engine.engine import Engine
from moe_opt.serving.engine.types import GenerationRequest, SamplingParams, StepReport


class Bare:
    """A stock model's forward pass over `[1, B]` tokens whose past lies ready in dense tensors [B, heads, L, dim]."""

    def __init__(self, path: str, dtype: torch.dtype, batch: int, length: int) -> None:
        self.batch, self.length = batch, length
        self.past: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        AttentionInterface.register("bare_packed", self._attend)
        AttentionMaskInterface.register("bare_packed", lambda *args, **kwargs: None)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        self.model.set_attn_implementation("bare_packed")
        self.ids = torch.randint(10, 1000, (1, batch))
        self.positions = torch.full((1, batch), length)

    def _attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        _, heads, tokens, dim = query.shape
        kv_heads = key.shape[1]
        if module.layer_idx not in self.past:
            shape = (self.batch, kv_heads, self.length + 1, dim)
            self.past[module.layer_idx] = torch.randn(shape).to(key.dtype), torch.randn(shape).to(key.dtype)
        keys, values = self.past[module.layer_idx]
        keys[:, :, -1] = key[0].transpose(0, 1)
        values[:, :, -1] = value[0].transpose(0, 1)
        q = query[0].transpose(0, 1).reshape(tokens, kv_heads, heads // kv_heads, dim)
        out = torch.nn.functional.scaled_dot_product_attention(q, keys, values, scale=kwargs.get("scaling"))
        return out.reshape(1, tokens, heads, dim), None

    def __call__(self) -> None:
        with torch.inference_mode():
            self.model(input_ids=self.ids, position_ids=self.positions, use_cache=False)


def make_engine(args: argparse.Namespace, on_step: Callable[[StepReport], None] | None = None) -> Engine:
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype, moe_opt={"kernels": "fused"})
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    config = EngineConfig(
        max_batch_size=args.batch,
        max_batch_prefill_tokens=2048,
        kv_pages=2 * args.batch * (args.prompt + args.output + 400) // 16,
        prefix_caching=True,
    )
    return Engine(model, tokenizer, config, on_step=on_step)


def requests(args: argparse.Namespace, seed: int, output: int) -> list[GenerationRequest]:
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(10, 8000, (args.batch, args.prompt), generator=generator).tolist()
    params = SamplingParams(max_new_tokens=output, ignore_eos=True)
    return [GenerationRequest(f"{seed}-{i}", tuple(prompt), params) for i, prompt in enumerate(prompts)]


def step_cost(args: argparse.Namespace) -> dict[str, float]:
    """Medians over alternating calls, and the engine's time outside the model."""
    reports: list[StepReport] = []
    engine = make_engine(args, reports.append)
    bare = Bare(args.model, args.dtype, args.batch, args.prompt + args.repeats // 2)
    for request in requests(args, 0, args.repeats + 40):
        engine.add(request)
    while any(not sequence.decoding for sequence in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    reports.clear()
    cpu: dict[str, list[float]] = {"engine": [], "bare": []}

    def timed(name: str, call: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            started = time.process_time()
            call()
            cpu[name].append(time.process_time() - started)

        return run

    wall = interleaved({"engine": timed("engine", engine.step), "bare": timed("bare", bare)}, repeats=args.repeats)
    engine.close()
    outside = statistics.median((r.seconds - r.forward_seconds) / r.seconds for r in reports)
    figures = {
        "engine_step_ms": median_ms(wall["engine"]),
        "bare_forward_ms": median_ms(wall["bare"]),
        "ratio": statistics.median(wall["engine"]) / statistics.median(wall["bare"]),
        "ratio_of_fastest": min(wall["engine"]) / min(wall["bare"]),
        "ratio_of_cpu_time": statistics.median(cpu["engine"]) / statistics.median(cpu["bare"]),
        "share_outside_model": outside,
    }
    print(
        f"decode step, batch {args.batch} x {args.prompt} tokens: engine {figures['engine_step_ms']:.1f} ms, "
        f"bare packed forward {figures['bare_forward_ms']:.1f} ms"
    )
    print(
        f"  ratio {figures['ratio']:.2f}, of the fastest {figures['ratio_of_fastest']:.2f}, of CPU time "
        f"{figures['ratio_of_cpu_time']:.2f}; outside the model {outside:.1%} of a step"
    )
    return figures


def throughput(args: argparse.Namespace) -> dict[str, Any]:
    """Output tokens per second of whole runs, prompts included; median of `--runs`, in turns."""
    engine = make_engine(args)
    stock = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype).eval()
    generation = GenerationConfig(
        max_new_tokens=args.output, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cache=True
    )
    blocks = 2 * args.batch * -(-(args.prompt + args.output) // 32)
    batching = ContinuousBatchingConfig(page_size=32, num_blocks=blocks, max_batch_tokens=2048)

    def ours(seed: int) -> int:
        for request in requests(args, seed, args.output):
            engine.add(request)
        tokens = 0
        while engine.has_work:
            tokens += sum(1 for _, event in engine.step() if hasattr(event, "token"))
        return tokens

    def continuous(seed: int) -> int:
        prompts = [list(request.prompt_ids) for request in requests(args, seed, args.output)]
        results = stock.generate_batch(
            inputs=prompts, generation_config=generation, continuous_batching_config=batching
        )
        return sum(len(result.generated_tokens) for result in results.values())

    def static(seed: int) -> int:
        prompts = torch.tensor([request.prompt_ids for request in requests(args, seed, args.output)])
        with torch.inference_mode():
            out = stock.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=generation)
        return (out.shape[1] - args.prompt) * len(prompts)

    variants = {"engine": ours, "continuous_batching": continuous, "static_generate": static}
    rates: dict[str, list[float]] = {name: [] for name in variants}
    cpu_rates: dict[str, list[float]] = {name: [] for name in variants}  # a busy machine leaves these alone
    for run in range(args.runs + 1):
        for name, variant in variants.items():
            started, cpu_started = time.perf_counter(), time.process_time()
            tokens = variant(run)
            rate = tokens / (time.perf_counter() - started)
            cpu_rate = tokens / (time.process_time() - cpu_started)
            assert tokens == args.batch * args.output, f"{name} gave {tokens} tokens"
            if run:  # the first one warms up
                rates[name].append(rate)
                cpu_rates[name].append(cpu_rate)
            gc.collect()
    engine.close()
    medians = {name: statistics.median(values) for name, values in rates.items()}
    cpu_medians = {name: statistics.median(values) for name, values in cpu_rates.items()}
    ratios = {name: medians["engine"] / rate for name, rate in medians.items() if name != "engine"}
    cpu_ratios = {name: cpu_medians["engine"] / rate for name, rate in cpu_medians.items() if name != "engine"}
    print(
        f"{args.batch} requests of {args.prompt} tokens, {args.output} each: "
        + ", ".join(f"{name} {rate:.0f} tokens/s" for name, rate in medians.items())
    )
    for name in ratios:
        print(f"  engine / {name} {ratios[name]:.2f}, by CPU time {cpu_ratios[name]:.2f}")
    return {
        "tokens_per_second": medians,
        "tokens_per_cpu_second": cpu_medians,
        "engine_over": ratios,
        "engine_over_by_cpu_time": cpu_ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="examples/demo_model")
    parser.add_argument("--dtype", default="float32", type=lambda name: getattr(torch, name))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens to generate per request")
    parser.add_argument("--repeats", type=int, default=40, help="decode steps timed")
    parser.add_argument("--runs", type=int, default=3, help="runs of the throughput comparison")
    parser.add_argument("--only", choices=["step", "throughput"])
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/engine.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    figures: dict[str, Any] = {
        "setting": {
            "dtype": str(args.dtype).removeprefix("torch."),
            "threads": args.threads,
            "batch": args.batch,
            "prompt_tokens": args.prompt,
            "output_tokens": args.output,
        }
    }
    if args.only != "throughput":
        figures["decode_step"] = step_cost(args)
    if args.only != "step":
        figures["throughput"] = throughput(args)
    if args.save:
        write_result("engine", figures)


if __name__ == "__main__":
    main()
