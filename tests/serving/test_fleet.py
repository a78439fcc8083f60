"""The PD fleet end to end: real processes, real HTTP, real clients; outputs against `generate`."""

import concurrent.futures
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import requests
from fleet import DEMO, generated, running_fleet, stream_ids

PROMPTS = [
    "The judge ruled that the contract", "def fibonacci(n):\n    ", "Die Katze sitzt auf dem", "The patient was given",
    "If x + 3 = 7, then x", "La maison est", "In the spring the old garden", "El perro corre por",
]  # fmt: skip


@pytest.fixture(scope="module")
def fleet(demo_model_dir):
    with running_fleet("--policy", "eldr", "--max-total-tokens", "512") as found:
        yield found


def generate(fleet, prompt, tokens=24, **parameters):
    body = {"inputs": prompt, "parameters": {"max_new_tokens": tokens, "details": True, **parameters}}
    return fleet.post("/generate", body)


def test_output_equals_generate_token_for_token_in_every_dialect(fleet):
    for prompt in PROMPTS:
        ids, text = generated(prompt, 24)
        answer = generate(fleet, prompt).json()
        assert tuple(token["id"] for token in answer["details"]["tokens"]) == ids
        body = {"inputs": prompt, "parameters": {"max_new_tokens": 24}}
        with fleet.post("/generate_stream", body, stream=True) as response:
            found, indices, last = stream_ids(response)
        assert tuple(found) == ids
        assert indices == list(range(1, len(ids) + 1))
        assert last["generated_text"] == text
        body = {"prompt": prompt, "max_tokens": 24, "temperature": 0}
        assert fleet.post("/v1/completions", body).json()["choices"][0]["text"] == text
    fleet.wait_until_idle()


def test_long_prompts_prefix_hits_and_many_at_once(fleet):
    """Chunked prefill, shared prefixes, more requests than cores."""
    stem = " ".join(PROMPTS) * 3
    prompts = [stem + prompt for prompt in PROMPTS] * 2
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda prompt: generate(fleet, prompt, 16).json(), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert tuple(token["id"] for token in answer["details"]["tokens"]) == generated(prompt, 16)[0]
    fleet.wait_until_idle()


