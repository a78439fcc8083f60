"""A real server in a process of its own, on the demo model, and what the same model says without it."""

import os
from pathlib import Path

import pytest
from servers import running_server


@pytest.fixture(scope="session")
def served_model_dir(request) -> Path:
    """The demo model; another one through MOE_OPT_TEST_MODEL."""
    path = os.environ.get("MOE_OPT_TEST_MODEL")
    return Path(path) if path else request.getfixturevalue("demo_model_dir")


@pytest.fixture(scope="session")
def reference(served_model_dir):
    """(model, tokenizer) in float32 through plain Transformers: what the server must agree with."""
    import torch
    import transformers

    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(served_model_dir, dtype=torch.float32).eval()
    return model, transformers.AutoTokenizer.from_pretrained(served_model_dir)


@pytest.fixture(scope="session")
def greedy(reference):
    """Prompt and number of tokens -> the ids that greedy `generate` adds, end-of-sequence ignored."""
    import torch

    model, tokenizer = reference

    def generate(prompt: str, tokens: int, special: bool = True) -> list[int]:
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=special).input_ids
        with torch.no_grad():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens,
                eos_token_id=None,
            )  # fmt: skip
        return out[0, ids.shape[1] :].tolist()

    return generate


@pytest.fixture(scope="session")
def united_dir(reference, served_model_dir, tmp_path_factory) -> Path:
    """Averaged united experts of 2 and of 4 ways, in folders as `moe-opt distill` leaves them."""
    from moe_opt import MoEOptimizedForCausalLM, UnitedExperts

    folder = tmp_path_factory.mktemp("united")
    model = MoEOptimizedForCausalLM.from_pretrained(served_model_dir, moe_opt=True)
    for ways in (2, 4):
        UnitedExperts.from_average(model, ways=ways).save_pretrained(folder / f"ways-{ways}", card=False)
    return folder


@pytest.fixture(scope="session")
def server(served_model_dir, united_dir):
    """One server for most tests: float32, united experts at hand, no objective, so exact output."""
    flags = ["--model-id", str(served_model_dir), "--dtype", "float32", "--max-total-tokens", "512"]
    flags += ["--united-experts", str(united_dir), "--ways", "2", "--payload-limit", "200000"]
    with running_server(*flags) as running:
        yield running
