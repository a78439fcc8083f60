"""`moe-opt launch`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import shlex
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from moe_opt.errors import ConfigError
from moe_opt.serving.router_flags import add_router_arguments, listen, router_settings

if TYPE_CHECKING:
    from moe_opt.serving.launcher import FleetPlan, LocalFleet
    from moe_opt.serving.router.config import RouterSettings

HELP = "prefill and decode workers and their router on this machine"
EXAMPLE = """
moe-opt launch --model-id examples/demo_model --prefill 1 --decode 2 --policy eldr --port 8080
moe-opt launch --model-id examples/demo_model --decode 4 --policy br-h --serve-flags "--max-batch-size 16"
moe-opt launch --model-id Qwen/Qwen3-30B-A3B --prefill 1 --decode 4 --policy br-0 --print-vllm
"""
logger = logging.getLogger("moe_opt.launch")
_PASSED = ("dtype", "united_experts", "ways", "slo_ttft", "slo_tpot", "max_total_tokens", "max_batch_size", "revision")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model-id", required=True, help="model to serve: a folder or a Hub id")
    parser.add_argument("--prefill", type=int, default=1, help="workers that compute prompts (default: 1)")
    parser.add_argument("--decode", type=int, default=2, help="workers that generate (default: 2)")
    parser.add_argument("--threads", type=int, help="threads of each worker on a CPU (default: cores / workers)")
    for name in _PASSED:
        parser.add_argument(f"--{name.replace('_', '-')}", help="as in `moe-opt serve`")
    parser.add_argument("--serve-flags", default="", metavar="FLAGS", help="further flags of `moe-opt serve`, quoted")
    parser.add_argument("--print-vllm", action="store_true", help="print the commands of such a fleet with vLLM; end")
    parser.add_argument("--restarts", type=int, default=5, help="of a worker that dies, within 5 minutes (default: 5)")
    parser.add_argument("--restart-backoff", type=float, default=1.0, help="seconds before the first (default: 1)")
    parser.add_argument("--start-timeout", type=float, default=600.0, help="seconds to load the model (default: 600)")
    add_router_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C; SIGHUP restarts the workers one by one."""
    from moe_opt.serving.launcher import FleetPlan, vllm_commands
    from moe_opt.serving.observability import setup_logging
    from moe_opt.serving.router.server import loop_factory

    if args.print_vllm:
        print("\n".join(vllm_commands(args.model_id, args.prefill, args.decode, args.policy)))
        return 0
    setup_logging(args.log_level, args.json_output)
    flags: list[str] = []
    for name in _PASSED:
        value = getattr(args, name)
        if value is not None:
            flags += [f"--{name.replace('_', '-')}", value]
    try:
        flags += shlex.split(args.serve_flags)
    except ValueError as error:
        raise ConfigError(f"--serve-flags: {error}") from error
    if args.api_key is not None:
        flags += ["--api-key", args.api_key]
    if args.model_id.startswith((".", "/", "~")) and not Path(args.model_id).expanduser().is_dir():
        raise ConfigError(f"--model-id {args.model_id}: no such folder")
    plan = FleetPlan(
        args.model_id,
        args.prefill,
        args.decode,
        tuple(flags),
        args.threads,
        start_timeout=args.start_timeout,
        restarts=args.restarts,
        restart_backoff=args.restart_backoff,
    )
    sock = listen(args.hostname, args.port)
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(_launch(args, plan, sock))
    finally:
        sock.close()


async def _launch(args: argparse.Namespace, plan: FleetPlan, sock: socket.socket) -> int:
    from moe_opt.serving.launcher import LocalFleet, vllm_commands
    from moe_opt.serving.observability import Tracer
    from moe_opt.serving.router.router import Router
    from moe_opt.serving.router.server import serve_router

    settings = router_settings(args)
    check_policy(settings)
    fleet = LocalFleet(plan)
    logger.info("starting %d prefill and %d decode workers", plan.prefill, plan.decode)
    await fleet.start()
    with tempfile.TemporaryDirectory(prefix="moe-opt-") as folder:
        try:
            if settings.policy.startswith("eldr") and settings.signature_model is None:
                settings = await fit_at_start(fleet, settings, Path(folder) / "signatures.npz", args.api_key)
            router = Router(settings, fleet.specs, api_key=args.api_key, trace=args.trace)
        except BaseException:
            await fleet.end()
            raise
        for line in vllm_commands(plan.model_id, plan.prefill, plan.decode, settings.policy):
            logger.debug("with vLLM: %s", line)
        logger.info("dashboard at http://127.0.0.1:%d/ui; the same fleet on vLLM: --print-vllm", sock.getsockname()[1])
        tracer = Tracer(args.otlp_endpoint, "moe-opt.router")
        return await serve_router(
            router, sock, graceful=args.graceful_termination_timeout, tracer=tracer, beside=fleet.care
        )


def check_policy(settings: RouterSettings) -> None:
    """A misspelt policy must not cost the minutes that workers load."""
    from moe_opt.cluster.policies import make_policy

    if settings.policy not in ("eldr", "eldr+br-0", "eldr+br-h"):
        make_policy(settings.policy, **settings.options)


async def fit_at_start(fleet: LocalFleet, settings: RouterSettings, path: Path, api_key: str | None) -> RouterSettings:
    """Signatures from our own texts, so that ELDR works out of the box; those of real traffic are better."""
    import dataclasses

    from moe_opt.serving.calibrate import collect, fit
    from moe_opt.workloads.sample_texts import calibration_prompts

    prompts = calibration_prompts()
    logger.info("fitting expert signatures on %d texts of ours (--signature-model FILE skips this)", len(prompts))
    decoder = next(worker for worker in fleet.workers if worker.role == "decode")
    calibration = await collect(decoder.spec.url, prompts, output_tokens=16, api_key=api_key)
    model = fit(calibration, fleet.plan.decode)
    model.save(path)
    logger.info("signatures: rho %.3f, layers %s", model.rho, list(model.layers))
    return dataclasses.replace(settings, signature_model=str(path))
