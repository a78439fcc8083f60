"""Memory of a server under mixed load stays flat: twenty minutes, or MOE_OPT_SOAK_MINUTES."""

import os
import random
import threading
import time
from pathlib import Path

import pytest
import requests
from servers import running_server

MINUTES = float(os.environ.get("MOE_OPT_SOAK_MINUTES", "20"))
pytestmark = [pytest.mark.soak, pytest.mark.timeout(60 * (MINUTES + 5))]


def resident(pid: int) -> float:
    """Megabytes of a process in memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmRSS")


def test_memory_is_flat(demo_model_dir):
    united = demo_model_dir / "united"
    flags = ("--model-id", str(demo_model_dir), "--max-total-tokens", "256", "--kv-role", "both")
    with running_server(*flags, "--united-experts", str(united), "--ways", "4") as server:
        stop = threading.Event()

        def client(number):
            rng = random.Random(number)
            while not stop.wait(rng.uniform(0.05, 0.4)):
                prompt = " ".join(
                    rng.choice(["court", "def", "katze", "x + 3", "maison"]) for _ in range(rng.randrange(2, 60))
                )
                tokens = rng.randrange(1, 40)
                kind = rng.randrange(6)
                parameters = {"max_new_tokens": tokens, "do_sample": kind == 1}
                if kind == 0:  # a client that leaves
                    body = {"inputs": prompt, "parameters": parameters}
                    with requests.post(server.url + "/generate_stream", json=body, stream=True, timeout=60) as answer:
                        next(answer.iter_lines(chunk_size=1))
                elif kind == 2:
                    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens}
                    server.post("/v1/chat/completions", body)
                elif kind == 3:  # KV that nobody fetches
                    server.post("/generate", {"inputs": prompt, "kv_transfer_params": {"do_remote_decode": True}})
                elif kind == 4:
                    server.post("/brownout", {"threshold": rng.choice([0.0, 0.5, 1.0]), "ways": rng.choice([2, 4, 8])})
                elif kind == 5:
                    server.post("/generate", {"inputs": prompt, "parameters": {"max_new_tokens": 10**6}})
                else:
                    server.post("/generate", {"inputs": prompt, "parameters": parameters})

        threads = [threading.Thread(target=client, args=(number,), daemon=True) for number in range(6)]
        for thread in threads:
            thread.start()
        samples = []
        end = time.monotonic() + 60 * MINUTES
        while time.monotonic() < end:
            time.sleep(min(5.0, 60 * MINUTES / 40))
            samples.append(resident(server.process.pid))
        stop.set()
        for thread in threads:
            thread.join(60)
    third = len(samples) // 3
    middle, last = sorted(samples[third : 2 * third]), sorted(samples[2 * third :])
    grown = last[len(last) // 2] - middle[len(middle) // 2]
    print(f"resident MB: first {samples[0]:.0f}, middle third {middle[len(middle) // 2]:.0f}, last third +{grown:.1f}")
    assert grown < 0.03 * middle[len(middle) // 2], samples[:: max(1, len(samples) // 20)]
