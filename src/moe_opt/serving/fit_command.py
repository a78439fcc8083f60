"""`moe-opt fit-signatures`."""

from __future__ import annotations

import argparse
import asyncio
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tqdm import tqdm

from moe_opt.errors import ConfigError, MoEOptError

HELP = "learn expert signatures from a running worker, for the router's policy eldr"
EXAMPLE = """
moe-opt serve --model-id examples/demo_model --port 8080 &
moe-opt fit-signatures --url http://127.0.0.1:8080 --num-workers 2 --output signatures.npz
moe-opt fit-signatures --url http://127.0.0.1:8080 --prompts my_prompts.jsonl --num-workers 4 \\
    --output signatures.npz --router http://127.0.0.1:3000
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", required=True, help="a moe_opt worker, or a router in front of some")
    parser.add_argument("--num-workers", type=int, required=True, help="decode workers that will be routed to")
    parser.add_argument("--output", required=True, metavar="FILE", help="where to write the signature model (.npz)")
    parser.add_argument(
        "--prompts", metavar="FILE",
        help="JSONL with prompt, text or inputs, some hundred like your traffic (default: texts of our own)",
    )  # fmt: skip
    parser.add_argument("--limit", type=int, default=500, help="prompts to use at most (default: %(default)s)")
    parser.add_argument("--output-tokens", type=int, default=32, help="tokens to generate for each (default: 32)")
    parser.add_argument("--concurrency", type=int, default=8, help="prompts under way at once (default: 8)")
    parser.add_argument("--weighting", default="auto", help="auto, count, count-idf, log-count or binary")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--api-key", help="of the worker and of the router")
    parser.add_argument("--router", metavar="URL", help="tell this router to use the new model at once")


def run(args: argparse.Namespace) -> int:
    """Collect, fit, save; returns 0."""
    from moe_opt.serving.calibrate import collect, fit
    from moe_opt.serving.load_prompts import load_texts
    from moe_opt.workloads.sample_texts import calibration_prompts

    for name in ("limit", "output_tokens", "concurrency", "num_workers"):
        if getattr(args, name) < (2 if name == "output_tokens" else 1):
            raise ConfigError(f"--{name.replace('_', '-')} is too small: {getattr(args, name)}")
    output = Path(args.output)
    if not output.parent.is_dir():
        raise ConfigError(f"--output {output}: no folder {output.parent}")
    prompts = (calibration_prompts() if args.prompts is None else load_texts(args.prompts, args.seed))[: args.limit]
    if len(prompts) < args.num_workers:
        raise ConfigError(f"{len(prompts)} prompts are too few for {args.num_workers} workers")
    with tqdm(total=len(prompts), unit=" prompts", desc="expert counts") as bar:
        calibration = asyncio.run(
            collect(
                args.url, prompts, output_tokens=args.output_tokens, concurrency=args.concurrency,
                api_key=args.api_key, on_done=lambda: _advance(bar),
            )
        )  # fmt: skip
    model = fit(calibration, args.num_workers, seed=args.seed, weighting=args.weighting)
    model.save(output)
    layers = ", ".join(map(str, model.layers))
    print(f"{len(prompts)} prompts, {model.num_layers} MoE layers of {model.num_experts} experts")
    print(f"weighting {model.weighting}, layers {layers}")
    print(f"rho {model.rho:.3f} from exact counts", end="")
    signatures = model.transform(calibration.prefill)
    by_table = [model.transform_tokens(ids) for ids in calibration.token_ids]
    import numpy as np

    print(f", {model.rho_of(np.stack(by_table), calibration.decode, args.seed):.3f} from token ids alone")
    nearest = np.bincount(np.argmax(signatures @ model.centroids.T, axis=1), minlength=args.num_workers)
    print(f"prompts by nearest centroid: {', '.join(map(str, nearest))}")
    print(f"written to {output}")
    if args.router is not None:
        _tell(args.router, output.resolve(), args.api_key)
        print(f"{args.router} routes by it now")
    return 0


def _advance(bar: Any) -> None:
    bar.update()


def _tell(url: str, path: Path, api_key: str | None) -> None:
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    body = json.dumps({"path": str(path)}).encode()
    request = urllib.request.Request(url.rstrip("/") + "/router/signatures", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=30):
            pass
    except urllib.error.HTTPError as error:
        raise MoEOptError(f"{url} refuses the model: {error.read().decode('utf-8', 'replace')[:300]}") from error
    except OSError as error:
        raise MoEOptError(f"{url}: {error}") from error
