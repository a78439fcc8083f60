"""Fuzzing from the OpenAPI files, TGI's and our own: no 5xx, no hang, JSON errors, and nothing left behind.

A sample runs with every test run; the whole is `soak`. Lengths are kept short by the server's small context.
"""

import json
import os
import time
from pathlib import Path

import pytest

schemathesis = pytest.importorskip("schemathesis")
from hypothesis import HealthCheck, Phase, given, seed, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

TIMEOUT = 60.0


@pytest.fixture(scope="module")
def tgi_description() -> dict:
    path = Path(os.environ.get("MOE_OPT_DATA", "../shared/data")).parent / "reference" / "tgi-openapi.json"
    if not path.is_file():
        pytest.skip(f"no {path}")
    return as_openapi_31(json.loads(path.read_text())) | {"openapi": "3.1.0"}


def as_openapi_31(node):
    """TGI's file calls itself 3.0 and writes `exclusiveMinimum` as 3.1 does, so no generator takes it as it is."""
    if isinstance(node, list):
        return [as_openapi_31(item) for item in node]
    if not isinstance(node, dict):
        return node
    out = {key: as_openapi_31(value) for key, value in node.items() if key not in ("nullable", "default", "example")}
    if node.get("nullable") is True and "type" in out:
        out["type"] = [out["type"], "null"]
    elif node.get("nullable") is True and "allOf" in out:
        out["anyOf"] = [*out.pop("allOf"), {"type": "null"}]
    return out


def fuzz(server, description: dict, seconds: float, examples: int, rounds: int = 10**9) -> int:
    """Calls every operation with valid and invalid data, for some rounds or until the time is up. Returns the number
    of calls."""
    schema = schemathesis.openapi.from_dict(description)
    operations = [operation.ok() for operation in schema.get_all_operations()]
    calls = 0
    deadline = time.monotonic() + seconds
    round_number = 0
    while time.monotonic() < deadline and round_number < rounds:
        for operation in operations:
            for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
                if time.monotonic() > deadline:
                    return calls
                if mode == schemathesis.GenerationMode.NEGATIVE and not operation.body and not operation.query:
                    continue

                @seed(round_number)
                @given(case=operation.as_strategy(generation_mode=mode))
                @settings(
                    max_examples=examples, database=None, deadline=None, phases=[Phase.generate],
                    suppress_health_check=list(HealthCheck),
                )  # fmt: skip
                def call(case) -> None:
                    nonlocal calls
                    if time.monotonic() > deadline:
                        return
                    shorten(case)
                    response = case.call(base_url=server.url, timeout=TIMEOUT)
                    calls += 1
                    assert response.status_code < 500, (case, response.status_code, response.text[:300])
                    if response.status_code >= 400:
                        assert set(response.json()) == {"error", "error_type"}, response.text[:300]

                call()
        round_number += 1
    return calls


def shorten(case) -> None:
    """A body that would generate to the end of the context says little that a short one does not."""
    body = case.body
    if not isinstance(body, dict):
        return
    if "inputs" in body and "parameters" not in body:
        body["parameters"] = {}
    for holder, key in ((body.get("parameters"), "max_new_tokens"), (body, "max_tokens")):
        if not isinstance(holder, dict) or (holder is body and not {"messages", "prompt"} & set(body)):
            continue
        value = holder.get(key)
        if value is None or (isinstance(value, int) and 4 < value <= 512):  # larger ones are refused anyway
            holder[key] = 4


def test_a_sample_from_tgis_description(server, tgi_description):
    assert fuzz(server, tgi_description, seconds=60, examples=6, rounds=1) > 20
    server.wait_until_idle()


def test_a_sample_from_our_own_description(server):
    description = server.get("/api-doc/openapi.json").json()
    assert fuzz(server, description, seconds=60, examples=4, rounds=1) > 10
    server.post("/brownout", {"threshold": 1.0, "ways": 2})  # the fuzz may have left others
    server.wait_until_idle()


@settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.binary(max_size=200), path=st.sampled_from(["/", "/generate", "/v1/chat/completions", "/brownout"]))
def test_bytes_that_are_no_json(server, data, path):
    import requests

    response = requests.post(
        server.url + path, data=data, headers={"Content-Type": "application/json"}, timeout=TIMEOUT
    )
    assert 400 <= response.status_code < 500
    assert set(response.json()) == {"error", "error_type"}


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_every_route_from_both_descriptions(server, tgi_description):
    assert fuzz(server, tgi_description, seconds=420, examples=60) > 500
    own = server.get("/api-doc/openapi.json").json()
    assert fuzz(server, own, seconds=180, examples=40) > 200
    server.post("/brownout", {"threshold": 1.0, "ways": 2})
    server.wait_until_idle()
