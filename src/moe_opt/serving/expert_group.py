"""`moe-opt serve --expert-parallel N`: N rank processes of one expert-parallel group on this machine.

Each is the same command with RANK, WORLD_SIZE and the address to meet at in its environment, as torchrun would set
them; under torchrun (several machines) this file starts nothing. Rank r serves on `--port` + r.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from moe_opt.errors import ConfigError

_GRACE = 15.0  # seconds for the other ranks to end by themselves when one has


def own_rank(values: dict[str, Any]) -> int | None:
    """This process's rank in the group that `--expert-parallel` asks for; None without one, or if none is started yet.

    Raises:
        ConfigError: fewer than two ranks, or other than the launcher started.
    """
    ranks = values["expert_parallel"]
    if ranks is None:
        return None
    if ranks < 2:
        raise ConfigError(f"--expert-parallel must be at least 2 ranks, got {ranks}")
    if "RANK" not in os.environ:
        return None
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != ranks:
        raise ConfigError(f"--expert-parallel says {ranks} ranks, the launcher started {started}")
    return int(os.environ["RANK"])


def for_rank(values: dict[str, Any], rank: int) -> dict[str, Any]:
    """The settings of one rank: its ports behind those of rank 0. A free port (0) stays one."""
    ports = {key: values[key] and values[key] + rank for key in ("port", "prometheus_port")}
    return {**values, **ports}


def run_group(command: list[str], values: dict[str, Any]) -> int:
    """Run the ranks of `values["expert_parallel"]` until they end; SIGTERM and SIGINT go to all of them.

    Returns: 0 if all ended in order, else the exit status of the rank that ended first, or of the first that failed.
    """
    ranks = values["expert_parallel"]
    with socket.socket() as probe:  # where rank 0 will wait for the others
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    cores = max(1, (os.cpu_count() or 1) // ranks)
    processes = []
    for rank in range(ranks):
        environment = {
            "OMP_NUM_THREADS": str(cores),
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        processes.append(subprocess.Popen(command, env=environment))

    def forward(number: int, _: Any) -> None:
        _signal_all(processes, number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)
    while all(process.poll() is None for process in processes):
        time.sleep(0.1)
    first = next(process for process in processes if process.poll() is not None)
    end = time.monotonic() + _GRACE + values["graceful_termination_timeout"]
    if any(process.returncode for process in processes):  # a group without one of its ranks cannot go on
        _signal_all(processes, signal.SIGTERM)
    for rank, process in enumerate(processes):
        try:
            process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            print(f"moe-opt serve: rank {rank} did not end and is killed", file=sys.stderr)
            process.kill()
            process.wait()
    # a signal's number is negative here
    return next((abs(process.returncode) for process in (first, *processes) if process.returncode), 0)


def _signal_all(processes: list[subprocess.Popen[bytes]], number: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            if process.poll() is None:
                process.send_signal(number)
