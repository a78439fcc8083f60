"""Brownout over HTTP: SLO control, the experts loader, and exact output for those who ask."""

import threading
import time

import pytest
import requests
from servers import running_server

PROMPT = "The patient should take"


@pytest.fixture(scope="module")
def slo_server(served_model_dir, united_dir):
    """An objective that no step can meet: with traffic the controllers must brown out, without it they must return."""
    flags = ["--model-id", str(served_model_dir), "--dtype", "float32", "--max-total-tokens", "512"]
    flags += ["--united-experts", str(united_dir), "--ways", "4", "--slo-tpot", "0.0001", "--slo-ttft", "0.0001"]
    with running_server(*flags, env={"API_KEY": "secret"}) as running:
        yield running


KEY = {"Authorization": "Bearer secret"}


def generate(server, tokens=24, **extra):
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": tokens, "ignore_eos": True, "details": True, **extra}}
    response = server.post("/generate", body, headers=KEY)
    assert response.status_code == 200, response.text
    return response


def threshold(server, phase):
    return server.get("/brownout", headers=KEY).json()[phase]["threshold"]


def test_thresholds_fall_under_load_exact_requests_stay_exact_and_idle_brings_them_back(slo_server, greedy):
    assert threshold(slo_server, "decode") == 1
    end = time.monotonic() + 30
    while threshold(slo_server, "decode") > 0.7:
        browned = generate(slo_server)
        assert time.monotonic() < end, "the threshold does not fall"
    browned = generate(slo_server)
    assert browned.headers["x-moe-opt-brownout"].startswith("lowest-threshold=0.")
    details = browned.json()["details"]["brownout"]
    assert details["browned"] is True
    assert details["lowest_threshold"] < 0.75
    assert details["browned_share"] > 0
    # In the middle of the brownout, three ways to ask for exact output.
    expected = greedy(PROMPT, 24)
    for extra in ({"exact": True}, {}):
        headers = KEY if extra else {**KEY, "x-moe-opt-exact": "true"}
        parameters = {"max_new_tokens": 24, "ignore_eos": True, "details": True, **extra}
        exact = slo_server.post("/generate", {"inputs": PROMPT, "parameters": parameters}, headers=headers)
        assert [token["id"] for token in exact.json()["details"]["tokens"]] == expected
        assert exact.headers["x-moe-opt-brownout"] == "exact"
        assert exact.json()["details"]["brownout"]["browned"] is False
    stream = slo_server.post(
        "/v1/completions", {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "exact": True, "stream": True},
        headers=KEY,
    )  # fmt: skip
    assert stream.headers["x-moe-opt-brownout"] == "exact"
    assert '"browned":false' in stream.text
    # BrownoutServe's point: back to exact output soon after the load.
    start = time.monotonic()
    while min(threshold(slo_server, "decode"), threshold(slo_server, "prefill")) < 1:
        assert time.monotonic() - start < 15
        time.sleep(0.2)


def test_a_browned_stream_says_so_in_its_last_event(slo_server):
    slo_server.post("/brownout", {"threshold": 0.2}, headers=KEY)
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 6}}
    response = slo_server.post("/generate_stream", body, headers=KEY)
    assert response.headers["x-moe-opt-brownout"] == "see-last-event"
    assert '"browned":true,"lowest_threshold":0.2' in response.text.strip().split("\n\n")[-1]
    status = slo_server.post("/brownout", {"threshold": "slo"}, headers=KEY).json()
    assert status["decode"]["set_by"] == "slo"


def test_the_key_guards_generation_and_brownout_but_not_health(slo_server):
    body = {"inputs": "a", "parameters": {"max_new_tokens": 1}}
    for path in ("/", "/generate", "/generate_stream", "/tokenize", "/invocations", "/v1/completions", "/brownout"):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            response = slo_server.post(path, body, headers=headers)
            assert (response.status_code, response.content) == (401, b"")
    assert slo_server.get("/brownout").status_code == 401
    assert slo_server.get("/health").status_code == 200
    assert slo_server.get("/info").status_code == 200
    assert slo_server.post("/generate", body, headers={"Authorization": "bearer secret"}).status_code == 200


