"""Prefill on one server, decode on another, over real HTTP and through shared memory."""

import base64
import json
import time

import numpy as np
import pytest
import requests
from servers import running_server

DEMO = "examples/demo_model"
PROMPT = "The old lighthouse keeper climbed the stairs and"
PREFILL = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def pair(demo_model_dir):
    flags = ("--model-id", str(demo_model_dir), "--dtype", "float32", "--max-total-tokens", "512")
    with (
        running_server(*flags, "--kv-role", "prefill", "--kv-transfer-expiry", "2") as prefill,
        running_server(*flags, "--kv-role", "decode") as decode,
        running_server(*flags, "--kv-role", "decode", "--kv-shared-memory", "false") as remote,
    ):
        yield prefill, decode, remote


def ticket_of(server, path="/v1/completions", **body):
    answer = server.post(path, {**body, "kv_transfer_params": PREFILL})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("transport", ["shared memory", "http"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_answer_is_the_one_of_a_single_server(pair, transport, stream):
    prefill, decode = pair[0], pair[1 if transport == "shared memory" else 2]
    body = {"inputs": PROMPT + f" {transport} {stream}", "parameters": {"max_new_tokens": 12, "details": True}}
    whole = prefill.post("/generate", body).json()
    ticket = ticket_of(prefill, "/generate", **body)["kv_transfer_params"]
    assert prefill.metric("moe_opt_kv_transfer_bytes") > 0
    before = decode.metric('moe_opt_kv_transfers_total{outcome="fetched"}')
    if stream:
        lines = decode.post("/generate_stream", {**body, "kv_transfer_params": ticket}).text.split("\n\n")
        assert f'"generated_text":{json.dumps(whole["generated_text"])}' in lines[-2]
    else:
        split = decode.post("/generate", {**body, "kv_transfer_params": ticket}).json()
        assert split["generated_text"] == whole["generated_text"]
        assert [t["id"] for t in split["details"]["tokens"]] == [t["id"] for t in whole["details"]["tokens"]]
    assert decode.metric('moe_opt_kv_transfers_total{outcome="fetched"}') == before + 1
    assert prefill.metric("moe_opt_kv_transfer_bytes") == 0  # taken, and so gone


def test_a_prefill_answers_with_ids_and_expert_counts(pair):
    answer = ticket_of(pair[0], prompt=PROMPT, max_tokens=30, temperature=0)
    counts = answer["prefill_expert_counts"]
    values = np.frombuffer(base64.b64decode(counts["data"]), counts["dtype"]).reshape(counts["shape"])
    per_layer = values.sum(1)
    assert (per_layer == per_layer[0]).all()
    assert per_layer[0] % len(answer["prompt_token_ids"]) == 0  # top-k choices for every prompt token
    assert answer["usage"]["completion_tokens"] == 1
    ticket = answer["kv_transfer_params"]
    assert pair[0].get(f"/kv_transfer/{ticket['remote_request_id']}").status_code == 200
    url = f"{pair[0].url}/kv_transfer/{ticket['remote_request_id']}"
    assert [requests.delete(url).status_code for _ in range(2)] == [204, 404]


def test_kv_that_nobody_fetches_expires_and_the_prompt_is_computed_again(pair):
    prefill, decode, _ = pair
    body = {"prompt": PROMPT + " once", "max_tokens": 8, "temperature": 0}
    whole = prefill.post("/v1/completions", body).json()["choices"][0]["text"]
    ticket = ticket_of(prefill, **body)["kv_transfer_params"]
    expired = 'moe_opt_kv_transfers_total{outcome="expired"}'
    end = time.monotonic() + 15
    while prefill.metric(expired) < 1 and time.monotonic() < end:
        time.sleep(0.2)
    assert prefill.metric("moe_opt_kv_transfer_bytes") == 0
    again = decode.post("/v1/completions", {**body, "kv_transfer_params": ticket}).json()
    assert again["choices"][0]["text"] == whole
    assert decode.metric('moe_opt_kv_transfers_total{outcome="missed"}') >= 1


@pytest.mark.parametrize("path", ["/generate_stream", "/v1/completions", "/v1/chat/completions"])
def test_an_answer_goes_on_behind_what_the_client_has(pair, path):
    decode = pair[1]
    if path == "/generate_stream":
        body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 14}}
    elif path == "/v1/completions":
        body = {"prompt": PROMPT, "max_tokens": 14, "temperature": 0, "stream": True}
    else:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 14, "temperature": 0, "stream": True}
    body["return_token_ids"] = True

    def events(**more):
        text = decode.post(path, {**body, **more}).text
        return [json.loads(part[6:]) for part in text.split("\n\n") if part.startswith("data: {")]

    def ids(chunks):
        if path == "/generate_stream":
            return [chunk["token"]["id"] for chunk in chunks]
        return [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]

    whole = events()
    rest = events(kv_transfer_params={"generated_token_ids": ids(whole)[:5]})
    assert len(ids(whole)) >= 6
    assert ids(rest) == ids(whole)[5:]
    if path == "/generate_stream":
        assert [chunk["index"] for chunk in rest] == [chunk["index"] for chunk in whole[5:]]
        assert rest[-1]["generated_text"] == whole[-1]["generated_text"]


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ({"inputs": "a", "kv_transfer_params": PREFILL, "parameters": {"best_of": 2, "do_sample": True}},
         "one sequence"),
        ({"inputs": "a", "kv_transfer_params": {"generated_token_ids": "x"}}, "list of token ids"),
        ({"inputs": "a", "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": True}}, "at once"),
        ({"inputs": "a", "parameters": {"max_new_tokens": 2}, "kv_transfer_params": {"generated_token_ids": [1, 2, 3]}},
         "more than max_new_tokens"),
    ],
)  # fmt: skip
def test_bad_hand_offs_are_refused(pair, body, what):
    answer = pair[0].post("/generate", body)
    assert answer.status_code == 422
    assert what in answer.json()["error"]


@pytest.mark.parametrize("file", ["../../etc/passwd", "moe-opt-kv-1-" + "a" * 32, "", None])
def test_a_forged_ticket_reads_and_removes_nothing(pair, file):
    forged = {
        "do_remote_prefill": True, "remote_request_id": "a" * 32, "remote_host": "127.0.0.1", "remote_port": 1,
        "moe_opt": {"format": 1, "file": file},
    }  # fmt: skip
    body = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0}
    whole = pair[1].post("/v1/completions", body).json()["choices"][0]["text"]
    answer = pair[1].post("/v1/completions", {**body, "kv_transfer_params": forged})
    assert answer.json()["choices"][0]["text"] == whole
