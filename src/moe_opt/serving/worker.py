"""One engine behind the API: loads the model, starts engine, control loop and HTTP server, and ends them in order."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import logging
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from moe_opt.config import MoEOptConfig
from moe_opt.errors import ConfigError, MoEOptError
from moe_opt.modeling.auto import MoEOptimizedForCausalLM
from moe_opt.modeling.united import CONFIG_NAME, UnitedExperts, UnitedExpertsConfig
from moe_opt.serving.api.app import create_app
from moe_opt.serving.api.limits import Limits
from moe_opt.serving.api.prompts import PromptEncoder
from moe_opt.serving.api.service import GenerationService
from moe_opt.serving.api.state import ApiState, ModelInfo
from moe_opt.serving.api.validation import Validator
from moe_opt.serving.brownout_control import BrownoutControl
from moe_opt.serving.engine.async_engine import AsyncEngine
from moe_opt.serving.engine.config import EngineConfig
from moe_opt.serving.kv_transfer import KVTransfer, TransferSettings
from moe_opt.serving.observability import Tracer
from moe_opt.serving.preflight import expert_parallel, objectives
from moe_opt.serving.telemetry import CONTENT_TYPE, Metrics

logger = logging.getLogger("moe_opt.serving")
# The engine's thread comes back from every kernel to ask for the GIL; with Python's 5 ms it would wait for the event
# loop that long, which is more than a whole decode step of a small model.
_SWITCH_INTERVAL = 0.0005


def serve(values: dict[str, Any], sockets: list[socket.socket]) -> int:
    """Serve until SIGTERM or SIGINT.

    Args:
        values: settings by key (`launch_flags.resolve`). sockets: bound ones from `preflight`: the API's, and that of
            the metrics if they have a port of their own.

    Raises:
        MoEOptError, OSError: the model or united experts cannot be served.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL)
    _set_threads(values)
    _join_group(values)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(values, sockets))


def _set_threads(values: dict[str, Any]) -> None:
    """Leave a core to the event loop while decoding: threads of a matrix product that wait for one that is busy with
    HTTP make every product of every layer late. On two cores that halves the throughput. Steps with prompts are long
    enough to take all. Fills in `cpu_prefill_threads`.

    Raises:
        ConfigError: fewer than one.
    """
    for key in ("cpu_threads", "cpu_prefill_threads"):
        if values[key] is not None and values[key] < 1:
            raise ConfigError(f"--{key.replace('_', '-')} must be at least 1, got {values[key]}")
    wanted = values["cpu_threads"]
    if wanted is None and not os.environ.get("OMP_NUM_THREADS"):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        wanted = max(1, cores - 1)
        if values["cpu_prefill_threads"] is None:
            values["cpu_prefill_threads"] = cores
    if wanted is not None:
        torch.set_num_threads(wanted)


def _join_group(values: dict[str, Any]) -> None:
    """The process group of `--expert-parallel`, whose collectives give a silent rank up."""
    if values["expert_parallel"] is None:
        return
    import torch.distributed as dist

    backend = "nccl" if torch.cuda.is_available() and values["device"] != "cpu" else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=values["group_timeout"]))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed: every token crosses the event loop, which shares the GIL with the engine."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def load_model(values: dict[str, Any]) -> tuple[Any, Any]:
    """(model in eval mode on its device, tokenizer)."""
    source, revision, trust = values["model_id"], values["revision"], values["trust_remote_code"]
    device = values["device"] or ("cuda" if torch.cuda.is_available() else "cpu")
    settings = MoEOptConfig(
        brownout_layers=None if values["brownout_layers"] is None else list(values["brownout_layers"]),
        # our own decode kernels; where they cannot be compiled, Transformers' run
        kernels="fused" if values["experts_kernels"] == "auto" and device == "cpu" else values["experts_kernels"],
    )
    settings.expert_parallel = expert_parallel(values)
    if values["united_experts"] is not None:
        settings.united_experts, settings.ways = values["united_experts"], values["ways"]
    if values["json_output"] or not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()  # a bar is no log line
    dtype = values["dtype"] if values["dtype"] == "auto" else getattr(torch, values["dtype"])
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=trust)
        model = MoEOptimizedForCausalLM.from_pretrained(
            source, moe_opt=settings, revision=revision, trust_remote_code=trust, dtype=dtype
        )
        model = model.eval().to(device)
    except MoEOptError:
        raise
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"cannot load {source}: {reason}") from error
    return model, tokenizer