def test_an_objective_keeps_its_united_experts(slo_server):
    refused = slo_server.post("/brownout", {"ways": 0}, headers=KEY)
    assert (refused.status_code, refused.json()["error_type"]) == (422, "validation")
    assert slo_server.get("/brownout", headers=KEY).json()["united_experts"]["ways"] == 4


def test_without_an_objective_everything_is_exact(server):
    status = server.get("/brownout").json()
    assert [status[phase]["threshold"] for phase in ("prefill", "decode")] == [1, 1]
    assert status["united_experts"] == {"ways": 2, "available_ways": [2, 4]}
    response = server.post("/generate", {"inputs": PROMPT, "parameters": {"max_new_tokens": 2}})
    assert response.headers["x-moe-opt-brownout"] == "exact"
    bad = server.post("/generate", {"inputs": PROMPT}, headers={"x-moe-opt-exact": "perhaps"})
    assert (bad.status_code, bad.json()["error_type"]) == (422, "validation")


@pytest.mark.parametrize(
    "update",
    [
        {"threshold": 1.5}, {"threshold": "low"}, {"threshold": "slo"}, {"ways": 3}, {"strategy": "none"},
        {"keep": "luck"}, {"layers": [99]}, {"phase": "both"}, {"thresholds": 0.5}, {"ways": 4, "threshold": -1},
        {"ways": 0, "threshold": 0.5}, {"ways": 4, "strategy": "none"}, {"slo_tpot": -1}, {"ways": 0, "slo_tpot": 1.0},
    ],
)  # fmt: skip
def test_a_refused_update_changes_nothing(server, update):
    before = server.get("/brownout").json()
    response = server.post("/brownout", update)
    assert (response.status_code, response.json()["error_type"]) == (422, "validation")
    assert server.get("/brownout").json() == before


def test_objectives_come_and_go_while_serving(server):
    status = server.post("/brownout", {"slo_tpot": 0.00001}).json()
    assert (status["decode"]["set_by"], status["decode"]["slo_seconds"]) == ("slo", 0.00001)
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 24, "ignore_eos": True}}
    end = time.monotonic() + 30
    while server.get("/brownout").json()["decode"]["threshold"] == 1:
        server.post("/generate", body)
        assert time.monotonic() < end
    status = server.post("/brownout", {"slo_tpot": 0}).json()
    assert (status["decode"]["set_by"], status["decode"]["threshold"]) == ("default", 1)
    assert server.post("/generate", body).headers["x-moe-opt-brownout"] == "exact"


def test_experts_are_exchanged_under_traffic_without_a_failed_or_altered_request(server, greedy):
    """Exact requests run the whole time while ways and thresholds change under them."""
    expected = greedy(PROMPT, 24)
    stop = threading.Event()
    wrong: list[str] = []
    answered = [0, 0, 0]

    def client(number: int) -> None:
        while not stop.is_set():
            parameters = {"max_new_tokens": 24, "ignore_eos": True, "details": True, "exact": number > 0}
            response = requests.post(
                server.url + "/generate", json={"inputs": PROMPT, "parameters": parameters}, timeout=60
            )
            if response.status_code != 200:
                wrong.append(response.text)
            elif number > 0 and [token["id"] for token in response.json()["details"]["tokens"]] != expected:
                wrong.append("altered")
            answered[number] += 1

    clients = [threading.Thread(target=client, args=(number,)) for number in range(3)]
    for thread in clients:
        thread.start()
    try:
        for ways, value in ((4, 0.3), (2, 0.0), (4, 0.6), (0, 1.0), (2, 0.5), (2, 1.0)):
            response = server.post("/brownout", {"ways": ways, "threshold": value})
            assert response.status_code == 200, response.text
            assert response.json()["united_experts"]["ways"] == (ways or None)
            assert response.json()["decode"]["threshold"] == value
            seen = list(answered)
            end = time.monotonic() + 20
            while any(now == then for now, then in zip(answered, seen, strict=True)) and time.monotonic() < end:
                time.sleep(0.01)
    finally:
        stop.set()
        for thread in clients:
            thread.join()
    assert wrong == []
    assert min(answered) >= 6
