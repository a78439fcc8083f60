"""The workers as the router sees them: who is up, how full, and what runs where.

What runs where is the router's own record (`WorkerHandle.state`), exact at every decision. Health and KV use are looked
up at a fixed cadence; a look that fails counts as a full worker, never as the stale reading before it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal

import aiohttp

from moe_opt.cluster.state import RunningRequest, Worker
from moe_opt.errors import ConfigError
from moe_opt.serving.router.config import RouterSettings, WorkerSpec

logger = logging.getLogger("moe_opt.router")
Kind = Literal["moe_opt", "vllm"]
_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{([^}]*)\})? (\S+)", re.MULTILINE)
_FULL = 1.0


@dataclasses.dataclass(slots=True, eq=False)
class WorkerHandle:
    """One worker.

    Attributes:
        kind: whether it speaks our extensions. up: it answered the last look. utilisation: share of its KV in use.
        state: what policies see; `running` holds what this router sent and has not ended.
        prefills: prompts under way there. gauges: what its metrics said last. since: when it came up.
    """

    spec: WorkerSpec
    state: Worker
    kind: Kind = "moe_opt"
    up: bool = False
    utilisation: float = _FULL
    prefills: int = 0
    model: str = ""
    pid: int | None = None
    gauges: dict[str, float] = dataclasses.field(default_factory=dict)
    since: float = 0.0
    failures: int = 0
    timed: dict[Any, tuple[float, int]] = dataclasses.field(default_factory=dict)
    """Requests that are not streamed: when they began, and how many tokens they may produce."""
    told_at: float = -1.0

    @property
    def id(self) -> str:
        return self.spec.name

    @property
    def url(self) -> str:
        return self.spec.url

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.spec.rank is None else {"X-data-parallel-rank": str(self.spec.rank)}

    def does(self, role: str) -> bool:
        return self.spec.role in (role, "both")

    def progress(self, now: float) -> None:
        """Estimate how far requests are that do not stream: this worker's time per token says it."""
        tpot = self.gauges.get("tpot") or 0.0
        for key, (began, limit) in self.timed.items():
            running = self.state.running.get(key)
            if running is None or tpot <= 0:
                continue
            done = min(limit, int((now - began) / tpot))
            running.kv_tokens += done - running.generated
            running.generated = done

    def describe(self) -> dict[str, Any]:
        """Its part of `/router/state`."""
        return {
            "id": self.id,
            "role": self.spec.role,
            "url": self.url,
            "pid": self.pid,
            "kind": self.kind,
            "up": self.up,
            "draining": self.state.draining,
            "running": len(self.state.running),
            "prefills": self.prefills,
            "max_running": self.state.max_running,
            "kv_tokens": self.state.kv_tokens,
            "kv_capacity": self.state.kv_capacity,
            "kv_utilisation": round(self.utilisation, 4),
            "active_experts": self.gauges.get("active_experts"),
            "threshold_prefill": self.gauges.get("threshold_prefill"),
            "threshold_decode": self.gauges.get("threshold_decode"),
            "slo_prefill": self.gauges.get("slo_prefill"),
            "slo_decode": self.gauges.get("slo_decode"),
            "tpot": self.gauges.get("tpot"),
        }


