"""TGI's own dialect: bodies, headers, framing, errors. Expectations come from plain Transformers."""

import json
import time

import pytest
import requests

PROMPT = "The court finds that the contract"


def events(response):
    """The JSON events of a stream; checks the framing on the way."""
    assert response.status_code == 200
    assert response.headers["Content-Type"] == "text/event-stream"
    frames = [frame for frame in response.text.split("\n\n") if frame and not frame.startswith(":")]
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    return [json.loads(frame[6:]) for frame in frames]


def test_generate_returns_the_tokens_of_greedy_generate(server, greedy, reference):
    expected = greedy(PROMPT, 12)
    response = server.post(
        "/generate", {"inputs": PROMPT, "parameters": {"max_new_tokens": 12, "details": True, "ignore_eos": True}}
    )
    body = response.json()
    assert [token["id"] for token in body["details"]["tokens"]] == expected
    assert body["generated_text"] == reference[1].decode(expected, skip_special_tokens=True)
    assert body["details"]["finish_reason"] == "length"
    assert body["details"]["generated_tokens"] == 12
    assert body["details"]["seed"] is None
    assert body["details"]["prefill"] == []
    assert response.headers["x-prompt-tokens"] == str(len(reference[1](PROMPT).input_ids))
    assert response.headers["x-generated-tokens"] == "12"
    assert response.headers["x-compute-type"] == "cpu"
    assert response.headers["x-compute-characters"] == str(len(PROMPT))
    for name in ("x-compute-time", "x-total-time", "x-validation-time", "x-queue-time", "x-inference-time"):
        assert float(response.headers[name]) >= 0


def test_logprobs_are_those_of_the_models_distribution(server, reference):
    import torch

    model, tokenizer = reference
    body = server.post(
        "/generate",
        {"inputs": PROMPT, "parameters": {"max_new_tokens": 4, "decoder_input_details": True, "top_n_tokens": 3}},
    ).json()
    details = body["details"]
    ids = tokenizer(PROMPT).input_ids
    assert [token["id"] for token in details["prefill"]] == ids
    assert details["prefill"][0]["logprob"] is None
    generated = [token["id"] for token in details["tokens"]]
    with torch.no_grad():
        logits = model(torch.tensor([ids + generated])).logits[0]
    logprobs = torch.log_softmax(logits.float(), -1)
    expected = [float(logprobs[i, token]) for i, token in enumerate((ids + generated)[1:])]
    got = [token["logprob"] for token in details["prefill"][1:] + details["tokens"]]
    assert got == pytest.approx(expected, abs=1e-3)
    best = logprobs[len(ids) - 1].topk(3)
    assert [top["id"] for top in details["top_tokens"][0]] == best.indices.tolist()


def test_stream_carries_the_same_tokens_and_ends_with_the_details(server, greedy):
    expected = greedy(PROMPT, 8)
    parameters = {"max_new_tokens": 8, "details": True, "ignore_eos": True}
    stream = events(server.post("/generate_stream", {"inputs": PROMPT, "parameters": parameters}))
    assert [event["token"]["id"] for event in stream] == expected
    assert [event["index"] for event in stream] == list(range(1, 9))
    assert all(event["generated_text"] is None and event["details"] is None for event in stream[:-1])
    last = stream[-1]
    assert last["details"]["finish_reason"] == "length"
    assert last["details"]["generated_tokens"] == 8
    assert last["details"]["input_length"] > 0
    assert last["brownout"] == {"browned": False, "lowest_threshold": 1.0, "browned_share": 0.0}
    text = server.post("/generate", {"inputs": PROMPT, "parameters": parameters}).json()["generated_text"]
    assert last["generated_text"] == text
    assert "".join(e["token"]["text"] for e in stream if not e["token"]["special"]) == text


