"""Several requests through the engine at once: greedy, sampled, constrained to a JSON schema, cancelled on
the way.

python examples/engine_generate.py                       # the demo model
python examples/engine_generate.py path/to/a/moe/model
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import AutoTokenizer

from moe_opt import MoEOptimizedForCausalLM
from moe_opt.serving.engine.async_engine import AsyncEngine
from moe_opt.serving.engine.config import EngineConfig
from moe_opt.serving.engine.types import FinishEvent, GenerationRequest, Grammar, SamplingParams, TokenEvent

DEMO = Path(__file__).resolve().parent / "demo_model"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


async def main(path: str) -> None:
    torch.set_num_threads(2)
    model = MoEOptimizedForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    engine = AsyncEngine(model, tokenizer, EngineConfig(max_batch_size=8, kv_pages=512))
    await engine.start()

    async def show(name: str, prompt: str, params: SamplingParams, leave_after: int | None = None) -> None:
        request = GenerationRequest(name, tuple(tokenizer(prompt)["input_ids"]), params, expert_counts=True)
        stream = engine.submit(request)
        seen = 0
        async for event in stream:
            if isinstance(event, TokenEvent):
                seen += 1
                if seen == leave_after:
                    await stream.aclose()  # the client went away: the request stops, its pages are free again
                    print(f"{name}: left after {seen} tokens")
            elif isinstance(event, FinishEvent):
                busiest = event.expert_counts.argmax(1).tolist() if event.expert_counts is not None else []
                print(f"{name}: {event.generated_text!r}")
                print(
                    f"  {event.finish_reason} after {event.generated_tokens} tokens, {event.cached_tokens} of "
                    f"{event.prompt_tokens} prompt tokens from the cache, busiest expert per layer {busiest}"
                )

    story = "It was a bright morning in spring, and the whole family went down to the village, where the old man"
    try:
        await show("greedy", story, SamplingParams(max_new_tokens=24))
        await asyncio.gather(
            show("same prompt", story, SamplingParams(max_new_tokens=24)),
            show("sampled", story, SamplingParams(do_sample=True, seed=7, top_p=0.9, max_new_tokens=24)),
            show("stopped", story, SamplingParams(max_new_tokens=64, stop=(", and",))),
            show("left", story, SamplingParams(max_new_tokens=200, ignore_eos=True), leave_after=5),
        )
        try:
            grammar = Grammar("json", json.dumps(SCHEMA))
            await show("schema", "A person as JSON:", SamplingParams(grammar=grammar, max_new_tokens=48))
        except ValueError as error:
            print(f"schema: {error}")
        stats = engine.stats()
        print(
            f"pages: {stats.free_pages} free + {stats.used_pages} used + {stats.cached_pages} cached = "
            f"{stats.total_pages}; {stats.finished} finished, {stats.cancelled} cancelled"
        )
    finally:
        await engine.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else str(DEMO)))
