"""The router's parts on literal bytes: event scanning, calls, translation, metrics, settings."""

import base64
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_opt.cluster.state import Worker
from moe_opt.errors import ConfigError
from moe_opt.serving.api.errors import ApiError
from moe_opt.serving.api.hand_off import encode_counts
from moe_opt.serving.router.calls import (
    decode_upstream,
    generated_in,
    parse_call,
    prefill_upstream,
    whole_upstream,
)
from moe_opt.serving.router.client import EventScanner, lost_in
from moe_opt.serving.router.config import RouterSettings, WorkerSpec
from moe_opt.serving.router.dispatch import text_blocks
from moe_opt.serving.router.fleet import WorkerHandle, read_metrics
from moe_opt.serving.router.signatures import decode_counts, routed_experts
from moe_opt.serving.router.translate import ChatChunks, TgiEvents, completion_of


def handle(kind="moe_opt", **gauges):
    spec = WorkerSpec("http://127.0.0.1:1", "decode")
    return WorkerHandle(spec, Worker(spec.name, 4), kind=kind, model="served", gauges=gauges)


def call(path, **body):
    return parse_call(path, json.dumps(body).encode())


EVENT = b'data: {"index":%d,"token":{"id":%d,"text":"t","special":false},"generated_text":null,"details":null}\n\n'
LAST = b'data: {"index":9,"token":{"id":9,"text":"t","special":false},"generated_text":"all","details":null}\n\n'


@given(st.lists(st.integers(1, 60), max_size=30), st.integers(1, 12))
def test_events_come_whole_and_complete_however_the_bytes_are_cut(cuts, count):
    stream = b"".join(EVENT % (i + 1, i) for i in range(count)) + b":\n\n" + LAST
    scanner = EventScanner(call("/generate_stream", inputs="a"))
    out, at = b"", 0
    for size in [*cuts, len(stream)]:
        piece = scanner.feed(stream[at : at + size])
        assert piece == b"" or piece.endswith(b"\n\n")
        assert scanner.over == (b'"generated_text":"all"' in out + piece)
        out, at = out + piece, at + size
    assert out == stream
    assert scanner.tokens == count + 1
    assert scanner.over


def test_text_that_looks_like_the_end_is_not_the_end():
    scanner = EventScanner(call("/generate_stream", inputs="a"))
    said = json.dumps({"token": {"text": '"generated_text":"x" data: [DONE] "error_type"'}, "generated_text": None})
    scanner.feed(b"data: " + said.encode() + b"\n\n")
    assert not scanner.over


def test_what_a_client_has_is_read_back_from_its_events():
    tgi = call("/generate_stream", inputs="a")
    assert generated_in(tgi, EVENT % (1, 7) + b":\n\n" + EVENT % (2, 8)) == ([7, 8], "tt")
    chunk = b'data: {"choices":[{"index":0,"text":"ab","token_ids":[3,4]}]}\n\ndata: [DONE]\n\n'
    assert generated_in(call("/v1/completions", prompt="a"), chunk) == ([3, 4], "ab")
    with pytest.raises(ApiError, match="worker was lost"):
        generated_in(call("/v1/completions", prompt="a"), b'data: {"choices":[{"index":0,"text":"ab"}]}\n\n')


def test_where_a_worker_gives_up_is_found():
    good = EVENT % (1, 7)
    bad = b'data: {"error":"the server is shutting down","error_type":"healthcheck"}\n\n'
    assert lost_in(good) == -1
    assert lost_in(good + bad) == len(good)
    recomputed = b'data: {"choices":[{"text":"","finish_reason":"stop","stop_reason":"recomputed"}]}\n\n'
    assert lost_in(recomputed) == 0


@pytest.mark.parametrize(
    ("path", "body", "splits", "stream"),
    [
        ("/generate", {"inputs": "a"}, True, False),
        ("/generate", {"inputs": "a", "stream": True}, True, False),  # this route never streams
        ("/generate_stream", {"inputs": "a"}, True, True),
        ("/", {"inputs": "a", "stream": True}, True, True),
        ("/generate", {"inputs": "a", "parameters": {"best_of": 2}}, False, False),
        ("/generate", {"inputs": "a", "parameters": {"decoder_input_details": True}}, False, False),
        ("/v1/completions", {"prompt": "a"}, True, False),
        ("/v1/completions", {"prompt": [1, 2]}, True, False),
        ("/v1/completions", {"prompt": ["a"]}, True, False),
        ("/v1/completions", {"prompt": ["a", "b"]}, False, False),
        ("/v1/completions", {"prompt": "a", "n": 2}, False, False),
        ("/v1/chat/completions", {"messages": []}, True, False),
        ("/v1/chat/completions", {"messages": [], "tools": [{}]}, False, False),
        ("/tokenize", {"inputs": "a"}, False, False),
    ],
)
def test_which_requests_are_split(path, body, splits, stream):
    found = call(path, **body)
    assert (found.splits, found.stream) == (splits, stream)