def test_root_answers_with_a_list_and_streams_on_request(server):
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 3}}
    whole = server.post("/", body).json()
    assert isinstance(whole, list)
    assert len(whole) == 1
    stream = events(server.post("/", {**body, "stream": True}))
    assert stream[-1]["generated_text"] == whole[0]["generated_text"]


def test_return_full_text_puts_the_prompt_in_front(server):
    parameters = {"max_new_tokens": 3}
    text = server.post("/generate", {"inputs": PROMPT, "parameters": parameters}).json()["generated_text"]
    parameters["return_full_text"] = True
    full = server.post("/generate", {"inputs": PROMPT, "parameters": parameters}).json()["generated_text"]
    assert full == PROMPT + text


def test_a_stop_sequence_ends_the_text_and_says_so(server, greedy, reference):
    text = reference[1].decode(greedy(PROMPT, 20), skip_special_tokens=True)
    stop = text[6:9]
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 20, "stop": [stop], "details": True}}
    answer = server.post("/generate", body).json()
    assert answer["details"]["finish_reason"] == "stop_sequence"
    assert answer["generated_text"] == text[: text.index(stop) + len(stop)]
    assert events(server.post("/generate_stream", body))[-1]["generated_text"] == answer["generated_text"]


def test_truncate_keeps_the_end_of_the_prompt(server):
    parameters = {"max_new_tokens": 2, "truncate": 4, "decoder_input_details": True}
    details = server.post("/generate", {"inputs": PROMPT * 3, "parameters": parameters}).json()["details"]
    whole = server.post("/tokenize", {"inputs": PROMPT * 3}).json()
    assert [token["id"] for token in details["prefill"]] == [token["id"] for token in whole[-4:]]


def test_a_seed_repeats_and_best_of_keeps_the_likelier(server):
    sampled = {"max_new_tokens": 8, "do_sample": True, "temperature": 1.2, "seed": 7, "details": True}
    first, second = (
        server.post("/generate", {"inputs": PROMPT, "parameters": sampled}).json()["generated_text"] for _ in range(2)
    )
    assert first == second
    parameters = {"max_new_tokens": 8, "do_sample": True, "best_of": 2, "details": True}
    details = server.post("/generate", {"inputs": PROMPT, "parameters": parameters}).json()["details"]
    (other,) = details["best_of_sequences"]

    def mean(sequence):
        return sum(token["logprob"] for token in sequence["tokens"]) / len(sequence["tokens"])

    assert mean(details) >= mean(other)
    assert other["seed"] != details["seed"]


