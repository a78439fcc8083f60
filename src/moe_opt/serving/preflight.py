"""What can be said about a start before torch is imported and a model is read: ports, paths, objectives."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from moe_opt.config import ExpertParallelConfig
from moe_opt.errors import ConfigError
from moe_opt.serving.brownout_control import Objectives
from moe_opt.serving.observability import setup_logging


def preflight(values: dict[str, Any]) -> list[socket.socket]:
    """Check the settings and take the ports; the sockets are the caller's to close.

    Raises:
        ConfigError: a setting out of range, a folder that is not there, a port in use.
    """
    setup_logging(values["log_level"], values["json_output"])
    objectives(values)
    expert_parallel(values)
    _check_folder("--model-id", values["model_id"])
    if values["united_experts"] not in (None, "."):
        _check_folder("--united-experts", values["united_experts"])
    return _bind(values)


def expert_parallel(values: dict[str, Any]) -> ExpertParallelConfig | None:
    """Settings of the expert-parallel group that the flags name.

    Raises:
        ConfigError: a value out of range.
    """
    if values["expert_parallel"] is None:
        return None
    if not values["group_timeout"] > 0:
        raise ConfigError(f"--group-timeout must be above 0 seconds, got {values['group_timeout']}")
    return ExpertParallelConfig(
        method=values["replica_choice"],
        replication=values["expert_replication"],
        placement=values["expert_placement"],
        prefill_dispatch=values["prefill_dispatch"],
    )


def objectives(values: dict[str, Any]) -> Objectives:
    """The latency objectives that the flags name."""
    if not 0 < values["slo_period"] <= 1:
        raise ConfigError(f"--slo-period must be above 0 and at most 1 second, got {values['slo_period']}")
    if not 0 < values["slo_headroom"] <= 1:
        raise ConfigError(f"--slo-headroom must be above 0 and at most 1, got {values['slo_headroom']}")
    wanted = Objectives(
        ttft=values["slo_ttft"],
        tpot=values["slo_tpot"],
        window=values["slo_window"],
        period=values["slo_period"],
        headroom=values["slo_headroom"],
    )
    wanted.controllers()  # checks the objectives themselves
    return wanted


def _check_folder(flag: str, source: str) -> None:
    """A path that cannot be a Hub id must exist; the Hub would only be asked in vain."""
    looks_local = os.path.isabs(source) or source.startswith((".", "~")) or source.count("/") > 1
    if looks_local and not Path(source).is_dir():
        raise ConfigError(f"{flag} {source}: no such folder")


def _bind(values: dict[str, Any]) -> list[socket.socket]:
    """A port in use must not cost the minutes that a model loads."""
    bound: list[socket.socket] = []
    for name in ("port", "prometheus_port"):
        if values[name] is None:
            continue
        family = socket.AF_INET6 if ":" in values["hostname"] else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((values["hostname"], values[name]))
        except (OSError, OverflowError) as error:
            for other in (*bound, sock):
                other.close()
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"cannot listen on {values['hostname']}:{values[name]} ({error}): choose another {flag}"
            ) from error
        bound.append(sock)
    return bound
