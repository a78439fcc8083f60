"""Cancellation, overload, shutdown, and what a wrong start says."""

import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from servers import running_server

PROMPT = "Once upon a time"


def long_body(tokens=400):
    return {"inputs": PROMPT, "parameters": {"max_new_tokens": tokens, "ignore_eos": True, "details": True}}


def test_a_client_that_leaves_cancels_its_request(server):
    server.wait_until_idle()
    cancelled = server.metric("moe_opt_cancelled_requests_total")
    for path in ("/generate", "/generate_stream"):
        response = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
        body = json.dumps(long_body())
        response.request("POST", path, body, {"Content-Type": "application/json"})
        if path == "/generate_stream":
            response.getresponse().fp.readline()
        else:
            while server.metric("tgi_batch_current_size") == 0:
                time.sleep(0.01)
        response.close()
    server.wait_until_idle()
    assert server.metric("moe_opt_cancelled_requests_total") == cancelled + 2


def test_half_a_body_holds_nothing(server):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as sock:
        head = ["POST /generate HTTP/1.1", f"Host: {host}", "Content-Type: application/json", "Content-Length: 999"]
        sock.sendall("\r\n".join([*head, "", "{"]).encode())
        assert server.get("/health").status_code == 200
    server.wait_until_idle()


@pytest.fixture
def collector():
    """An OpenTelemetry collector on a free port: (address, spans received)."""
    grpc = pytest.importorskip("grpc")
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc.trace_exporter")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

    spans = []

    class Collector(service.TraceServiceServicer):
        def Export(self, request, context):
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    spans.extend(scope.spans)
            return ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    service.add_TraceServiceServicer_to_server(Collector(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"http://127.0.0.1:{port}", spans
    server.stop(None)


def test_overload_slow_bodies_traces_and_shutdown(served_model_dir, collector):
    """One server with tight bounds. SIGTERM lets the running request finish, refuses new ones and exits 0."""
    endpoint, spans = collector
    flags = ["--model-id", str(served_model_dir), "--max-total-tokens", "2000", "--max-concurrent-requests", "2"]
    flags += ["--body-timeout", "1", "--json-output", "--max-batch-size", "4", "--otlp-endpoint", endpoint]
    with running_server(*flags) as server:
        answers = []

        def run() -> None:
            answers.append(requests.post(server.url + "/generate", json=long_body(1500), timeout=120))

        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        while server.metric("tgi_batch_current_size") < 2:
            time.sleep(0.01)
        trace = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
        overloaded = server.post("/generate", long_body(1), headers=trace)
        assert overloaded.status_code == 429
        assert overloaded.json() == {"error": "Model is overloaded", "error_type": "overloaded"}
        streamed = server.post("/generate_stream", long_body(1))
        assert streamed.status_code == 200
        assert '"error_type":"overloaded"' in streamed.text
        host, port = server.url.removeprefix("http://").split(":")
        slow = http.client.HTTPConnection(host, int(port), timeout=30)
        slow.putrequest("POST", "/generate")
        slow.putheader("Content-Type", "application/json")
        slow.putheader("Content-Length", "50")
        slow.endheaders()
        assert slow.getresponse().status == 408

        kept = http.client.HTTPConnection(host, int(port), timeout=30)  # an open connection still reaches the server
        kept.request("GET", "/health")
        kept.getresponse().read()
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        kept.request("POST", "/generate", json.dumps(long_body(1)), {"Content-Type": "application/json"})
        refused = kept.getresponse()
        assert (refused.status, json.loads(refused.read())["error_type"]) == (503, "healthcheck")
        for thread in threads:
            thread.join()
        assert [answer.status_code for answer in answers] == [200, 200]
        assert all(answer.json()["details"]["generated_tokens"] == 1500 for answer in answers)
        assert server.process.wait(30) == 0
        entries = [json.loads(line) for line in server.log if line.startswith("{")]
        assert any(entry.get("status") == 429 and entry["level"] == "INFO" for entry in entries)
    # What was traced arrives at the latest when the server ends; the caller's trace goes on in ours.
    generated = [span for span in spans if span.name == "POST /generate"]
    assert len(generated) >= 4
    assert any(span.trace_id.hex() == "0af7651916cd43dd8448eb211c80319c" for span in generated)
    statuses = {a.value.int_value for span in generated for a in span.attributes if a.key.endswith("status_code")}
    assert {200, 429, 408, 503} <= statuses


def test_a_request_that_takes_too_long_is_answered_and_cancelled(served_model_dir):
    flags = ["--model-id", str(served_model_dir), "--request-timeout", "0.05"]
    with running_server(*flags) as server:
        answer = server.post("/generate", long_body(1000))
        assert (answer.status_code, answer.json()["error_type"]) == (424, "generation")
        assert '"error_type":"generation"' in server.post("/generate_stream", long_body(1000)).text
        server.wait_until_idle()


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ([], "MODEL_ID"),
        (["--model-id", "/nowhere"], "/nowhere"),
        (["--model-id", "MODEL", "--num-shard", "2"], "num-shard"),
        (["--model-id", "MODEL", "--quantize", "awq"], "quantize"),
        (["--model-id", "MODEL", "--port", "many"], "--port"),
        (["--model-id", "MODEL", "--slo-tpot", "-1"], "slo"),
        (["--model-id", "MODEL", "--dtype", "int3"], "--dtype"),
        (["--model-id", "MODEL", "--united-experts", "/nowhere"], "/nowhere"),
    ],
)
def test_a_wrong_start_is_one_line_and_exit_code_2(served_model_dir, flags, word):
    flags = [str(served_model_dir) if flag == "MODEL" else flag for flag in flags]
    result = subprocess.run(
        [sys.executable, "-m", "moe_opt.serving.serve_command", *flags], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 2
    lines = [line for line in result.stderr.splitlines() if line.startswith("text-generation-launcher: ")]
    assert len(lines) == 1
    assert word in lines[0]
    assert "Traceback" not in result.stderr


def test_a_port_in_use_is_said_before_the_model_loads(served_model_dir):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "moe_opt.serving.serve_command", str(served_model_dir)]
        result = subprocess.run(
            [*command, "--hostname", "127.0.0.1", "--port", port], capture_output=True, text=True, timeout=60
        )
    assert result.returncode == 2
    assert "choose another --port" in result.stderr
    assert "loading" not in result.stderr