def test_without_parameters_it_samples_and_with_them_it_does_not(server):
    stream = requests.post(server.url + "/generate_stream", json={"inputs": PROMPT}, stream=True, timeout=60)
    next(stream.iter_lines())
    stream.close()
    parameters = {"max_new_tokens": 2, "details": True}
    details = server.post("/generate", {"inputs": PROMPT, "parameters": parameters}).json()["details"]
    assert details["seed"] is None
    parameters["do_sample"] = True
    details = server.post("/generate", {"inputs": PROMPT, "parameters": parameters}).json()["details"]
    assert isinstance(details["seed"], int)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"best_of": 3, "do_sample": True}, "`best_of` must be > 0 and <= 2. Given: 3"),
        ({"best_of": 2}, "you must use sampling when `best_of` is > 1"),
        ({"best_of": 2, "do_sample": True, "seed": 1}, "`seed` must not be set when `best_of` > 1"),
        ({"temperature": 0}, "`temperature` must be strictly positive"),
        ({"repetition_penalty": 0}, "`repetition_penalty` must be strictly positive"),
        ({"frequency_penalty": 2.5}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
        ({"top_p": 1.0}, "`top_p` must be > 0.0 and < 1.0"),
        ({"typical_p": 1.0}, "`typical_p` must be > 0.0 and < 1.0"),
        ({"top_k": 0}, "`top_k` must be strictly positive"),
        ({"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
        ({"stop": list("abcde")}, "`stop` supports up to 4 stop sequences. Given: 5"),
        ({"top_n_tokens": 6}, "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
        ({"truncate": 0}, "`truncate` must be strictly positive and less than 511. Given: 0"),
        (
            {"max_new_tokens": 10000},
            "`inputs` tokens + `max_new_tokens` must be <= 512. Given: 2 `inputs` tokens and 10000 `max_new_tokens`",
        ),
    ],
)
def test_validation_errors_have_tgis_words(server, parameters, message):
    expected = {"error": f"Input validation error: {message}", "error_type": "validation"}
    response = server.post("/generate", {"inputs": "a", "parameters": parameters})
    assert response.status_code == 422
    assert response.json() == expected
    # The same mistake on a stream: HTTP 200, and the error is the only event.
    if "best_of" not in parameters:
        assert events(server.post("/generate_stream", {"inputs": "a", "parameters": parameters})) == [expected]


def test_streams_refuse_what_needs_the_whole_answer(server):
    for parameters, word in (({"decoder_input_details": True}, "decoder_input_details"), ({"best_of": 2}, "best_of")):
        body = {"inputs": "a", "parameters": {"do_sample": True, **parameters}}
        (event,) = events(server.post("/generate_stream", body))
        assert event["error_type"] == "validation"
        assert word in event["error"]


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        (b"{", 422, "validation"),
        (b'{"inputs": 1}', 422, "validation"),
        (b'{"inputs": "\\ud800"}', 422, "validation"),
        (b'{"inputs": "a", "parameters": {"temperature": NaN}}', 422, "validation"),
        (b'{"inputs": "a", "parameters": {"top_k": "5"}}', 422, "validation"),
        (b'{"inputs": ""}', 422, "validation"),
        (b"[" * 5000, 422, "validation"),
        (b"\xff\xfe", 422, "validation"),
        (b'{"inputs": "' + b"a" * 300_000 + b'"}', 413, "validation"),
        (b'{"inputs": "' + b"word " * 5_000 + b'"}', 422, "validation"),
    ],
)
def test_broken_bodies_are_answered_in_tgis_shape(server, body, status, kind):
    response = requests.post(
        server.url + "/generate", data=body, headers={"Content-Type": "application/json"}, timeout=60
    )
    assert response.status_code == status
    assert set(response.json()) == {"error", "error_type"}
    assert response.json()["error_type"] == kind


def test_other_content_types_routes_and_methods(server):
    assert requests.post(server.url + "/generate", data="{}", timeout=60).status_code == 415
    missing = server.get("/nowhere")
    assert (missing.status_code, missing.json()["error_type"]) == (404, "not_found")
    wrong = server.get("/generate")
    assert (wrong.status_code, wrong.headers["Allow"]) == (405, "POST")


def test_tokenize_gives_ids_texts_and_places(server, reference):
    text = "Zürich 東京 🦊 code"
    tokens = server.post("/tokenize", {"inputs": text}).json()
    assert [token["id"] for token in tokens] == reference[1](text).input_ids
    assert all(token["text"] == text[token["start"] : token["stop"]] for token in tokens)
    assert tokens[-1]["stop"] == len(text)


