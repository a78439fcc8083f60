"""A prefilled request's KV, from worker to worker.

The worker that computed a prompt writes its KV to one safetensors file in shared memory and answers with a ticket,
`kv_transfer_params` as in vLLM's protocol (DESIGN.md, decision 4). The worker that decodes opens that file where both
run on one machine (two copies in all, none of them through Python), and fetches it over HTTP from the first one
elsewhere. Whoever has taken it removes it; what nobody takes expires. A ticket that has gone is no error: the prompt
is computed again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import re
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import safetensors
import safetensors.torch
import torch

from moe_opt.errors import ConfigError, MoEOptError
from moe_opt.serving.engine.kv_state import KVState

logger = logging.getLogger("moe_opt.serving.kv_transfer")
ROUTE = "/kv_transfer"
_FORMAT = 1
_NAME = re.compile(r"moe-opt-kv-(\d+)-[0-9a-f]{32}")
_ID = re.compile(r"[0-9a-f]{32}")


@dataclasses.dataclass(frozen=True, slots=True)
class TransferSettings:
    """Bounds of the hand-off.

    Attributes:
        folder: where files are written; None takes /dev/shm, else the system's folder for temporary files.
        capacity: bytes that may wait to be fetched; above it a prompt is answered without a ticket.
        expiry: seconds after which a file that nobody fetched is removed. fetch_timeout: seconds to fetch one.
        shared_memory: False always fetches over HTTP.
    """

    folder: str | None = None
    capacity: int = 1 << 30
    expiry: float = 120.0
    fetch_timeout: float = 30.0
    shared_memory: bool = True

    def __post_init__(self) -> None:
        if self.capacity < 1 or not self.expiry > 0 or not self.fetch_timeout > 0:
            raise ConfigError("kv transfer: capacity, expiry and timeout must be above 0")

    @property
    def path(self) -> Path:
        if self.folder is not None:
            return Path(self.folder)
        shared = Path("/dev/shm")
        return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


class KVTransfer:
    """What one worker has handed over and what it fetches.

    Args:
        address: (host, port) under which other workers reach this one's API. api_key: sent along when fetching.
    """

    def __init__(self, settings: TransferSettings, address: tuple[str, int], api_key: str | None = None) -> None:
        self.settings = settings
        self.address = address
        self.engine_id = uuid.uuid4().hex
        self.waiting_bytes = 0
        self.stored = self.refused = self.expired = self.fetched = self.missed = 0
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._files: dict[str, tuple[Path, int, float]] = {}  # id -> (file, bytes, time.monotonic() of its end)
        self._session: aiohttp.ClientSession | None = None
        self._reaper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Remove what dead workers left here, and begin to expire."""
        await asyncio.to_thread(remove_orphans, self.settings.path, self.settings.expiry)
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self.settings.fetch_timeout))
        self._reaper = asyncio.create_task(self._expire_forever())

    async def close(self) -> None:
        if self._reaper is not None:
            self._reaper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reaper
        if self._session is not None:
            await self._session.close()
        for name in list(self._files):
            self.remove(name)

    def outcomes(self) -> dict[str, int]:
        """How many prompts' KV went which way, for the metrics."""
        self._look()
        return {
            "stored": self.stored,
            "refused": self.refused,
            "expired": self.expired,
            "fetched": self.fetched,
            "missed": self.missed,
        }

    # ------------------------------------------------------------- the worker that computed the prompt

    async def store(self, kv: KVState) -> dict[str, Any] | None:
        """Keep KV for another worker. Returns the ticket, None if there is no room: the other computes it then."""
        size = kv.nbytes
        self._look()
        if self.waiting_bytes + size > self.settings.capacity:
            self.refused += 1
            return None
        name = uuid.uuid4().hex
        path = self.settings.path / f"moe-opt-kv-{os.getpid()}-{name}"
        self.waiting_bytes += size
        try:
            await asyncio.to_thread(_write, kv, path)
        except OSError as error:
            logger.warning("KV cannot be kept for another worker: %s", error)
            self.waiting_bytes -= size
            self.refused += 1
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            return None
        self._files[name] = (path, size, time.monotonic() + self.settings.expiry)
        self.stored += 1
        host, port = self.address
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine_id,
            "remote_request_id": name,
            "remote_block_ids": list(range(-(-len(kv.tokens) // kv.page_size))),
            "remote_host": host,
            "remote_port": port,
            "tp_size": 1,
            "moe_opt": {"format": _FORMAT, "file": path.name, "bytes": size, "tokens": len(kv.tokens)},
        }

    def path_of(self, name: str) -> Path | None:
        """The file of a ticket that still waits."""
        found = self._files.get(name)
        return found[0] if found is not None and found[0].exists() else None

    def remove(self, name: str) -> bool:
        """Free what a ticket stands for; False if it is gone already."""
        found = self._files.pop(name, None)
        if found is None:
            return False
        self.waiting_bytes -= found[1]
        there = found[0].exists()
        found[0].unlink(missing_ok=True)
        return there

    def _look(self, now: float | None = None) -> None:
        """Forget files that were taken, and remove those that are too old."""
        now = time.monotonic() if now is None else now
        for name, (path, _, end) in list(self._files.items()):
            if not path.exists():
                self.remove(name)
            elif end < now:
                self.expired += self.remove(name)

    async def _expire_forever(self) -> None:
        looked_for_orphans = time.monotonic()
        while True:
            await asyncio.sleep(min(1.0, self.settings.expiry / 4))
            self._look()
            if time.monotonic() - looked_for_orphans > self.settings.expiry:
                looked_for_orphans = time.monotonic()
                await asyncio.to_thread(remove_orphans, self.settings.path, self.settings.expiry)

    # ------------------------------------------------------------- the worker that decodes

    async def fetch(self, params: Mapping[str, Any]) -> KVState | None:
        """The KV of a ticket, which is used up by it; None if it is gone or cannot be read."""
        ours = params.get("moe_opt")
        name = str(params.get("remote_request_id"))
        if not isinstance(ours, Mapping) or ours.get("format") != _FORMAT or not _ID.fullmatch(name):
            return None
        try:
            kv = await self._from_shared_memory(str(ours.get("file"))) if self.settings.shared_memory else None
            if kv is None:
                kv = await self._over_http(params, name)
        except (OSError, aiohttp.ClientError, TimeoutError, safetensors.SafetensorError, MoEOptError) as error:
            reason = str(error) or type(error).__name__
            logger.warning("KV %s cannot be fetched: %s; the prompt is computed here", name, reason)
            kv = None
        if kv is None:
            self.missed += 1
        else:
            self.fetched += 1
        return kv

    async def _from_shared_memory(self, file_name: str) -> KVState | None:
        # A ticket comes from outside: it may name a file of ours in our folder and nothing else.
        path = self.settings.path / file_name
        if not _NAME.fullmatch(file_name) or not path.is_file():
            return None

        def take() -> KVState | None:
            try:
                return _read_file(path)
            except FileNotFoundError:
                return None
            finally:
                path.unlink(missing_ok=True)  # the mapping keeps what is in it

        return await asyncio.to_thread(take)

    async def _over_http(self, params: Mapping[str, Any], name: str) -> KVState | None:
        host, port = str(params.get("remote_host")), int(params.get("remote_port") or 0)
        if self._session is None or not re.fullmatch(r"[\w.:-]+", host) or not 0 < port < 65536:
            return None
        at = f"[{host}]" if ":" in host else host
        url = f"http://{at}:{port}{ROUTE}/{name}"
        async with self._session.get(url, headers=self._headers) as answer:
            if answer.status == 404:
                return None
            answer.raise_for_status()
            size = answer.content_length
            if size is None or size > self.settings.capacity:  # an answer without a length could go on for ever
                raise MoEOptError(f"it has {size or 'any number of'} bytes, allowed are {self.settings.capacity}")
            raw = await answer.read()
        async with self._session.delete(url, headers=self._headers):
            pass
        return await asyncio.to_thread(_read_bytes, raw)


def _write(kv: KVState, path: Path) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for index, (keys, values) in enumerate(zip(kv.keys, kv.values, strict=True)):
        tensors[f"keys.{index}"] = keys
        tensors[f"values.{index}"] = values
    tensors["tokens"] = torch.tensor(kv.tokens, dtype=torch.int64)
    if kv.counts is not None:
        tensors["counts"] = kv.counts
    about = {
        "page_size": kv.page_size,
        "browned_from": kv.browned_from,
        "lowest_threshold": kv.lowest_threshold,
        "fingerprint": kv.fingerprint,
    }
    safetensors.torch.save_file(tensors, path, metadata={"moe_opt": json.dumps(about)})


def _read_file(path: Path) -> KVState:
    with safetensors.safe_open(path, framework="pt") as opened:
        metadata = opened.metadata() or {}
        return _state({key: opened.get_tensor(key) for key in opened.keys()}, metadata)  # noqa: SIM118 - no mapping


def _read_bytes(raw: bytes) -> KVState:
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    return _state(safetensors.torch.load(raw), header.get("__metadata__", {}))


def _state(tensors: dict[str, torch.Tensor], metadata: Mapping[str, str]) -> KVState:
    try:
        about = json.loads(metadata["moe_opt"])
        layers = sum(name.startswith("keys.") for name in tensors)
        return KVState(
            tokens=tuple(tensors["tokens"].tolist()),
            keys=[tensors[f"keys.{index}"] for index in range(layers)],
            values=[tensors[f"values.{index}"] for index in range(layers)],
            counts=tensors.get("counts"),
            page_size=int(about["page_size"]),
            browned_from=about["browned_from"],
            lowest_threshold=float(about["lowest_threshold"]),
            fingerprint=str(about["fingerprint"]),
        )
    except (KeyError, ValueError, TypeError) as error:
        raise MoEOptError(f"not a KV file of moe_opt: {error!r}") from error


def remove_orphans(folder: Path, age: float) -> int:
    """Remove the files of workers that no longer live (killed ones cannot). Returns how many.

    Args:
        age: seconds; younger files stay, as their worker may live in another container that shares the folder.
    """
    removed = 0
    for path in folder.glob("moe-opt-kv-*"):
        match = _NAME.fullmatch(path.name)
        if match is None or Path(f"/proc/{match[1]}").exists() or not Path("/proc/self").exists():
            continue
        with contextlib.suppress(OSError):  # another worker was faster
            if time.time() - path.stat().st_mtime >= age:
                path.unlink()
                removed += 1
    return removed