def test_real_clients(fleet, monkeypatch):
    from huggingface_hub import InferenceClient, constants
    from openai import OpenAI
    from text_generation import Client

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # this client refuses every address then, our own too
    ids, text = generated(PROMPTS[0], 12)
    assert InferenceClient(fleet.url).text_generation(PROMPTS[0], max_new_tokens=12) == text
    streamed = Client(fleet.url).generate_stream(PROMPTS[0], max_new_tokens=12)
    assert tuple(event.token.id for event in streamed) == ids
    client = OpenAI(base_url=fleet.url + "/v1", api_key="-")
    chunks = client.completions.create(model="tgi", prompt=PROMPTS[0], max_tokens=12, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == text
    chat = client.chat.completions.create(model="tgi", messages=[{"role": "user", "content": "Hello"}], max_tokens=8)
    assert chat.usage.completion_tokens <= 8
    spoken = Client(fleet.url).chat(messages=[{"role": "user", "content": "Hello"}], max_tokens=8, seed=1)
    assert spoken.choices[0].message.content is not None


def test_what_cannot_be_split_is_done_in_one_piece(fleet):
    body = {"inputs": "a b", "parameters": {"best_of": 2, "do_sample": True, "max_new_tokens": 3, "details": True}}
    assert len(fleet.post("/generate", body).json()["details"]["best_of_sequences"]) == 1
    body = {"prompt": ["one", "two"], "max_tokens": 3, "temperature": 0}
    assert len(fleet.post("/v1/completions", body).json()["choices"]) == 2
    assert fleet.post("/tokenize", {"inputs": "a b"}).json()
    body = {"query": "Is it warm?", "items": ["yes", "no"], "choices": [" yes", " no"]}
    assert fleet.post("/v1/score", body).status_code in (200, 422)
    assert fleet.get("/info").json()["router"] == "moe-opt-router"
    assert fleet.get("/v1/models").json()["data"][0]["id"] == DEMO
    fleet.wait_until_idle()


@pytest.mark.parametrize(
    ("path", "body", "status", "what"),
    [
        ("/generate", {"inputs": ""}, 422, "cannot be empty"),
        ("/generate", {"inputs": 3}, 422, "inputs"),
        ("/generate", [1], 422, ""),
        ("/generate", {"inputs": "a", "parameters": {"max_new_tokens": 100000}}, 422, "max_new_tokens"),
        ("/v1/completions", {"max_tokens": 3}, 422, "prompt"),
        ("/v1/chat/completions", {"messages": "x"}, 422, "messages"),
    ],
)
def test_bad_input_gets_the_error_of_a_single_server(fleet, path, body, status, what):
    answer = fleet.post(path, body)
    assert answer.status_code == status
    assert what in answer.json()["error"]
    fleet.wait_until_idle()


def test_an_error_of_a_stream_is_its_last_event(fleet):
    with fleet.post("/generate_stream", {"inputs": ""}, stream=True) as response:
        assert response.status_code == 200
        assert stream_ids(response)[2] == {
            "error": "Input validation error: `inputs` cannot be empty", "error_type": "validation",
        }  # fmt: skip


def test_a_client_that_leaves_frees_everything(fleet):
    body = {"inputs": PROMPTS[0], "parameters": {"max_new_tokens": 400, "ignore_eos": True}}
    response = fleet.post("/generate_stream", body, stream=True)
    lines = response.iter_lines(chunk_size=1)  # kept: a generator that is let go of closes the connection
    next(lines)
    assert sum(worker["running"] for worker in fleet.state()["workers"]) == 1
    response.close()
    fleet.wait_until_idle()
    with pytest.raises(requests.exceptions.Timeout):
        requests.post(fleet.url + "/generate", json=body, timeout=0.3)
    fleet.wait_until_idle()


def test_state_metrics_and_dashboard(fleet):
    before = fleet.state()
    generate(fleet, PROMPTS[1], 8)
    state = fleet.state()
    assert state["policy"] == "eldr"
    assert state["signatures"]["sources"]["worker"] == before["signatures"]["sources"]["worker"] + 1
    assert [worker["role"] for worker in state["workers"]] == ["prefill", "decode", "decode"]
    assert {"id", "role", "url", "pid", "running", "kv_tokens"} <= state["workers"][0].keys()
    text = fleet.get("/metrics").text
    for name in ("decision_seconds_count", "band_size_count", "worker_kv_tokens", "time_to_first_token_seconds_count"):
        assert f"moe_opt_router_{name}" in text
    page = fleet.get("/ui")
    assert page.headers["Content-Type"].startswith("text/html")
    assert "http://" not in page.text.replace("http://www.w3.org", "")
    assert "https://" not in page.text


def test_the_brownout_switch_and_floor_reach_every_worker(fleet):
    urls = [worker["url"] for worker in fleet.state()["workers"]]
    for url in urls:
        requests.post(url + "/brownout", json={"strategy": "reroute", "threshold": 0.2}, timeout=10).raise_for_status()

    def thresholds():
        return {requests.get(url + "/brownout", timeout=10).json()["decode"]["threshold"] for url in urls}

    try:
        assert thresholds() == {0.2}
        assert fleet.post("/router/brownout", {"floor": 0.5}).json() == {"enabled": True, "floor": 0.5}
        assert thresholds() == {0.5}
        fleet.post("/router/brownout", {"enabled": False})
        assert thresholds() == {1.0}
        fleet.post("/router/brownout", {"enabled": True, "floor": 0})
        assert thresholds() == {0.2}
    finally:
        for url in urls:
            requests.post(url + "/brownout", json={"threshold": 1.0, "floor": 0}, timeout=10)
    assert fleet.post("/router/brownout", {"floor": 2}).status_code == 422
    assert fleet.post("/router/brownout", {"wrong": 2}).status_code == 422


def test_signatures_are_fitted_through_the_fleet_and_used_at_once(fleet, tmp_path):
    command = [sys.executable, "-m", "moe_opt.cli", "fit-signatures", "--url", fleet.url, "--num-workers", "2"]
    command += ["--output", str(tmp_path / "s.npz"), "--output-tokens", "8", "--limit", "40", "--router", fleet.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "from token ids alone" in done.stdout
    rho = float(re.search(r"rho (\S+) from exact counts", done.stdout)[1])
    assert fleet.state()["signatures"]["rho"] == pytest.approx(rho, abs=1e-3)
    wrong = subprocess.run([*command[:4], "--url", "http://127.0.0.1:1", *command[6:]], capture_output=True, text=True)
    assert wrong.returncode == 2
    assert "start a worker" in wrong.stderr.splitlines()[-1]


def test_workers_come_and_go_at_run_time(fleet):
    assert fleet.post("/router/workers/nobody/drain", {}).status_code == 422
    fleet.post("/router/workers/decode-0/drain", {})
    for prompt in PROMPTS[:3]:
        generate(fleet, prompt, 4)
    assert fleet.worker("decode-0")["draining"]
    url = fleet.worker("decode-0")["url"]
    assert requests.delete(fleet.url + "/router/workers/decode-0", timeout=10).status_code == 200
    assert len(fleet.state()["workers"]) == 2
    assert fleet.post("/router/workers", {"url": url, "role": "sideways"}).status_code == 422
    assert fleet.post("/router/workers", {"url": url, "role": "decode", "id": "decode-0"}).status_code == 201
    assert fleet.post("/router/workers", {"url": url, "role": "decode", "id": "again"}).status_code == 422
    fleet.wait(lambda: fleet.worker("decode-0")["up"])
    assert generate(fleet, PROMPTS[0], 4).status_code == 200


def test_a_worker_killed_while_it_streams_is_replaced_without_a_gap(fleet):
    prompt, (ids, text) = PROMPTS[6], generated(PROMPTS[6], 200)
    body = {"inputs": prompt, "parameters": {"max_new_tokens": 200}}
    response = fleet.post("/generate_stream", body, stream=True)
    lines = response.iter_lines()
    seen = [next(lines) for _ in range(9)]
    victim = next(worker for worker in fleet.state()["workers"] if worker["running"])
    os.kill(victim["pid"], signal.SIGKILL)

    class Rest:
        def iter_lines(self):
            yield from seen
            yield from lines

    found, indices, last = stream_ids(Rest())
    assert tuple(found) == ids
    assert indices == list(range(1, len(ids) + 1))
    assert last["generated_text"] == text
    fleet.wait(lambda: fleet.worker(victim["id"])["up"], 120)
    assert fleet.worker(victim["id"])["pid"] != victim["pid"]
    fleet.wait_until_idle()


def test_every_worker_killed_in_turn_under_load_loses_no_request(fleet):
    def one(index):
        prompt = PROMPTS[index % len(PROMPTS)] + f" {index}"
        if index % 2:
            with fleet.post(
                "/generate_stream", {"inputs": prompt, "parameters": {"max_new_tokens": 48}}, stream=True
            ) as response:
                return prompt, tuple(stream_ids(response)[0])
        answer = generate(fleet, prompt, 48).json()
        return prompt, tuple(token["id"] for token in answer["details"]["tokens"])

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        work = [pool.submit(one, index) for index in range(36)]
        for worker_id in ("decode-1", "prefill-0"):
            time.sleep(0.7)
            os.kill(fleet.worker(worker_id)["pid"], signal.SIGKILL)
        for done in work:
            prompt, ids = done.result()
            assert ids == generated(prompt, 48)[0]
    fleet.wait(lambda: all(worker["up"] for worker in fleet.state()["workers"]), 120)
    fleet.wait_until_idle()


def test_sighup_restarts_the_workers_one_by_one_while_requests_run(fleet):
    pids = {worker["id"]: worker["pid"] for worker in fleet.state()["workers"]}
    fleet.process.send_signal(signal.SIGHUP)
    answers = []

    def renewed():
        answers.append(generate(fleet, PROMPTS[len(answers) % 8], 6).status_code)
        state = fleet.state()["workers"]
        return all(w["up"] and not w["draining"] and w["pid"] != pids[w["id"]] for w in state)

    fleet.wait(renewed, 180)
    assert set(answers) == {200}


def test_sigterm_lets_requests_finish(fleet):
    """The last test of this fleet: it is gone afterwards."""
    ids, _ = generated(PROMPTS[0], 150)
    body = {"inputs": PROMPTS[0], "parameters": {"max_new_tokens": 150}}
    with fleet.post("/generate_stream", body, stream=True) as response:
        lines = response.iter_lines(chunk_size=1)
        seen = [next(lines)]
        fleet.process.send_signal(signal.SIGTERM)

        class Rest:
            def iter_lines(self):
                yield from seen
                yield from lines

        assert tuple(stream_ids(Rest())[0]) == ids
    assert fleet.process.wait(60) == 0
    with pytest.raises(requests.ConnectionError):
        fleet.get("/health")
