"""A real fleet in processes of its own, as `moe-opt launch` starts it, and what a single model says."""

import contextlib
import functools
import json
import os
import re
import sys
import time

import requests
from servers import running_process

DEMO = "examples/demo_model"


class RunningFleet:
    """`moe-opt launch` on a free port."""

    def __init__(self, process, url, log):
        self.process, self.url, self.log = process, url, log

    def post(self, path, json, **kwargs):
        return requests.post(self.url + path, json=json, timeout=120, **kwargs)

    def get(self, path, **kwargs):
        return requests.get(self.url + path, timeout=60, **kwargs)

    def state(self):
        return self.get("/router/state").json()

    def worker(self, worker_id):
        return next(worker for worker in self.state()["workers"] if worker["id"] == worker_id)

    def wait(self, condition, seconds=60.0):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if condition():
                return
            time.sleep(0.1)
        raise AssertionError("it did not happen:\n" + "\n".join(self.log[-20:]) + json.dumps(self.state(), indent=1))

    def wait_until_idle(self):
        """The router holds nothing, and no worker a page or KV to be fetched."""

        def idle():
            state = self.state()
            if state["in_flight"] or any(w["running"] or w["prefills"] for w in state["workers"]):
                return False
            if not all(worker["up"] for worker in state["workers"]):
                return False
            for worker in state["workers"]:
                text = requests.get(worker["url"] + "/metrics", timeout=10).text
                held = re.findall(
                    r'^(?:moe_opt_kv_pages\{state="used"\}|tgi_queue_size|moe_opt_kv_transfer_bytes) (\S+)', text, re.M
                )
                if any(float(value) for value in held):
                    return False
            return True

        self.wait(idle, 120)


@contextlib.contextmanager
def running_fleet(*flags, prefill=1, decode=2, program=("-m", "moe_opt.cli", "launch", "--model-id", DEMO)):
    command = [sys.executable, *program, "--prefill", str(prefill), "--decode", str(decode), *flags]
    command += ["--hostname", "127.0.0.1", "--port", "0", "--dtype", "float32", "--poll", "0.2"]
    announced = "moe_opt.router: serving on"
    with running_process(command, announced, {**os.environ}, start=180, stop=60) as found:
        fleet = RunningFleet(*found)
        fleet.wait(lambda: fleet.get("/health").status_code == 200)
        yield fleet


@functools.cache
def reference_model():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(DEMO, dtype="float32").eval(), AutoTokenizer.from_pretrained(DEMO)


@functools.cache
def generated(prompt, count):
    """(token ids, text) that `generate` gives, greedily."""
    import torch

    model, tokenizer = reference_model()
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.inference_mode():
        out = model.generate(ids, max_new_tokens=count, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    return tuple(out.tolist()), tokenizer.decode(out, skip_special_tokens=True)


def stream_ids(response):
    """(token ids, index of each, last event) of a TGI stream."""
    ids, indices, last = [], [], None
    for line in response.iter_lines():
        if line.startswith(b"data:"):
            last = json.loads(line[5:])
            if "token" in last:
                ids.append(last["token"]["id"])
                indices.append(last["index"])
    return ids, indices, last