def test_a_clients_own_tickets_are_dropped():
    """They name an address that a worker would fetch from."""
    body = {"prompt": ["a", "b"], "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "10.0.0.1"}}
    found = call("/v1/completions", **body)
    assert json.loads(found.raw) == found.body == {"prompt": ["a", "b"]}
    assert call("/v1/completions", prompt="a", kv_transfer_params={"do_remote_decode": True}).splits


@given(st.binary(max_size=60))
def test_any_bytes_are_a_call(raw):
    assert parse_call("/generate", raw).raw == raw


def test_the_payload_contract():
    """BalanceRoute D.2: the probe and the re-attachment."""
    asked = call("/v1/chat/completions", messages=[], stream=True, stream_options={"include_usage": True},
                 max_tokens=9, max_completion_tokens=9, min_tokens=2)  # fmt: skip
    probe = prefill_upstream(asked, handle("vllm")).body
    assert (probe["stream"], probe["max_tokens"], probe["max_completion_tokens"]) == (False, 1, 1)
    assert not {"stream_options", "min_tokens"} & probe.keys()
    assert probe["kv_transfer_params"]["do_remote_decode"] is True
    assert probe["model"] == "served"
    ticket = {"do_remote_prefill": True, "remote_block_ids": [1]}
    decode = decode_upstream(asked, handle("vllm"), ticket, [1, 2])
    assert decode.path == "/v1/chat/completions"
    assert decode.body["kv_transfer_params"] == ticket
    assert (decode.body["stream"], decode.body["max_tokens"]) == (True, 9)
    again = decode_upstream(asked, handle("vllm"), None, [1, 2], [3, 4])
    assert again.path == "/v1/completions"
    assert (again.body["prompt"], again.body["max_tokens"]) == ([1, 2, 3, 4], 7)
    ours = decode_upstream(asked, handle(), ticket, [1, 2], [3, 4]).body
    assert ours["kv_transfer_params"] == {**ticket, "generated_token_ids": [3, 4]}
    assert ours["messages"] == []


def test_tgi_on_vllm_stream_and_whole():
    body = {"inputs": "Hi", "parameters": {"details": True, "return_full_text": True, "max_new_tokens": 3}}
    translator = TgiEvents(body)
    chunks = (
        b'data: {"choices":[{"text":" a","token_ids":[5],"logprobs":{"token_logprobs":[-0.5]},'
        b'"finish_reason":null}]}\n\n'
        b'data: {"choices":[{"text":" bc","token_ids":[6,7],"logprobs":{"token_logprobs":[-1,-2]},'
        b'"finish_reason":"length"}]}\n\ndata: {"choices":[],"usage":{}}\n\ndata: [DONE]\n\n'
    )
    events = [json.loads(part[6:]) for part in translator.events(chunks).split(b"\n\n") if part]
    assert [event["token"]["id"] for event in events] == [5, 6, 7]
    assert [event["index"] for event in events] == [1, 2, 3]
    assert events[-1]["generated_text"] == "Hi a bc"
    assert events[-1]["details"]["finish_reason"] == "length"
    whole = TgiEvents(body, as_list=True).answer(
        json.dumps(
            {"choices": [{"text": " a", "token_ids": [5], "finish_reason": "stop", "stop_reason": None,
                          "logprobs": {"tokens": [" a"], "token_logprobs": [-0.5]}}],
             "usage": {"completion_tokens": 1, "prompt_tokens": 2}}
        ).encode()
    )  # fmt: skip
    answer = json.loads(whole)[0]
    assert answer["generated_text"] == "Hi a"
    assert answer["details"]["finish_reason"] == "eos_token"
    assert answer["details"]["tokens"][0]["id"] == 5
    error = TgiEvents(body).events(b'data: {"error": {"message": "no", "type": "BadRequest"}}\n\n')
    assert json.loads(error[6:]) == {"error": "no", "error_type": "BadRequest"}


def test_tgi_parameters_on_vllm():
    body = {"inputs": "a", "parameters": {"max_new_tokens": 3, "stop": ["x"], "repetition_penalty": 1.1}}
    found = completion_of(body)
    assert found["temperature"] == 0
    assert (found["max_tokens"], found["stop"], found["include_stop_str_in_output"]) == (3, ["x"], True)
    assert "temperature" not in completion_of({"inputs": "a", "parameters": {"do_sample": True}})
    for wrong in ({"typical_p": 0.5}, {"watermark": True}, {"grammar": {"type": "json"}}, {"best_of": 2}):
        with pytest.raises(ApiError, match="not supported by this fleet's vLLM workers"):
            completion_of({"inputs": "a", "parameters": wrong})
    with pytest.raises(ApiError, match="needs a moe_opt worker"):
        whole_upstream(parse_call("/tokenize", b"{}"), handle("vllm"))


def test_chat_goes_on_as_chat():
    out = ChatChunks().events(b'data: {"object":"text_completion","choices":[{"text":"ab"}]}\n\ndata: [DONE]\n\n')
    assert json.loads(out.split(b"\n\n")[0][6:])["choices"][0]["delta"] == {"content": "ab"}
    assert out.endswith(b"data: [DONE]\n\n")


def test_metrics_of_both_kinds_and_of_neither():
    ours = (
        'moe_opt_kv_pages{state="free"} 5.0\nmoe_opt_kv_pages{state="used"} 3.0\nmoe_opt_kv_pages{state="cached"} 2.0\n'
        'moe_opt_active_experts{phase="decode"} 7.5\nmoe_opt_time_per_output_token_seconds_sum 2.0\n'
        "moe_opt_time_per_output_token_seconds_count 100.0\n"
    )
    found = read_metrics(ours)
    assert (found["kv_usage"], found["active_experts"], found["tpot"]) == (0.3, 7.5, 0.02)
    vllm = 'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25\nvllm:num_requests_running{engine="0"} 2.0\n'
    assert read_metrics(vllm)["kv_usage"] == 0.25
    assert read_metrics("# nothing\n")["kv_usage"] == 1.0  # a worker that says nothing counts as full


@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 70000), st.integers(0, 2**31))
def test_counts_travel(layers, experts, highest, seed):
    counts = np.random.default_rng(seed).integers(0, highest + 1, (layers, experts))
    np.testing.assert_array_equal(decode_counts(json.loads(json.dumps(encode_counts(counts)))), counts)


