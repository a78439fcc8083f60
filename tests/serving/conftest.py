"""A real server in a process of its own, on the demo model, and what the same model says without it."""

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
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
def running_server(*flags: str, env: dict[str, str] | None = None, program=("-m", "moe_opt.serving.serve_command")):
    """Start a server on a free port and stop it with SIGTERM. Fails with its log if it does not come up."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    process = subprocess.Popen(
        [sys.executable, *program, *flags, "--hostname", "127.0.0.1", "--port", "0"],
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment,
    )  # fmt: skip
    log: list[str] = []
    ready = threading.Event()
    url: list[str] = []

    def read() -> None:
        for line in process.stderr:
            log.append(line.rstrip())
            match = re.search(r"serving on (http://[\d.]+:\d+)", line)
            if match:
                url.append(match[1])
                ready.set()
        ready.set()  # the process ended

    threading.Thread(target=read, daemon=True).start()
    try:
        ready.wait(120)
        if not url:
            process.kill()
            raise AssertionError("the server did not start:\n" + "\n".join(log))
        yield Server(process, url[0], log)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


@pytest.fixture(scope="session")
def served_model_dir(request) -> Path:
    """The demo model; another one through MOE_OPT_TEST_MODEL."""
    path = os.environ.get("MOE_OPT_TEST_MODEL")
    return Path(path) if path else request.getfixturevalue("demo_model_dir")


@pytest.fixture(scope="session")
def reference(served_model_dir):
    """(model, tokenizer) in float32 through plain Transformers: what the server must agree with."""
    import torch
    import transformers

    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(served_model_dir, dtype=torch.float32).eval()
    return model, transformers.AutoTokenizer.from_pretrained(served_model_dir)


@pytest.fixture(scope="session")
def greedy(reference):
    """Prompt and number of tokens -> the ids that greedy `generate` adds, end-of-sequence ignored."""
    import torch

    model, tokenizer = reference

    def generate(prompt: str, tokens: int, special: bool = True) -> list[int]:
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=special).input_ids
        with torch.no_grad():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens,
                eos_token_id=None,
            )  # fmt: skip
        return out[0, ids.shape[1] :].tolist()

    return generate


@pytest.fixture(scope="session")
def united_dir(reference, served_model_dir, tmp_path_factory) -> Path:
    """Averaged united experts of 2 and of 4 ways, in folders as `moe-opt distill` leaves them."""
    from moe_opt import MoEOptimizedForCausalLM, UnitedExperts

    folder = tmp_path_factory.mktemp("united")
    model = MoEOptimizedForCausalLM.from_pretrained(served_model_dir, moe_opt=True)
    for ways in (2, 4):
        UnitedExperts.from_average(model, ways=ways).save_pretrained(folder / f"ways-{ways}", card=False)
    return folder


@pytest.fixture(scope="session")
def server(served_model_dir, united_dir):
    """One server for most tests: float32, united experts at hand, no objective, so exact output."""
    flags = ["--model-id", str(served_model_dir), "--dtype", "float32", "--max-total-tokens", "512"]
    flags += ["--united-experts", str(united_dir), "--ways", "2", "--payload-limit", "200000"]
    with running_server(*flags) as running:
        yield running
