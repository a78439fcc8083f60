"""Two servers of one expert-parallel group: each rank has an endpoint and requests of its own, experts are shared.

python examples/expert_parallel_serve.py
"""

from __future__ import annotations

import concurrent.futures
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

os.environ.pop("HF_HUB_OFFLINE", None)  # the client of huggingface_hub would refuse this machine's address too

from huggingface_hub import InferenceClient

MODEL = Path(__file__).parent / "demo_model"
PROMPTS = ("def area(radius):", "The court held that", "Die Stadt liegt", "La ciudad es")


def main() -> None:
    command = [sys.executable, "-m", "moe_opt.cli", "serve", "--model-id", str(MODEL), "--port", "0"]
    command += ["--hostname", "127.0.0.1", "--expert-parallel", "2", "--expert-replication", "1.5"]
    command += ["--rebalance-steps", "16"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={"OMP_NUM_THREADS": "1", **os.environ})
    assert server.stderr is not None
    try:
        urls: list[str] = []
        for line in server.stderr:
            if found := re.search(r"serving on (http://\S+)", line):
                urls.append(found[1])
            if len(urls) == 2:
                break
        else:
            raise SystemExit("the group did not start")
        clients = [InferenceClient(url) for url in urls]
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            texts = pool.map(
                lambda job: clients[job[0] % 2].text_generation(job[1], max_new_tokens=24), enumerate(PROMPTS)
            )
            for number, text in enumerate(texts):
                print(f"rank {number % 2}: {PROMPTS[number]!r} -> {text!r}")
    finally:
        server.send_signal(signal.SIGTERM)
        _, log = server.communicate(timeout=60)
    for line in log.splitlines():
        if "rebalanced" in line:
            print(line.partition("lockstep: ")[2])
    print(f"the group ended with status {server.returncode}")


if __name__ == "__main__":
    main()