class Fleet:
    """All workers, and the task per worker that keeps an eye on it.

    Args:
        changed: called when a worker came, went or got free: somebody may be waiting for it.
    """

    def __init__(self, session: aiohttp.ClientSession, settings: RouterSettings, changed: Callable[[], None]) -> None:
        self._session = session
        self._settings = settings
        self._changed = changed
        self._timeout = aiohttp.ClientTimeout(total=settings.poll_timeout)
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self.workers: dict[str, WorkerHandle] = {}
        self.brownout: dict[str, Any] = {}
        """What workers are told about brownout when they come up: the operator's switch and floor."""

    def add(self, spec: WorkerSpec) -> WorkerHandle:
        """Begin to watch a worker; it gets requests once it answers.

        Raises:
            ConfigError: a worker of that id, or at that address and rank, is here already.
        """
        for other in self.workers.values():
            if other.id == spec.name or (other.url, other.spec.rank) == (spec.url, spec.rank):
                raise ConfigError(f"worker {spec.name} at {spec.url} is here already, as {other.id}")
        handle = WorkerHandle(spec, Worker(spec.name, spec.max_running or self._settings.max_running))
        self.workers[handle.id] = handle
        self._watchers[handle.id] = asyncio.create_task(self._watch(handle))
        return handle

    def remove(self, worker_id: str) -> WorkerHandle:
        """Forget a worker. Its requests in flight run on until they end."""
        handle = self.get(worker_id)
        del self.workers[worker_id]
        self._watchers.pop(worker_id).cancel()
        handle.state.draining = True
        self._changed()
        return handle

    def drain(self, worker_id: str, draining: bool = True) -> WorkerHandle:
        """Send a worker nothing new, or send it requests again."""
        handle = self.get(worker_id)
        handle.state.draining = draining
        self._changed()
        return handle

    def get(self, worker_id: str) -> WorkerHandle:
        try:
            return self.workers[worker_id]
        except KeyError:
            raise ConfigError(f"no worker {worker_id!r}; there are: {', '.join(self.workers) or 'none'}") from None

    def ready(self, role: str) -> list[WorkerHandle]:
        """Workers of a role that are up and not draining."""
        return [h for h in self.workers.values() if h.up and h.does(role) and not h.state.draining]

    def lost(self, handle: WorkerHandle) -> None:
        """A request found the worker gone: nothing goes there until it answers again."""
        if handle.up:
            logger.warning("worker %s does not answer", handle.id)
        handle.up = False
        handle.utilisation = _FULL
        handle.failures += 1

    async def close(self) -> None:
        for task in self._watchers.values():
            task.cancel()
        await asyncio.gather(*self._watchers.values(), return_exceptions=True)

    # ------------------------------------------------------------- watching

    async def _watch(self, handle: WorkerHandle) -> None:
        while True:
            was_up = handle.up
            try:
                await self._look(handle)
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                if was_up:
                    logger.warning("worker %s: %s", handle.id, str(error) or type(error).__name__)
                handle.up, handle.utilisation = False, _FULL
            if handle.up and not was_up:
                handle.since = time.monotonic()
                logger.info("worker %s (%s, %s) is up at %s", handle.id, handle.spec.role, handle.kind, handle.url)
            if handle.up != was_up:
                self._changed()
            await asyncio.sleep(self._settings.poll)

    async def _look(self, handle: WorkerHandle) -> None:
        async with self._session.get(handle.url + "/health", timeout=self._timeout) as answer:
            if answer.status != 200:
                raise ValueError(f"/health says {answer.status}")
        if not handle.up:
            await self._introduce(handle)
        async with self._session.get(handle.url + "/metrics", timeout=self._timeout) as answer:
            if answer.status != 200:
                raise ValueError(f"/metrics says {answer.status}")
            read = read_metrics(await answer.text())
        handle.gauges = {**handle.gauges, **read}
        handle.utilisation = read["kv_usage"]
        handle.up = True

    async def _introduce(self, handle: WorkerHandle) -> None:
        """What a worker says about itself when it comes up."""
        async with self._session.get(handle.url + "/info", timeout=self._timeout) as answer:
            about = await answer.json() if answer.status == 200 else None
        if isinstance(about, dict) and "moe_opt" in about:
            own = about["moe_opt"]
            if own["role"] is None:
                raise ValueError("it was started without --kv-role and hands no KV on")
            handle.kind, handle.model, handle.pid = "moe_opt", about["model_id"], own["pid"]
            handle.state.kv_capacity = own["kv_capacity"]
            if handle.spec.max_running is None:
                handle.state.max_running = own["max_batch_size"]
        else:
            handle.kind = "vllm"
            async with self._session.get(handle.url + "/v1/models", timeout=self._timeout) as answer:
                about = (await answer.json())["data"][0]
            handle.model = about["id"]
            if about.get("max_model_len"):
                handle.gauges["max_model_len"] = float(about["max_model_len"])
        if self.brownout and handle.kind == "moe_opt":
            await self.tell_brownout(handle, self.brownout)

    async def tell_brownout(self, handle: WorkerHandle, body: dict[str, Any]) -> dict[str, Any]:
        """Pass an operator's wish on; returns the worker's answer.

        Raises:
            ValueError: the worker refused.
        """
        async with self._session.post(handle.url + "/brownout", json=body, timeout=self._timeout) as answer:
            said = await answer.json()
            if answer.status != 200:
                raise ValueError(f"worker {handle.id}: {said.get('error', answer.status)}")
            return dict(said)


def read_metrics(text: str) -> dict[str, float]:
    """What matters of a worker's Prometheus text, ours or vLLM's; `kv_usage` is 1 if it says nothing about KV."""
    values: dict[str, float] = {}
    for name, labels, number in _LINE.findall(text):
        if name.endswith("_bucket"):
            continue
        key = f"{name}{{{labels}}}" if labels and not name.startswith("vllm:") else name
        values[key] = values.get(key, 0.0) + float(number)
    found: dict[str, float] = {"kv_usage": _FULL}
    pages = {state: values.get(f'moe_opt_kv_pages{{state="{state}"}}') for state in ("free", "used", "cached")}
    if None not in pages.values():
        total = sum(count or 0.0 for count in pages.values())
        found["kv_usage"] = (pages["used"] or 0.0) / total if total else _FULL
    for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"):
        if name in values:
            found["kv_usage"] = values[name]
    for ours, key in (
        ("active_experts", 'moe_opt_active_experts{phase="decode"}'),
        ("active_sum", 'moe_opt_active_experts_read_total{phase="decode"}'),
        ("steps", 'tgi_batch_inference_success{method="decode"}'),
        ("threshold_prefill", 'moe_opt_brownout_threshold{phase="prefill"}'),
        ("threshold_decode", 'moe_opt_brownout_threshold{phase="decode"}'),
        ("slo_prefill", 'moe_opt_slo_seconds{phase="prefill"}'),
        ("slo_decode", 'moe_opt_slo_seconds{phase="decode"}'),
    ):
        if values.get(key) is not None and values[key] == values[key]:
            found[ours] = values[key]
    for name in (
        "moe_opt_time_per_output_token_seconds", "vllm:inter_token_latency_seconds",
        "vllm:time_per_output_token_seconds",
    ):  # fmt: skip
        if values.get(name + "_count"):
            found["tpot"] = values[name + "_sum"] / values[name + "_count"]
    return found


def begin(handle: WorkerHandle, key: Any, kv_tokens: int, *, streams: bool, limit: int, generated: int = 0) -> None:
    """A request starts on a worker."""
    handle.state.running[key] = RunningRequest(kv_tokens, generated=generated)
    if not streams:
        handle.timed[key] = (time.monotonic(), limit)


def end(handle: WorkerHandle, key: Any) -> RunningRequest | None:
    """A request has left a worker."""
    handle.timed.pop(key, None)
    return handle.state.running.pop(key, None)


def least_loaded(handles: Iterable[WorkerHandle]) -> WorkerHandle | None:
    """Of workers, the one with the fewest requests, for what no policy decides."""
    return min(handles, key=lambda h: (len(h.state.running) + h.prefills, h.id), default=None)
