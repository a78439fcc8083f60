"""The same model on Transformers' experts kernels and on ours: equal outputs, another speed."""

import statistics
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer

from moe_opt import MoEOptimizedForCausalLM

MODEL = Path(__file__).parent / "demo_model"
PROMPT = "def is_prime(n: int) -> bool:\n"


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    prompt = tokenizer([PROMPT] * 4, return_tensors="pt")
    outputs, times = [], []
    for kernels in ("grouped_mm", "fused"):  # fused: compiled on first use; without a C++ compiler torch's run
        model = MoEOptimizedForCausalLM.from_pretrained(MODEL, dtype="float32", moe_opt={"kernels": kernels}).eval()
        with torch.inference_mode():
            outputs.append(model(**prompt).logits)  # and warms up
            found = []
            for _ in range(9):
                started = time.perf_counter()
                model(**prompt)
                found.append(time.perf_counter() - started)
        times.append(statistics.median(found))
        text = tokenizer.decode(
            model.generate(**prompt, max_new_tokens=12, do_sample=False)[0], skip_special_tokens=True
        )
        print(f"{kernels:>10}: {1e3 * times[-1]:5.1f} ms a forward pass of 4 prompts; {text[len(PROMPT) :]!r}")
    print(f"logits differ by {(outputs[0] - outputs[1]).abs().max():.1e}; {times[0] / times[1]:.1f}x as fast")


if __name__ == "__main__":
    main()
