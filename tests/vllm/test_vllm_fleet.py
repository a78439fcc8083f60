"""Two unmodified vLLM workers with NixlConnector behind our router, and ours behind vLLM's protocol.

Needs MOE_OPT_VLLM, the `vllm` program of `scripts/install_vllm.sh` (`make test-vllm` sets it).
"""

import concurrent.futures
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import requests

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "serving"))

from fleet import DEMO, RunningFleet, generated, stream_ids

from moe_opt.serving.launcher import free_port

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
PROMPTS = ["The judge ruled that the contract", "def fibonacci(n):\n    ", "Die Katze sitzt auf dem", "La maison est"]
CONNECTOR = '{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_buffer_device":"cpu"}'


@contextlib.contextmanager
def running(command, log, ready, environment=None):
    """A process with its output in a file, up once `ready` answers."""
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env={**os.environ, **(environment or {})}, start_new_session=True
        )
        try:
            end = time.monotonic() + 300
            while time.monotonic() < end and process.poll() is None:
                with contextlib.suppress(requests.ConnectionError):
                    if requests.get(ready, timeout=5).status_code == 200:
                        break
                time.sleep(0.5)
            else:
                raise AssertionError(f"{command[:3]} did not start:\n" + log.read_text()[-3000:])
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def vllm(tmp_path_factory, demo_model_dir):
    """Addresses of two vLLM workers, and the process of the second."""
    program = os.environ.get("MOE_OPT_VLLM")
    if not program:
        pytest.skip("MOE_OPT_VLLM names no vllm program: use `make test-vllm`")
    folder = tmp_path_factory.mktemp("vllm")
    ports, sides = [free_port(), free_port()], [free_port(), free_port()]
    with contextlib.ExitStack() as stack:
        workers = []
        for index in (0, 1):
            workers.append(
                stack.enter_context(
                    running(
                        [program, "serve", DEMO, "--port", str(ports[index]), "--dtype", "float32",
                         "--block-size", "32", "--max-model-len", "512", "--max-num-seqs", "8", "--enforce-eager",
                         "--kv-transfer-config", CONNECTOR],
                        folder / f"vllm-{index}.log",
                        f"http://127.0.0.1:{ports[index]}/health",
                        {"UCX_TLS": "tcp,shm,self", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
                         "VLLM_NIXL_SIDE_CHANNEL_PORT": str(sides[index]), "VLLM_NO_USAGE_STATS": "1",
                         # a core each: two that spin on the same cores hardly get on at all
                         "VLLM_CPU_OMP_THREADS_BIND": str(index % (os.cpu_count() or 1)), "KMP_BLOCKTIME": "0"},
                    )
                )
            )  # fmt: skip
        yield [f"http://127.0.0.1:{port}" for port in ports], workers


@contextlib.contextmanager
def router(tmp_path, *flags):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moe_opt.cli", "router", *flags, "--hostname", "127.0.0.1", "--port", str(port)]
    with running([*command, "--poll", "0.2"], tmp_path / "router.log", url + "/health") as process:
        yield RunningFleet(process, url, [])


@pytest.fixture(scope="module")
def fleet(vllm, tmp_path_factory):
    (prefill, decode), _ = vllm
    with router(
        tmp_path_factory.mktemp("router"), "--prefill", prefill, "--decode", decode, "--policy", "br-0"
    ) as found:
        yield found


def transfers(url):
    """Prompt tokens that a worker took from elsewhere instead of computing them."""
    text = requests.get(url + "/metrics", timeout=10).text
    values = [
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith("vllm:external_prefix_cache_hits_total")
    ]
    return sum(values)


