"""A fleet on one machine: worker processes of ours, and a router in this process that takes care of them."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence

from moe_opt.errors import ConfigError, MoEOptError
from moe_opt.serving.router.config import Role, WorkerSpec
from moe_opt.serving.router.router import Router

logger = logging.getLogger("moe_opt.launch")
_PERIOD = 300.0  # seconds in which a worker may be started again `restarts` times
_LONGEST_BACKOFF = 10.0
_LOG_LINES = 60


@dataclasses.dataclass(frozen=True, slots=True)
class FleetPlan:
    """What to launch.

    Attributes:
        model_id: folder or Hub id. prefill, decode: workers of each kind. flags: of `moe-opt serve`, for all.
        threads: of each worker on a CPU; None shares the machine's cores among them.
        start_timeout: seconds for a worker to load the model. end_timeout: seconds to finish after SIGTERM.
        restarts: how often a worker that died is started again within five minutes; then it stays down.
        restart_backoff: seconds before the first of them, doubled for each, ten at most.
    """

    model_id: str
    prefill: int
    decode: int
    flags: tuple[str, ...] = ()
    threads: int | None = None
    start_timeout: float = 600.0
    end_timeout: float = 30.0
    restarts: int = 5
    restart_backoff: float = 1.0

    def __post_init__(self) -> None:
        if self.prefill < 1 or self.decode < 1:
            raise ConfigError("a fleet needs at least one prefill and one decode worker")
        if self.restarts < 0 or self.restart_backoff < 0:
            raise ConfigError("restarts and restart_backoff must be 0 or more")

    @property
    def cores_each(self) -> int:
        if self.threads is not None:
            return self.threads
        return max(1, (os.cpu_count() or 1) // (self.prefill + self.decode))


class LocalWorker:
    """One worker process; its address stays the same when it is started again."""

    def __init__(self, plan: FleetPlan, worker_id: str, role: Role) -> None:
        self.plan = plan
        self.id = worker_id
        self.role = role
        self.port = free_port()
        self.process: asyncio.subprocess.Process | None = None
        self.log: collections.deque[str] = collections.deque(maxlen=_LOG_LINES)
        self._reader: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()

    @property
    def spec(self) -> WorkerSpec:
        return WorkerSpec(f"http://127.0.0.1:{self.port}", self.role, self.id)

    @property
    def pid(self) -> int | None:
        return None if self.process is None else self.process.pid

    async def start(self) -> None:
        """Start the process and wait until it serves.

        Raises:
            MoEOptError: it ended, or did not come up in time.
        """
        self._ready.clear()
        command = [
            sys.executable, "-m", "moe_opt.serving.serve_command", "--model-id", self.plan.model_id,
            "--hostname", "127.0.0.1", "--port", str(self.port), "--kv-role", self.role, *self.plan.flags,
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": str(self.plan.cores_each), "PYTHONUNBUFFERED": "1"}
        # A group of its own: Ctrl-C is for the launcher, which ends its workers in order.
        self.process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
            env=environment, start_new_session=True, preexec_fn=_end_with_parent,
        )  # fmt: skip
        self._reader = asyncio.create_task(self._read(self.process))
        ended = asyncio.create_task(self.process.wait())
        ready = asyncio.create_task(self._ready.wait())
        try:
            done, _ = await asyncio.wait(
                {ended, ready}, timeout=self.plan.start_timeout, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            ready.cancel()
            ended.cancel()
        if ready not in done:
            await self.end()
            last = " | ".join(list(self.log)[-3:]) or "no output"
            raise MoEOptError(f"worker {self.id} did not start: {last}")

    async def end(self) -> None:
        """SIGTERM, and SIGKILL for one that does not end."""
        process = self.process
        if process is None:
            return
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), self.plan.end_timeout)
            except TimeoutError:
                logger.warning("worker %s does not end and is killed", self.id)
                process.kill()
                await process.wait()
        if self._reader is not None:
            await self._reader

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while True:
            try:
                line = await process.stderr.readline()
            except ValueError:  # a line beyond asyncio's limit; the rest of it follows
                continue
            if not line:
                return
            text = line.decode("utf-8", "replace").rstrip()
            self.log.append(text)
            if "serving on http" in text:
                self._ready.set()
            if " ERROR " in text or " WARNING " in text or '"level": "ERROR"' in text:
                logger.warning("worker %s: %s", self.id, text)


class LocalFleet:
    """Workers of one machine: started together, started again when they die, restarted one by one on SIGHUP."""

    def __init__(self, plan: FleetPlan) -> None:
        self.plan = plan
        roles: list[tuple[str, Role]] = [(f"prefill-{i}", "prefill") for i in range(plan.prefill)]
        roles += [(f"decode-{i}", "decode") for i in range(plan.decode)]
        self.workers = [LocalWorker(plan, name, role) for name, role in roles]
        self._starts: dict[str, collections.deque[float]] = {}
        self._restarting = False

    @property
    def specs(self) -> list[WorkerSpec]:
        return [worker.spec for worker in self.workers]

    async def start(self) -> None:
        """All workers at once. Raises MoEOptError if one does not come up; the others are ended then."""
        try:
            await asyncio.gather(*(worker.start() for worker in self.workers))
        except BaseException:
            await self.end()
            raise

    async def end(self) -> None:
        await asyncio.gather(*(worker.end() for worker in self.workers))

    async def care(self, router: Router, stop: asyncio.Event) -> None:
        """Beside the router until it stops: bring dead workers back; then end them all."""
        loop = asyncio.get_running_loop()
        rolling: set[asyncio.Task[None]] = set()

        def roll() -> None:
            task = loop.create_task(self.restart_one_by_one(router))
            rolling.add(task)
            task.add_done_callback(rolling.discard)

        loop.add_signal_handler(signal.SIGHUP, roll)
        minders = [asyncio.create_task(self._mind(worker)) for worker in self.workers]
        try:
            await stop.wait()
            while router.in_flight:  # what still runs is drained by the router, and needs its workers
                await asyncio.sleep(0.05)
        finally:
            for task in (*minders, *rolling):
                task.cancel()
            await asyncio.gather(*minders, *rolling, return_exceptions=True)
            await self.end()

    async def _mind(self, worker: LocalWorker) -> None:
        while True:
            process = worker.process
            assert process is not None
            await process.wait()
            if self._restarting or worker.process is not process:
                await asyncio.sleep(0.2)
                continue
            logger.error(
                "worker %s ended with %s: %s", worker.id, process.returncode, " | ".join(list(worker.log)[-2:])
            )
            now = time.monotonic()
            starts = self._starts.setdefault(worker.id, collections.deque())
            while starts and now - starts[0] > _PERIOD:
                starts.popleft()
            if len(starts) >= self.plan.restarts:
                logger.error("worker %s died %d times in %.0f s and stays down", worker.id, len(starts) + 1, _PERIOD)
                return
            starts.append(now)
            await asyncio.sleep(min(_LONGEST_BACKOFF, self.plan.restart_backoff * 2 ** min(10, len(starts) - 1)))
            try:
                await worker.start()
                logger.info("worker %s is back as process %s", worker.id, worker.pid)
            except MoEOptError as error:
                logger.error("%s", error)

    async def restart_one_by_one(self, router: Router) -> None:
        """Drain, end and start each worker in turn; requests go on elsewhere meanwhile. With a single worker of a
        kind, new requests wait for it."""
        if self._restarting:
            return
        self._restarting = True
        try:
            for worker in self.workers:
                handle = router.fleet.drain(worker.id)
                while handle.state.running or handle.prefills:
                    await asyncio.sleep(0.1)
                await worker.end()
                router.fleet.lost(handle)
                await worker.start()
                router.fleet.drain(worker.id, False)
                logger.info("worker %s restarted as process %s", worker.id, worker.pid)
                while not handle.up:
                    await asyncio.sleep(0.1)
        finally:
            self._restarting = False


def free_port() -> int:
    """A port of this machine that nobody uses right now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _end_with_parent() -> None:
    """In the child: a launcher that is killed takes its workers along (Linux; elsewhere they would live on)."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def vllm_commands(model_id: str, prefill: int, decode: int, policy: str) -> Sequence[str]:
    """The same fleet with vLLM workers: what to type on machines that have GPUs."""
    transfer = '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'
    lines = []
    router = ["moe-opt router"]
    for role, count, base in (("prefill", prefill, 8100), ("decode", decode, 8200)):
        for index in range(count):
            port, side = base + index, 5600 + (0 if role == "prefill" else 100) + index
            lines.append(
                f"VLLM_NIXL_SIDE_CHANNEL_PORT={side} vllm serve {model_id} --port {port} "
                f"--kv-transfer-config '{transfer}'"
            )
            router.append(f"--{role} http://HOST:{port}")
    router.append(f"--policy {policy}")
    return [*lines, " ".join(router)]