def _chat_template(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        template = json.loads(Path(path).read_text(encoding="utf-8")).get("chat_template")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"--tokenizer-config-path {path}: {error}") from error
    if not isinstance(template, str):
        raise ConfigError(f"--tokenizer-config-path {path} has no chat_template")
    return template


def united_sources(values: dict[str, Any], model: Any) -> tuple[tuple[int, ...], Callable[[int], UnitedExperts] | None]:
    """(ways that can be loaded while serving, how to load them)."""
    source = values["united_experts"] or model.moe_opt.config.united_experts
    if source == ".":
        source = values["model_id"]
    if source is None:
        return (), None
    folder, ways = Path(source), set()
    if folder.is_dir():
        for path in (folder / CONFIG_NAME, *folder.glob(f"ways-*/{CONFIG_NAME}")):
            if path.is_file() and (path.parent == folder or re.fullmatch(r"ways-\d+", path.parent.name)):
                ways.add(UnitedExpertsConfig.from_json(path.read_text(encoding="utf-8"), str(path)).ways)
    elif model.moe_opt.united_config is not None:
        ways.add(model.moe_opt.united_config.ways)
    return tuple(sorted(ways)), lambda wanted: UnitedExperts.from_pretrained(source, ways=wanted)


def _start_brownout(values: dict[str, Any], model: Any) -> None:
    """Strategy and keep rule; every threshold stays 1 until a controller or an operator lowers it."""
    runtime = model.moe_opt
    has_objective = values["slo_ttft"] is not None or values["slo_tpot"] is not None
    without_united = "reroute" if runtime.expert_parallel is None else "top-k"  # that one needs no scores of all ranks
    strategy = values["brownout_strategy"] or ("partial" if runtime.united_config is not None else without_united)
    if has_objective and strategy == "partial" and runtime.united_config is None:
        raise ConfigError("--brownout-strategy partial needs --united-experts; 'reroute' works without")
    runtime.set_brownout(threshold=1.0, strategy=strategy)
    if values["brownout_keep"] is not None:
        runtime.set_brownout(keep=values["brownout_keep"])


