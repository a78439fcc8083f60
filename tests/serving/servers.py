"""A real server in a process of its own."""

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import threading
import time

import requests


@dataclasses.dataclass
class Server:
    """A running server. `log` grows while it runs."""

    process: subprocess.Popen
    url: str
    log: list[str]

    def post(self, path, json, **kwargs):
        return requests.post(self.url + path, json=json, timeout=60, **kwargs)

    def get(self, path, **kwargs):
        return requests.get(self.url + path, timeout=60, **kwargs)

    def metric(self, name: str) -> float:
        """Value of an unlabelled metric, or of one given with its labels."""
        for line in self.get("/metrics").text.splitlines():
            if line.startswith(name + " "):
                return float(line.rsplit(" ", 1)[1])
        raise KeyError(name)

    def wait_until_idle(self, seconds: float = 20.0) -> None:
        """No sequence runs or waits any more, and no page is held."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            busy = sum(
                self.metric(name)
                for name in ("tgi_batch_current_size", "tgi_queue_size", 'moe_opt_kv_pages{state="used"}')
            )
            if busy == 0:
                return
            time.sleep(0.1)
        raise AssertionError(f"the engine still holds something after {seconds} s:\n{self.get('/metrics').text}")


@contextlib.contextmanager
def running_process(command: list[str], announced: str, environment: dict[str, str], start: float, stop: float):
    """(process, url, log lines) of a command that announces `announced` and its url on standard error. It ends with
    SIGTERM. start, stop: seconds that it may take to each; it fails with its log where it does not come up."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment)
    log: list[str] = []
    ready = threading.Event()
    url: list[str] = []

    def read() -> None:
        for line in process.stderr:
            log.append(line.rstrip())
            match = re.search(announced + r" (http://[\d.]+:\d+)", line)
            if match:
                url.append(match[1])
                ready.set()
        ready.set()  # the process ended

    threading.Thread(target=read, daemon=True).start()
    try:
        ready.wait(start)
        if not url:
            process.kill()
            raise AssertionError("it did not start:\n" + "\n".join(log))
        yield process, url[0], log
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(stop)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


@contextlib.contextmanager
def running_server(*flags: str, env: dict[str, str] | None = None, program=("-m", "moe_opt.serving.serve_command")):
    """A server on a free port."""
    command = [sys.executable, *program, *flags, "--hostname", "127.0.0.1", "--port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    with running_process(command, "serving on", environment, start=120, stop=30) as found:
        yield Server(*found)
