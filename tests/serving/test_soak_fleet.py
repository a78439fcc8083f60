"""A hundred requests, each losing its decode worker at a random token; and minutes of kills under load."""

import os
import random
import signal
import threading
import time

import pytest
from fleet import generated, running_fleet, stream_ids

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3000)]
RUNS = int(os.environ.get("MOE_OPT_SOAK_RUNS", "100"))
RESTART = ("--restarts", "1000", "--restart-backoff", "0")
STEMS = [
    "The judge ruled that",
    "def add(a, b):\n",
    "Die Katze sitzt",
    "La maison est",
    "If x + 3 = 7, then",
    "In spring the",
]


def test_greedy_output_survives_a_killed_decode_worker_at_any_token(demo_model_dir):
    rng = random.Random(5)
    moved = 0
    with running_fleet("--policy", "br-0", "--max-total-tokens", "512", *RESTART, decode=3) as fleet:
        for run in range(RUNS):
            length = rng.randrange(20, 140)
            prompt, kill_at = f"{rng.choice(STEMS)} {run}", rng.randrange(0, length)
            body = {"inputs": prompt, "parameters": {"max_new_tokens": length, "ignore_eos": True}}
            response = fleet.post("/generate_stream", body, stream=True)
            lines = response.iter_lines(chunk_size=1)
            seen = [next(lines) for _ in range(2 * kill_at + 1)]
            victim = next((w for w in fleet.state()["workers"] if w["role"] == "decode" and w["running"]), None)
            if victim is not None:
                os.kill(victim["pid"], signal.SIGKILL)
                moved += 1

            class Rest:
                def iter_lines(self, seen=seen, lines=lines):
                    yield from seen
                    yield from lines

            ids, indices, last = stream_ids(Rest())
            expected, _ = generated(prompt, length)
            # `generate` ends at an end-of-sequence token, which is ignored here
            assert tuple(ids[: len(expected)]) == expected, (run, kill_at)
            assert indices == list(range(1, length + 1)), (run, kill_at)
            assert last["details"] is None or last["generated_text"]
            fleet.wait(lambda: sum(w["up"] for w in fleet.state()["workers"] if w["role"] == "decode") >= 2, 120)
        fleet.wait_until_idle()
    assert moved > RUNS // 2


def test_kills_under_load_lose_nothing(demo_model_dir):
    """Three minutes of eight clients while a worker dies every few seconds."""
    rng = random.Random(6)
    stop = threading.Event()
    failures, answered = [], []

    with running_fleet("--policy", "eldr", "--max-total-tokens", "512", *RESTART, prefill=2, decode=3) as fleet:

        def client(index):
            number = 0
            while not stop.is_set():
                number += 1
                prompt = f"{STEMS[index % len(STEMS)]} {index} {number}"
                body = {"inputs": prompt, "parameters": {"max_new_tokens": 40, "details": True}}
                if number % 2:
                    answer = fleet.post("/generate", body)
                    ids = tuple(t["id"] for t in answer.json().get("details", {}).get("tokens", ()))
                    status = answer.status_code
                else:
                    with fleet.post("/generate_stream", body, stream=True) as response:
                        found, _, last = stream_ids(response)
                    ids, status = tuple(found), 500 if "error" in (last or {}) else 200
                if status != 200:
                    failures.append((prompt, status))
                elif ids != generated(prompt, 40)[0]:
                    failures.append((prompt, "other tokens"))
                answered.append(prompt)

        threads = [threading.Thread(target=client, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        end = time.monotonic() + 180
        kills = 0
        while time.monotonic() < end:
            time.sleep(rng.uniform(6, 10))
            up = [w for w in fleet.state()["workers"] if w["up"]]
            for role in ("prefill", "decode"):
                if sum(w["role"] == role for w in up) < 2:
                    up = [w for w in up if w["role"] != role]
            if up:
                os.kill(rng.choice(up)["pid"], signal.SIGKILL)
                kills += 1
        stop.set()
        for thread in threads:
            thread.join()
        fleet.wait_until_idle()
    assert not failures, failures[:5]
    assert kills >= 5
    assert len(answered) > 50
