"""The router's state and its parts, wired together. One event loop, no threads, nothing that blocks."""

from __future__ import annotations

import asyncio
import collections
import json
import logging
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TextIO

import aiohttp
import numpy as np

from moe_opt import __version__
from moe_opt.cluster.policies import make_policy
from moe_opt.cluster.policies.locality import EldrPolicy
from moe_opt.cluster.signature import SignatureModel
from moe_opt.cluster.state import Request
from moe_opt.errors import ConfigError
from moe_opt.serving.router.config import RouterSettings, WorkerSpec
from moe_opt.serving.router.dispatch import DecodePool, PrefillDispatcher
from moe_opt.serving.router.fleet import Fleet, WorkerHandle
from moe_opt.serving.router.metrics import RouterMetrics
from moe_opt.serving.router.signatures import SignatureSource

logger = logging.getLogger("moe_opt.router")
_MAP_DECISIONS = 512
_NEEDS_MODEL = ("eldr", "eldr+br-0", "eldr+br-h")


class Router:
    """Between clients and workers.

    Args:
        settings: bounds and policy. specs: workers to begin with. api_key: clients and workers share it.
        trace: where every decision is written as a JSON line (BalanceRoute D.5), None for nowhere.

    Raises:
        ConfigError: a policy, option or signature model that is not usable.
    """

    def __init__(
        self,
        settings: RouterSettings,
        specs: Sequence[WorkerSpec] = (),
        *,
        api_key: str | None = None,
        trace: str | None = None,
    ) -> None:
        self.settings = settings
        self.api_key = api_key
        self.metrics = RouterMetrics()
        self.signatures = SignatureSource()
        self.draining = False
        self.in_flight = 0
        self.started = time.time()
        self.policy_name = settings.policy
        model = SignatureModel.load(settings.signature_model) if settings.signature_model else None
        self.signatures.model = model
        self.policy = self._make_policy(settings.policy, model)
        self._specs = specs
        self._trace_path = trace
        self._trace: TextIO | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._decisions: collections.deque[tuple[int, str]] = collections.deque(maxlen=_MAP_DECISIONS)
        self._counted: dict[str, int] = {}
        self.brownout: dict[str, Any] = {"enabled": True, "floor": 0.0}
        self.session: aiohttp.ClientSession
        self.fleet: Fleet
        self.prefill: PrefillDispatcher
        self.pool: DecodePool

    def _make_policy(self, name: str, model: SignatureModel | None) -> Any:
        options = dict(self.settings.options)
        if name in _NEEDS_MODEL:
            if model is None:
                raise ConfigError(f"policy {name} needs --signature-model FILE; fit one with `moe-opt fit-signatures`")
            options["signature_model"] = model
        if self.settings.pool_bypass:
            options.update(pool_bypass=True, bypass_margin=self.settings.bypass_margin)
        return make_policy(name, **options)

    async def start(self) -> None:
        """Open connections and begin to watch the workers."""
        headers = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), headers=headers, auto_decompress=True
        )
        self.fleet = Fleet(self.session, self.settings, self._fleet_changed)
        self.prefill = PrefillDispatcher(self.fleet, self.settings)
        self.pool = DecodePool(self.fleet, self.policy, self.settings, self._decided)
        if self._trace_path is not None:
            self._trace = Path(self._trace_path).open("a", encoding="utf-8")  # noqa: SIM115 - open as long as we run
        for spec in self._specs:
            self.fleet.add(spec)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.fleet.close()
        await self.session.close()
        if self._trace is not None:
            self._trace.close()

    @property
    def ready(self) -> bool:
        """One worker for each stage answers."""
        return not self.draining and bool(self.fleet.ready("prefill")) and bool(self.fleet.ready("decode"))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something that nobody waits for."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ------------------------------------------------------------- what happened

    def _fleet_changed(self) -> None:
        self.prefill.wake()
        self.pool.wake()

    def _decided(self, seconds: float, waiting: int, admitted: Sequence[tuple[Request, WorkerHandle]]) -> None:
        self.metrics.decision_seconds.observe(seconds)
        self.metrics.decision_waiting.observe(waiting)
        centroids = self._similarities([request for request, _ in admitted])
        for index, (request, handle) in enumerate(admitted):
            self.metrics.decisions.labels(handle.id).inc()
            if centroids is not None and request.signature is not None:
                self._decisions.append((int(np.argmax(centroids[index])), handle.id))
        if self._trace is not None:
            self._write_trace(seconds, waiting, admitted)

    def _similarities(self, requests: list[Request]) -> np.ndarray | None:
        """[requests, centroids]; also counts the bands."""
        model = self.signatures.model
        vectors = [request.signature for request in requests]
        if model is None or not vectors:
            return None
        width = model.centroids.shape[1]
        stacked = np.stack([np.zeros(width) if vector is None else vector for vector in vectors])
        found = stacked @ model.centroids.T
        locality = self.policy if isinstance(self.policy, EldrPolicy) else getattr(self.policy, "eldr", None)
        if locality is not None:
            for row, vector in zip(found, vectors, strict=True):
                if vector is not None:
                    self.metrics.band.observe(int((row >= row.max() - locality.tau).sum()))
        return np.asarray(found)

    def _write_trace(self, seconds: float, waiting: int, admitted: Sequence[tuple[Request, WorkerHandle]]) -> None:
        assert self._trace is not None
        line = {
            "time": round(time.time(), 6),
            "decision_us": round(seconds * 1e6, 1),
            "waiting": waiting,
            "admitted": [{"tokens": request.prompt_tokens, "worker": handle.id} for request, handle in admitted],
            "workers": {
                handle.id: {"running": len(handle.state.running), "kv_tokens": handle.state.kv_tokens}
                for handle in self.fleet.workers.values()
            },
        }
        self._trace.write(json.dumps(line) + "\n")

    def note_ttft(self, seconds: float) -> None:
        self.metrics.note("ttft", seconds)

    def note_tpot(self, seconds: float) -> None:
        self.metrics.note("tpot", seconds)
        self.metrics.tpot.observe(seconds)

    # ------------------------------------------------------------- operators

    def use_signatures(self, path: str) -> SignatureModel:
        """Switch to a refitted signature model while requests run.

        Raises:
            ConfigError: it cannot be read, or the policy has no use for one.
        """
        model = SignatureModel.load(path)
        locality = self.policy if isinstance(self.policy, EldrPolicy) else getattr(self.policy, "eldr", None)
        if locality is not None:
            decoders = [handle.id for handle in self.fleet.workers.values() if handle.does("decode")]
            locality.use(model, decoders)
        self.signatures.model = model
        self._decisions.clear()
        logger.info("signature model %s: rho %.3f, %d centroids", path, model.rho, len(model.centroids))
        return model

    async def set_brownout(self, *, enabled: bool | None, floor: float | None) -> dict[str, Any]:
        """The kill switch and the floor, for all workers of ours, those that come later included.

        Raises:
            ConfigError: some worker refused; the others have it.
        """
        if floor is not None and not 0 <= floor <= 1:
            raise ConfigError(f"floor must be in [0, 1], got {floor}")
        if enabled is not None:
            self.brownout["enabled"] = enabled
        if floor is not None:
            self.brownout["floor"] = floor
        body = {"floor": self.brownout["floor"] if self.brownout["enabled"] else 1.0}
        self.fleet.brownout = body
        ours = [handle for handle in self.fleet.workers.values() if handle.kind == "moe_opt" and handle.up]
        said = await asyncio.gather(
            *(self.fleet.tell_brownout(handle, body) for handle in ours), return_exceptions=True
        )
        failed = [
            f"{handle.id}: {error}" for handle, error in zip(ours, said, strict=True) if isinstance(error, Exception)
        ]
        if failed:
            raise ConfigError("not every worker could be told: " + "; ".join(failed))
        return dict(self.brownout)

    def state(self) -> dict[str, Any]:
        """What `/router/state` answers."""
        model = self.signatures.model
        now = time.monotonic()
        for handle in self.fleet.workers.values():
            if handle.timed:
                handle.progress(now)
        found: dict[str, Any] = {
            "version": __version__,
            "policy": self.policy_name,
            "ready": self.ready,
            "draining": self.draining,
            "uptime": round(time.time() - self.started, 1),
            "in_flight": self.in_flight,
            "waiting": {"prefill": self.prefill.waiting, "decode": self.pool.waiting},
            "brownout": dict(self.brownout),
            "latency": {"ttft": self.metrics.recent("ttft"), "tpot": self.metrics.recent("tpot")},
            "signatures": {
                "sources": dict(self.signatures.used),
                "rho": None if model is None else round(float(model.rho), 4),
                "layers": None if model is None else list(model.layers),
                "centroids": 0 if model is None else len(model.centroids),
                "map": self._map(),
            },
            "workers": [handle.describe() for handle in self.fleet.workers.values()],
        }
        return found

    def _map(self) -> dict[str, dict[str, int]]:
        """Of the newest requests: nearest centroid -> worker -> how many went there."""
        found: dict[str, dict[str, int]] = {}
        for centroid, worker in self._decisions:
            row = found.setdefault(str(centroid), {})
            row[worker] = row.get(worker, 0) + 1
        return dict(sorted(found.items()))

    def render_metrics(self) -> bytes:
        """Prometheus text, gauges brought up to date."""
        m = self.metrics
        m.waiting.labels("prefill").set(self.prefill.waiting)
        m.waiting.labels("decode").set(self.pool.waiting)
        for source, count in self.signatures.used.items():
            m.signatures.labels(source).inc(count - self._counted.get(source, 0))
            self._counted[source] = count
        for gauge in (m.up, m.running, m.kv_tokens, m.utilisation, m.active_experts):
            gauge.clear()
        for handle in self.fleet.workers.values():
            m.up.labels(handle.id, handle.spec.role).set(handle.up)
            m.running.labels(handle.id).set(len(handle.state.running))
            m.kv_tokens.labels(handle.id).set(handle.state.kv_tokens)
            m.utilisation.labels(handle.id).set(handle.utilisation)
            if "active_experts" in handle.gauges:
                m.active_experts.labels(handle.id).set(handle.gauges["active_experts"])
        return m.render()
