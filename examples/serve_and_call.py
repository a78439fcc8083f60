"""Start a server on the demo model and call it as people do: plain HTTP, huggingface_hub, a stream, brownout.

python examples/serve_and_call.py
python examples/serve_and_call.py --model path/to/an/moe/model
"""

import argparse
import json
import os
import urllib.request
from pathlib import Path

os.environ.pop("HF_HUB_OFFLINE", None)  # the client of huggingface_hub would refuse this machine's address too

from huggingface_hub import InferenceClient

from moe_opt.serving.local_server import LocalServer

ROOT = Path(__file__).resolve().parent.parent


def post(url: str, body: dict) -> tuple[dict, dict]:
    """(answer, headers) of a JSON request."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response), dict(response.headers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "examples" / "demo_model"))
    args = parser.parse_args()
    flags = ["--model-id", args.model, "--max-total-tokens", "256"]
    united = Path(args.model) / "united"
    if united.is_dir():
        flags += ["--united-experts", str(united), "--ways", "4"]

    with LocalServer(*flags) as server:
        prompt = "The contract says that"
        parameters = {"max_new_tokens": 16, "details": True}

        answer, headers = post(f"{server.url}/generate", {"inputs": prompt, "parameters": parameters})
        print("exact    ", repr(answer["generated_text"]))
        print("          x-moe-opt-brownout:", headers["x-moe-opt-brownout"])

        client = InferenceClient(server.url)
        print("stream   ", "|".join(client.text_generation(prompt, max_new_tokens=16, stream=True)))
        chat = client.chat_completion(
            [{"role": "user", "content": "What is a contract?"}], max_tokens=16, temperature=0
        )
        print("chat     ", repr(chat.choices[0].message.content))

        # Hold the thresholds low by hand; with --slo-tpot the server does so itself when it runs late.
        strategy = {} if united.is_dir() else {"strategy": "reroute"}
        status, _ = post(f"{server.url}/brownout", {"threshold": 0.2, **strategy})
        print(
            "brownout ",
            {phase: status[phase]["threshold"] for phase in ("prefill", "decode")},
            status["united_experts"],
        )
        answer, headers = post(f"{server.url}/generate", {"inputs": prompt, "parameters": parameters})
        print("browned  ", repr(answer["generated_text"]))
        print("          x-moe-opt-brownout:", headers["x-moe-opt-brownout"])
        answer, headers = post(
            f"{server.url}/generate", {"inputs": prompt, "parameters": {**parameters, "exact": True}}
        )
        print("exact    ", repr(answer["generated_text"]))
        print("          x-moe-opt-brownout:", headers["x-moe-opt-brownout"])


if __name__ == "__main__":
    main()