@pytest.mark.parametrize(
    "body", [{}, {"shape": [2], "dtype": "uint8", "data": "!"}, {"shape": [9, 9], "dtype": "uint8", "data": "AAAA"},
             {"shape": [1, 3], "dtype": "object", "data": "AAAA"}],
)  # fmt: skip
def test_counts_that_are_none_are_refused(body):
    with pytest.raises(ConfigError, match="cannot be read"):
        decode_counts(body)


def test_routed_experts_of_vllm_and_sglang():
    import io

    experts = np.arange(24).reshape(3, 4, 2)
    buffer = io.BytesIO()
    np.save(buffer, experts)
    encoded = base64.b64encode(buffer.getvalue()).decode()
    np.testing.assert_array_equal(routed_experts({"choices": [{"routed_experts": encoded}]}), experts)
    np.testing.assert_array_equal(routed_experts({"prompt_routed_experts": experts.tolist()}), experts)
    raw = base64.b64encode(experts.astype("<i4").tobytes()).decode()
    meta = {"meta_info": {"routed_experts": raw, "num_layers": 4, "top_k": 2}}
    np.testing.assert_array_equal(routed_experts(meta), experts)
    assert routed_experts({"choices": [{}]}) is None
    with pytest.raises(ConfigError, match="cannot be read"):
        routed_experts({"choices": [{"routed_experts": "AAAA"}]})


@given(st.text(max_size=400), st.text(max_size=50), st.text(max_size=50))
def test_prompts_that_share_a_prefix_share_its_blocks(stem, one, other):
    first, _ = text_blocks(stem + one)
    second, _ = text_blocks(stem + other)
    shared = len(stem.encode("utf-8", "replace")) // 64
    assert first[:shared] == second[:shared]
    assert len(set(first)) == len(first)


@pytest.mark.parametrize("text", ["127.0.0.1:3000", "https://a", "http://", "a b=http://x:1", "http://x:1@b"])
def test_workers_that_are_none(text):
    with pytest.raises(ConfigError):
        WorkerSpec.parse(text, "decode")


def test_workers_by_name_and_rank():
    spec = WorkerSpec.parse("d0=http://h:1/@3", "decode")
    assert (spec.name, spec.url, spec.rank) == ("d0", "http://h:1", 3)
    assert WorkerSpec.parse("http://h:1@3", "decode").name == "h:1@3"


@pytest.mark.parametrize(
    "wrong", [{"retries": -1}, {"poll": 0}, {"max_running": 0}, {"prefill_utilisation": 2}, {"pool_bypass": True}]
)
def test_settings_out_of_range(wrong):
    with pytest.raises(ConfigError):
        RouterSettings(**wrong)