def test_both_dialects_give_the_tokens_of_generate(fleet, vllm):
    before = transfers(vllm[0][1])
    for prompt in PROMPTS:
        ids, text = generated(prompt, 16)
        body = {"inputs": prompt, "parameters": {"max_new_tokens": 16, "details": True}}
        answer = fleet.post("/generate", body).json()
        assert tuple(token["id"] for token in answer["details"]["tokens"]) == ids
        assert answer["generated_text"] == text
        with fleet.post("/generate_stream", body, stream=True) as response:
            found, indices, last = stream_ids(response)
        assert tuple(found) == ids
        assert indices == list(range(1, len(ids) + 1))
        assert last["generated_text"] == text
        assert last["details"]["finish_reason"] == "length"
        asked = {"model": "tgi", "prompt": prompt, "max_tokens": 16, "temperature": 0}
        assert fleet.post("/v1/completions", asked).json()["choices"][0]["text"] == text
    assert transfers(vllm[0][1]) > before  # the KV came from the other worker
    assert {worker["kind"] for worker in fleet.state()["workers"]} == {"vllm"}


def test_clients_of_both_dialects(fleet, monkeypatch):
    from huggingface_hub import InferenceClient, constants
    from openai import OpenAI
    from text_generation import Client

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    ids, text = generated(PROMPTS[0], 10)
    assert InferenceClient(fleet.url).text_generation(PROMPTS[0], max_new_tokens=10) == text
    assert tuple(event.token.id for event in Client(fleet.url).generate_stream(PROMPTS[0], max_new_tokens=10)) == ids
    client = OpenAI(base_url=fleet.url + "/v1", api_key="-")
    chunks = client.completions.create(model="tgi", prompt=PROMPTS[0], max_tokens=10, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == text
    asked = [{"role": "user", "content": "Hello"}]
    chat = client.chat.completions.create(model="tgi", messages=asked, max_tokens=8, temperature=0)
    parts = client.chat.completions.create(model="tgi", messages=asked, max_tokens=8, temperature=0, stream=True)
    streamed = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert streamed == chat.choices[0].message.content


def test_what_vllm_cannot_do_is_said(fleet):
    body = {"inputs": "a", "parameters": {"typical_p": 0.5, "max_new_tokens": 2}}
    answer = fleet.post("/generate", body)
    assert answer.status_code == 422
    assert "typical_p" in answer.json()["error"]
    assert fleet.post("/tokenize", {"inputs": "a"}).status_code == 501
    assert fleet.post("/generate", {"inputs": "a", "parameters": {"max_new_tokens": 9999}}).status_code in (400, 422)


def test_many_at_once(fleet):
    def one(index):
        prompt = PROMPTS[index % 4] + f" {index}"
        answer = fleet.post("/generate", {"inputs": prompt, "parameters": {"max_new_tokens": 12, "details": True}})
        return prompt, answer.json()

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for prompt, answer in pool.map(one, range(24)):
            assert tuple(token["id"] for token in answer["details"]["tokens"]) == generated(prompt, 12)[0]
    fleet.wait(lambda: all(worker["running"] == 0 for worker in fleet.state()["workers"]), 20)


def test_our_worker_goes_on_when_vllms_is_lost(vllm, tmp_path):
    """A mixed decode tier: the stream moves from a killed vLLM worker to ours, token for token."""
    (prefill, decode), processes = vllm
    port = free_port()
    ours = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moe_opt.serving.serve_command", "--model-id", DEMO, "--dtype", "float32"]
    command += ["--kv-role", "decode", "--hostname", "127.0.0.1", "--port", str(port)]
    with (
        running(command, tmp_path / "ours.log", ours + "/health"),
        router(tmp_path, "--prefill", prefill, "--decode", f"theirs={decode}", "--decode", f"ours={ours}") as fleet,
    ):
        fleet.wait(lambda: all(worker["up"] for worker in fleet.state()["workers"]))
        fleet.post("/router/workers/ours/drain", {})
        ids, text = generated(PROMPTS[0], 120)
        body = {"inputs": PROMPTS[0], "parameters": {"max_new_tokens": 120}}
        response = fleet.post("/generate_stream", body, stream=True)
        lines = response.iter_lines(chunk_size=1)
        seen = [next(lines) for _ in range(9)]
        fleet.post("/router/workers/ours/resume", {})
        os.killpg(processes[1].pid, signal.SIGKILL)

        class Rest:
            def iter_lines(self):
                yield from seen
                yield from lines

        found, indices, last = stream_ids(Rest())
    assert tuple(found) == ids
    assert indices == list(range(1, len(ids) + 1))
    assert last["generated_text"] == text