def _engine_config(values: dict[str, Any]) -> EngineConfig:
    total = values["max_batch_total_tokens"]
    return EngineConfig(
        max_batch_size=values["max_batch_size"],
        max_batch_prefill_tokens=values["max_batch_prefill_tokens"],
        max_total_tokens=values["max_total_tokens"],
        max_waiting=values["max_concurrent_requests"],
        page_size=values["page_size"],
        kv_pages=None if total is None else max(1, total // values["page_size"]),
        prefix_caching=values["prefix_caching"],
        cuda_graphs=values["cuda_graphs"],
        prefill_threads=values["cpu_prefill_threads"],
        rebalance_steps=values["rebalance_steps"],
        group_timeout=values["group_timeout"],
    )


def _kv_transfer(values: dict[str, Any], port: int) -> KVTransfer | None:
    if values["kv_role"] is None:
        return None
    host = values["kv_host"] or values["hostname"]
    settings = TransferSettings(
        capacity=values["kv_transfer_memory"],
        expiry=values["kv_transfer_expiry"],
        fetch_timeout=values["kv_transfer_timeout"],
        shared_memory=values["kv_shared_memory"],
    )
    return KVTransfer(settings, ("127.0.0.1" if host in ("0.0.0.0", "::") else host, port), values["api_key"])


def build_state(values: dict[str, Any], model: Any, tokenizer: Any, port: int = 0) -> ApiState:
    """Engine, control and API over a loaded model; nothing runs yet. port: where the API will listen."""
    metrics = Metrics()
    _start_brownout(values, model)
    ways, load_united = united_sources(values, model)
    control: BrownoutControl | None = None

    def on_step(report: Any) -> None:
        if control is not None:
            control.on_step(report)

    engine = AsyncEngine(model, tokenizer, _engine_config(values), on_step=on_step)
    control = BrownoutControl(engine, metrics, objectives(values), available_ways=ways, load_united=load_united)
    total = engine.max_total_tokens
    limits = Limits(
        max_input_tokens=values["max_input_tokens"] if values["max_input_tokens"] is not None else total - 1,
        max_total_tokens=total,
        max_concurrent_requests=values["max_concurrent_requests"],
        max_best_of=values["max_best_of"],
        max_stop_sequences=values["max_stop_sequences"],
        max_top_n_tokens=values["max_top_n_tokens"],
        max_client_batch_size=values["max_client_batch_size"],
        max_score_items=values["max_score_items"],
        payload_limit=values["payload_limit"],
        body_timeout=values["body_timeout"],
        write_timeout=values["write_timeout"],
        request_timeout=values["request_timeout"],
        grammar_support=not values["disable_grammar_support"],
    )
    encoder = PromptEncoder(
        tokenizer,
        chat_template=_chat_template(values["tokenizer_config_path"]),
        workers=values["validation_workers"],
    )
    return ApiState(
        engine=engine,
        service=GenerationService(engine, limits, metrics),
        validator=Validator(limits, encoder),
        encoder=encoder,
        limits=limits,
        info=ModelInfo(
            model_id=values["model_id"],
            model_sha=getattr(model.config, "_commit_hash", None),
            compute_type="gpu" if model.moe_opt.device.type == "cuda" else model.moe_opt.device.type,
        ),
        metrics=metrics,
        control=control,
        tracer=Tracer(values["otlp_endpoint"], values["otlp_service_name"]),
        kv=_kv_transfer(values, port),
        role=values["kv_role"],
        max_batch_size=values["max_batch_size"],
        api_key=values["api_key"],
        cors_allow_origin=values["cors_allow_origin"],
    )


async def _serve(values: dict[str, Any], sockets: list[socket.socket]) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    started = time.monotonic()
    logger.info("loading %s", values["model_id"])
    model, tokenizer = await loop.run_in_executor(None, load_model, values)
    state = build_state(values, model, tokenizer, sockets[0].getsockname()[1])
    await state.engine.start()
    if state.kv is not None:
        await state.kv.start()
    # Only now: while the model loads, Ctrl-C and SIGTERM end the process at once.
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    runner = web.AppRunner(create_app(state), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    metrics_runner = web.AppRunner(_metrics_app(state), access_log=None)
    await runner.setup()
    await metrics_runner.setup()
    sites: list[web.BaseSite] = [web.SockSite(runner, sockets[0], backlog=1024)]
    if len(sockets) > 1:
        sites.append(web.SockSite(metrics_runner, sockets[1]))
    for site in sites:
        await site.start()
    port = sockets[0].getsockname()[1]
    logger.info(
        "serving on http://%s:%s after %.1f s", values["hostname"], port, time.monotonic() - started,
        extra={"fields": {**state.info_body(), **_fields(state)}},
    )  # fmt: skip
    control = asyncio.create_task(state.control.run())
    try:
        return await _until_stopped(state, stop)
    finally:
        await _shut_down(state, values["graceful_termination_timeout"], sites)
        control.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await control
        await runner.cleanup()
        await metrics_runner.cleanup()
        await state.engine.close()
        if state.kv is not None:
            await state.kv.close()
        state.encoder.close()
        state.tracer.close()


def _fields(state: ApiState) -> dict[str, Any]:
    status = state.control.status()
    return {"united_ways": status["united_experts"]["ways"], "strategy": status["decode"]["strategy"]}


async def _until_stopped(state: ApiState, stop: asyncio.Event) -> int:
    """0 on a signal or where another rank ends, 1 if the engine's thread died."""
    while not stop.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), timeout=1.0)
        if not state.engine.alive:
            logger.error("the engine stopped; ending")
            return 1
        if state.engine.group_leaves:
            logger.info("another rank of the group ends, and so does this one")
            break
    return 0 if state.engine.alive else 1  # a signal may come between the engine's end and the next look


async def _shut_down(state: ApiState, timeout: float, sites: list[web.BaseSite]) -> None:
    """Take no more connections and requests, and let those in flight finish."""
    state.service.draining = True
    state.engine.leave()
    logger.info("shutting down: %d requests in flight get up to %.0f s", state.open_requests, timeout)
    for site in sites:
        await site.stop()
    deadline = time.monotonic() + timeout
    while state.open_requests and time.monotonic() < deadline and state.engine.alive:
        await asyncio.sleep(0.05)
    if state.open_requests:
        logger.warning("%d requests did not finish in time and are cancelled", state.open_requests)
    await state.engine.drain(timeout=1.0)


def _metrics_app(state: ApiState) -> web.Application:
    async def metrics(request: web.Request) -> web.Response:
        state.metrics.engine_stats(state.engine.stats())
        state.control.status()
        return web.Response(text=state.metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    return app
