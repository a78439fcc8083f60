"""A server in a process of its own, for demos, benchmarks and examples."""

from __future__ import annotations

import collections
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

from moe_opt.errors import MoEOptError

_PR_SET_PDEATHSIG = 1
_READY = re.compile(r"serving on (http://\S+)")


def _end_with_parent() -> None:
    """In the child: a parent that is killed takes its server along (Linux; elsewhere the server would live on)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class LocalServer:
    """`moe-opt serve` on a free port of this machine. Use it as a context manager; leaving ends the process.

    Args:
        flags: flags of `moe-opt serve` without hostname and port. port: 0 takes a free one. timeout: seconds to start.

    Raises:
        MoEOptError: on entering, with the server's last words, if it does not come up.
    """

    def __init__(self, *flags: str, port: int = 0, timeout: float = 180.0) -> None:
        self._flags: Sequence[str] = flags
        self._port = port
        self._timeout = timeout
        self.url = ""
        self.log: collections.deque[str] = collections.deque(maxlen=200)
        self.process: subprocess.Popen[str] | None = None

    def __enter__(self) -> LocalServer:
        command = [sys.executable, "-m", "moe_opt.serving.serve_command", *self._flags]
        command += ["--hostname", "127.0.0.1", "--port", str(self._port)]
        # A group of its own: Ctrl-C is for the caller, which then ends the server in order.
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=os.environ.copy(),
            start_new_session=True, preexec_fn=_end_with_parent,
        )  # fmt: skip
        ready = threading.Event()
        threading.Thread(target=self._read, args=(ready,), daemon=True).start()
        ready.wait(self._timeout)
        if not self.url:
            self._end()
            raise MoEOptError("the server did not start: " + " | ".join(list(self.log)[-3:] or ["no output"]))
        return self

    def __exit__(self, *exception: object) -> None:
        self._end()

    def _read(self, ready: threading.Event) -> None:
        assert self.process is not None
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.rstrip())
            match = _READY.search(line)
            if match:
                self.url = match[1]
                ready.set()
        ready.set()  # it ended

    def _end(self) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
