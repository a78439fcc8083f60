"""Our server beside vLLM's on the same CPU: output tokens per second at 1, 8 and 32 concurrent requests.

    scripts/install_vllm.sh .venv-vllm
    python benchmarks/vllm_peer.py --vllm .venv-vllm/bin/vllm

Both serve the demo model over OpenAI's `/v1/completions` with the same prompts and lengths, one server at a time, each
with all cores. Ours is measured exact and browned out (united experts, 8 ways, threshold 0). vLLM runs with its default
compilation unless --eager.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from common import write_result

from moe_opt.serving.launcher import free_port
from moe_opt.serving.load_prompts import PromptPool, load_texts
from moe_opt.serving.loadgen import LoadRequest, Target, run_closed

ROOT = Path(__file__).resolve().parents[1]
CASES = ((1, 64), (8, 64), (32, 64), (32, 512))  # concurrency, prompt tokens


@contextlib.contextmanager
def server(command: list[str], url: str, environment: dict[str, str], log: Path) -> Iterator[None]:
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env={**os.environ, **environment}, start_new_session=True
        )
        try:
            end = time.monotonic() + 300
            while True:
                with contextlib.suppress(OSError):
                    if urllib.request.urlopen(url + "/health", timeout=2).status == 200:
                        break
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"{command[0]} did not start; see {log}")
                time.sleep(0.5)
            yield
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


async def measure(target: Target, pool: PromptPool, args: argparse.Namespace) -> dict[str, float]:
    found = {}
    for concurrency, tokens in CASES:
        rates = []
        for run in range(args.runs + 1):
            count = concurrency if concurrency > 1 else 4
            requests = [LoadRequest(str(i), 0.0, pool.cut(tokens), args.output_tokens) for i in range(count)]
            records, seconds = await run_closed(requests, target, concurrency)
            failed = [record.error for record in records if record.status != "ok"]
            if failed:
                raise SystemExit(f"{len(failed)} of {count} requests failed: {failed[0]}")
            if run:  # the first one warms up
                rates.append(count * args.output_tokens / seconds)
        found[f"{concurrency} x {tokens}"] = statistics.median(rates)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, help="its program, of scripts/install_vllm.sh")
    parser.add_argument("--model", type=Path, default=ROOT / "examples" / "demo_model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--eager", action="store_true", help="vLLM without compilation")
    parser.add_argument("--logs", type=Path, default=Path("/tmp"))
    args = parser.parse_args()
    pool = asyncio.run(PromptPool.build(load_texts(None), Target("http://127.0.0.1:1")))
    results: dict[str, dict[str, float]] = {}
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    target = Target(url, dialect="openai", model=str(args.model))
    command = [args.vllm, "serve", str(args.model), "--port", str(port), "--dtype", args.dtype, "--max-num-seqs", "32",
               "--max-model-len", "2048", *(["--enforce-eager"] if args.eager else [])]  # fmt: skip
    with server(command, url, {"VLLM_CPU_KVCACHE_SPACE": "1"}, args.logs / "vllm_peer.log"):
        results["vLLM"] = asyncio.run(measure(target, pool, args))
    for name, flags in (
        ("moe_opt, exact", []),
        ("moe_opt, browned out", ["--united-experts", str(args.model / "united"), "--ways", "8"]),
    ):
        serve = [sys.executable, "-m", "moe_opt.serving.serve_command", "--model-id", str(args.model)]
        command = [*serve, "--port", str(port), "--hostname", "127.0.0.1", "--dtype", args.dtype]
        command += ["--max-total-tokens", "2048", *flags]
        with server(command, url, {}, args.logs / "moe_opt_peer.log"):
            if flags:
                body = b'{"threshold": 0.0}'
                request = urllib.request.Request(url + "/brownout", body, {"Content-Type": "application/json"})
                urllib.request.urlopen(request, timeout=10).close()
            results[name] = asyncio.run(measure(target, pool, args))
    print(f"{'output tokens/s':24}" + "".join(f"{f'{c} x {t}':>12}" for c, t in CASES))
    for name, rates in results.items():
        print(f"{name:24}" + "".join(f"{rate:12,.0f}" for rate in rates.values()))
    print(f"{'exact / vLLM':24}" + "".join(
        f"{ours / theirs:11.2f}x"
        for ours, theirs in zip(results["moe_opt, exact"].values(), results["vLLM"].values(), strict=True)
    ))  # fmt: skip
    write_result("vllm_peer", {"dtype": args.dtype, "output_tokens": args.output_tokens, "tokens_per_second": results})


if __name__ == "__main__":
    main()