def test_grammars_constrain_the_text(server):
    import re

    parameters = {"max_new_tokens": 40, "grammar": {"type": "regex", "value": "[0-9]{3}-[a-f]{2}"}}
    text = server.post("/generate", {"inputs": PROMPT, "parameters": parameters}).json()["generated_text"]
    assert re.fullmatch("[0-9]{3}-[a-f]{2}", text)
    schema = {
        "properties": {"kind": {"enum": ["cat", "dog"]}, "age": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["kind", "age"],
    }
    for value in (schema, json.dumps(schema)):
        parameters = {"max_new_tokens": 60, "grammar": {"type": "json", "value": value}}
        answer = server.post("/generate", {"inputs": PROMPT, "parameters": parameters}).json()["generated_text"]
        parsed = json.loads(answer)
        assert parsed["kind"] in ("cat", "dog")
        assert 1 <= parsed["age"] <= 9
    for bad in ({"type": "regex", "value": "["}, {"type": "json", "value": "{"}, {"type": "xml", "value": ""}):
        response = server.post("/generate", {"inputs": "a", "parameters": {"grammar": bad}})
        assert (response.status_code, response.json()["error_type"]) == (422, "validation")


def test_info_models_health_and_docs(server, served_model_dir):
    info = server.get("/info").json()
    assert info["model_id"] == str(served_model_dir)
    assert (info["max_total_tokens"], info["max_input_tokens"]) == (512, 511)
    assert (info["max_best_of"], info["max_stop_sequences"], info["max_client_batch_size"]) == (2, 4, 4)
    assert info["max_concurrent_requests"] == 128
    (model,) = server.get("/v1/models").json()["data"]
    assert (model["id"], model["object"]) == (str(served_model_dir), "model")
    for path in ("/", "/health", "/ping"):
        assert server.get(path).status_code == 200
    description = server.get("/api-doc/openapi.json").json()
    assert {"/generate", "/v1/chat/completions", "/brownout"} <= set(description["paths"])
    assert "/generate_stream" in server.get("/docs").text


def test_metrics_have_tgis_names_and_count(server):
    before = server.metric("tgi_request_success")
    failed = server.metric("tgi_request_count")
    server.post("/generate", {"inputs": PROMPT, "parameters": {"max_new_tokens": 3}})
    server.post("/generate", {"inputs": PROMPT, "parameters": {"top_k": 0}})
    assert server.metric("tgi_request_success") == before + 1
    assert server.metric("tgi_request_count") == failed + 2
    text = server.get("/metrics").text
    for name in (
        "duration", "validation_duration", "queue_duration", "inference_duration", "mean_time_per_token_duration",
        "generated_tokens", "input_length", "max_new_tokens", "skipped_tokens",
    ):  # fmt: skip
        assert f"tgi_request_{name}_bucket" in text
    assert 'tgi_request_failure{err="validation"}' in text
    for name in ("queue_size", "batch_current_size", "batch_current_max_tokens", "batch_max_total_tokens"):
        server.metric(f"tgi_{name}")
    assert 'tgi_batch_inference_count{method="prefill"}' in text
    assert 'tgi_batch_forward_duration_bucket{le="0.01",method="decode"}' in text
    assert server.metric("moe_opt_united_ways") == 2


def test_the_clients_request_id_comes_back_and_is_logged(server):
    response = server.post(
        "/generate", {"inputs": "a", "parameters": {"max_new_tokens": 1}}, headers={"X-Request-Id": "mine-1"}
    )
    assert response.headers["X-Request-Id"] == "mine-1"
    end = time.monotonic() + 5  # the log comes through a pipe
    while not any("request_id=mine-1" in line and "status=200" in line for line in server.log):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert len(server.get("/info").headers["X-Request-Id"]) == 32


def test_invocations_takes_all_three_dialects(server):
    compat = server.post("/invocations", {"inputs": PROMPT, "parameters": {"max_new_tokens": 2}}).json()
    assert isinstance(compat["generated_text"], str)
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    assert server.post("/invocations", chat).json()["object"] == "chat.completion"
    assert server.post("/invocations", {"prompt": "hi", "max_tokens": 2}).json()["object"] == "text_completion"
    assert events(server.post("/invocations", {"inputs": PROMPT, "stream": True, "parameters": {"max_new_tokens": 2}}))
    assert server.post("/invocations", {"text": "hi"}).status_code == 422


def test_vertex_answers_every_instance(server):
    instance = {"inputs": PROMPT, "parameters": {"max_new_tokens": 2}}
    predictions = server.post("/vertex", {"instances": [instance, instance]}).json()["predictions"]
    assert predictions[0] == predictions[1]
    assert server.post("/vertex", {"instances": [instance] * 5}).status_code == 422
