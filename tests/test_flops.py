"""FlopsModel against PyTorch's own counter and parameter counts, on tiny models of every family."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_opt.errors import ConfigError, UnsupportedModelError
from moe_opt.flops import FAMILIES, FlopsModel, causal_pairs
from moe_opt.flops_defaults import DEFAULTS

ROOT = Path(__file__).resolve().parent.parent

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
}
CASES = {
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
    },
    "qwen2_moe sliding, dense between": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 3,
        "decoder_sparse_step": 2,
        "qkv_bias": False,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "head_dim": 10,
        "mlp_only_layers": [1],
        "attention_bias": True,
    },
    "qwen3_moe sliding": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "head_dim": 10,
        "use_sliding_window": True,
        "sliding_window": 6,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "mixtral sliding": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7, "head_dim": 6},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 3},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 10},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 10, "sliding_window": 5},
    "deepseek_v2": {**LATENT, "q_lora_rank": None, "n_shared_experts": 2, "topk_method": "greedy"},
    "deepseek_v3": {
        **LATENT,
        "q_lora_rank": 14,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "attention_bias": True,
    },
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "use_qk_norm": True,
        "attention_bias": True,
        "head_dim": 10,
    },
    "gemma4_text": {
        "num_hidden_layers": 4,
        "head_dim": 8,
        "global_head_dim": 12,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 20,
        "hidden_size_per_layer_input": 0,
    },
    "gemma4_text per-layer inputs, shared keys": {
        "num_hidden_layers": 4,
        "head_dim": 8,
        "global_head_dim": 12,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 6,
        "vocab_size_per_layer_input": 97,
    },
}


def tiny_config(case: str):
    """A Transformers config of the case's family."""
    from transformers import AutoConfig

    family = case.split()[0]
    if family == "gemma4_text":
        from transformers import Gemma4TextConfig as Config
    else:
        Config = type(AutoConfig.for_model(family))
    return Config(**{**SMALL, **CASES[case]})


@pytest.fixture(scope="module")
def counted():
    """case -> config, counts of `FlopCounterMode`, parameters; each model is built once."""
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM

    cache = {}

    def count(case: str, suffix: int, cached: int = 0):
        if case not in cache:
            torch.manual_seed(0)
            config = tiny_config(case)
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation="eager", experts_implementation="eager"
            )
            cache[case] = config, model.eval()
        config, model = cache[case]
        with torch.no_grad():
            past = None
            if cached:
                past = model(torch.randint(3, 97, (1, cached)), use_cache=True).past_key_values
            with FlopCounterMode(display=False) as counter:
                # All logits, then all but the last taken off: gemma4 would skip tokens in its last layers otherwise.
                model(torch.randint(3, 97, (1, suffix)), past_key_values=past, use_cache=bool(cached))
        flops = dict(counter.get_flop_counts()["Global"])
        squares = sum(value for op, value in flops.items() if "bmm" in str(op))
        linear = sum(flops.values()) - squares
        skipped_logits = (suffix - 1) * 2 * config.vocab_size * config.hidden_size
        parameters = sum(parameter.numel() for parameter in model.parameters())
        # Which of the two DeepSeek caches this Transformers has: one head of latents, or all heads expanded.
        heads = past.layers[0].keys.shape[1] if cached else 1
        mla_cache = "latent" if heads == 1 else "expanded"
        return config, linear - skipped_logits, squares, parameters, mla_cache

    return count


def keys_held(window: int | None, suffix: int, cached: int) -> int:
    """Keys that eager attention multiplies with: a sliding cache keeps window - 1 of the cached tokens."""
    return suffix + (cached if window is None else min(cached, window - 1))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("suffix", "cached"), [(1, 0), (17, 0), (9, 11)])
def test_matches_the_flop_counter(case, suffix, cached, counted):
    config, linear, squares, _, mla_cache = counted(case, suffix, cached)
    model = FlopsModel.from_config(config, mla_cache=mla_cache)
    parts = model.prefill_parts(suffix, cached)
    attention = parts.pop("attention")
    assert sum(parts.values()) == linear
    # Eager attention computes the full rectangle of queries and keys; ours counts the pairs a causal kernel needs.
    rectangle = useful = 0
    for layer in model.architecture.layers:
        window, macs = layer.attention.window, layer.attention.pair_macs
        rectangle += 2 * macs * suffix * keys_held(window, suffix, cached)
        useful += 2 * macs * causal_pairs(suffix, cached, window)
    assert squares == rectangle
    assert attention == useful
    assert model.prefill(suffix, cached) == linear + useful


@pytest.mark.parametrize("case", CASES)
def test_matches_the_parameters(case, counted):
    config, _, _, parameters, _ = counted(case, 1)
    model = FlopsModel.from_config(config)
    assert model.total_parameters == parameters
    expert = max(layer.expert_params for layer in model.architecture.layers)
    idle = (model.num_experts - model.top_k) * expert
    assert model.active_parameters == parameters - model.num_moe_layers * idle


@pytest.mark.parametrize("case", CASES)
def test_config_object_dict_and_file_agree(case, tmp_path):
    pytest.importorskip("transformers")
    config = tiny_config(case)
    expected = FlopsModel.from_config(config)
    assert FlopsModel.from_config(config.to_dict()) == expected
    published = {"model_type": case.split()[0], **SMALL, **CASES[case]}  # only what a model card's config has
    assert FlopsModel.from_config(published) == expected
    config.save_pretrained(tmp_path)
    assert FlopsModel.from_config(tmp_path) == expected
    assert FlopsModel.from_config(str(tmp_path / "config.json")) == expected


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_defaults_are_those_of_transformers(family):
    pytest.importorskip("transformers")
    if family == "gemma4_text":
        from transformers import Gemma4TextConfig as Config
    else:
        from transformers import AutoConfig

        Config = type(AutoConfig.for_model(family))
    if not dataclasses.is_dataclass(Config):
        pytest.skip("this Transformers keeps the defaults elsewhere")
    defaults = {field.name: field.default for field in dataclasses.fields(Config)}
    assert {name: defaults[name] for name in DEFAULTS[family]} == DEFAULTS[family]


def test_mla_cached_expanded_or_latent():
    config = {"model_type": "deepseek_v2", **SMALL, **CASES["deepseek_v2"]}
    latent = FlopsModel.from_config(config)
    expanded = FlopsModel.from_config(config, mla_cache="expanded")
    assert latent.prefill(20) == expanded.prefill(20)
    # 8 cached tokens: 3 layers x rank 12 x 4 heads x (6 + 5), two FLOPs each.
    assert latent.prefill(5, 8) - expanded.prefill(5, 8) == 2 * 8 * 3 * 12 * 4 * 11
    assert latent.kv_bytes_per_token == 2 * 3 * (12 + 4)
    assert expanded.kv_bytes_per_token == 2 * 3 * 4 * (6 + 4 + 5)
    # Absorbed decode: scores on rank + rope, values on rank.
    assert latent.decode(9) - latent.decode(8) == 2 * 3 * 4 * (2 * 12 + 4)
    assert expanded.decode(9) == expanded.prefill(1, 8)


QWEN3_30B = {  # https://huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "torch_dtype": "bfloat16",
}


def test_published_sizes():
    """The model cards: 30.5B parameters, 3.3B active; 671B / 37B; 116.8B / 5.1B; 46.7B / 12.9B."""
    qwen = FlopsModel.from_config(QWEN3_30B)
    assert round(qwen.total_parameters / 1e9, 1) == 30.5
    assert 3.3e9 <= qwen.active_parameters < 3.4e9
    assert qwen.kv_bytes_per_token == 48 * 2 * 4 * 128 * 2
    assert qwen.expert_bytes == 3 * 2048 * 768 * 2
    deepseek = FlopsModel.from_config({"model_type": "deepseek_v3"})
    assert round(deepseek.total_parameters / 1e9) == 671
    assert round((deepseek.active_parameters - deepseek.parameters["embedding"]) / 1e9) == 37
    assert deepseek.kv_bytes_per_token == 61 * 576 * 2
    gpt = FlopsModel.from_config(
        {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}, "dtype": "bfloat16"}
    )
    assert round(gpt.total_parameters / 1e9, 1) == 116.8
    assert round((gpt.active_parameters - gpt.parameters["embedding"]) / 1e9, 1) == 5.1
    assert 60e9 < gpt.model_bytes < 66e9  # the checkpoint is 65 GB on disk
    mixtral = FlopsModel.from_config({"model_type": "mixtral"})
    assert round(mixtral.total_parameters / 1e9, 1) == 46.7
    assert round(mixtral.active_parameters / 1e9, 1) == 12.9


def test_quantised_checkpoints():
    fp8 = FlopsModel.from_config({**QWEN3_30B, "quantization_config": {"quant_method": "fp8"}})
    assert (fp8.weight_bytes, fp8.expert_weight_bytes, fp8.kv_value_bytes) == (1, 1, 2)
    int4 = FlopsModel.from_config({**QWEN3_30B, "quantization_config": {"quant_method": "gptq", "bits": 4}})
    assert int4.expert_bytes == 3 * 2048 * 768 / 2
    assert FlopsModel.from_config(QWEN3_30B, kv_value_bytes=1).kv_bytes_per_token == 48 * 2 * 4 * 128


def test_multimodal_gemma4_reads_its_text_part():
    text = {**SMALL, **CASES["gemma4_text"], "model_type": "gemma4_text"}
    outer = {"model_type": "gemma4", "text_config": text, "tie_word_embeddings": True}
    assert FlopsModel.from_config(outer) == FlopsModel.from_config(text)


def test_the_number_of_experts_under_any_of_its_names():
    base = {"model_type": "mixtral", **SMALL, "num_experts_per_tok": 2}
    assert FlopsModel.from_config({**base, "num_experts": 4}).num_experts == 4
    assert FlopsModel.from_config({**base, "n_routed_experts": 5}).num_experts == 5


@given(st.integers(0, 40), st.integers(0, 40), st.one_of(st.none(), st.integers(1, 50)))
def test_causal_pairs_by_counting(suffix, cached, window):
    pairs = sum(min(cached + t + 1, window or 10**9) for t in range(suffix))
    assert causal_pairs(suffix, cached, window) == pairs


@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from(["qwen3_moe sliding", "gpt_oss", "mixtral"]))
def test_splitting_a_prompt_costs_one_more_row_of_logits(first, second, case):
    """Eq. 2 of MoE-Prefill adds up: prefix, then suffix on top of it."""
    config = {"model_type": case.split()[0], **SMALL, **CASES[case]}
    model = FlopsModel.from_config(config)
    head = 2 * 97 * 32
    assert model.prefill(first) + model.prefill(second, first) == model.prefill(first + second) + head


def test_nothing_costs_nothing():
    model = FlopsModel.from_config(QWEN3_30B)
    assert model.prefill(0) == model.prefill(0, 1_000) == 0.0
    assert set(model.prefill_parts(0).values()) == {0.0}


def test_kv_bytes_of_sliding_layers_stop_at_the_window():
    model = FlopsModel.from_config({"model_type": "gpt_oss"})
    per_layer = 2 * 8 * 64 * 2
    assert model.kv_bytes(100) == 100 * model.kv_bytes_per_token == 100 * 36 * per_layer
    assert model.kv_bytes(1_000) == (18 * 1_000 + 18 * 128) * per_layer


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"model_type": "llama4"}, UnsupportedModelError, "known families: deepseek_v2"),
        ({}, ConfigError, "model_type"),
        (3, ConfigError, "int"),
        ({**QWEN3_30B, "hidden_size": "big"}, ConfigError, "hidden_size"),
        ({**QWEN3_30B, "num_experts_per_tok": 0}, ConfigError, "num_experts_per_tok"),
        ({**QWEN3_30B, "num_attention_heads": 0, "head_dim": None}, ConfigError, "no sense"),
        ({"model_type": "deepseek_v2"}, ConfigError, "num_experts_per_tok"),
    ],
)
def test_refuses(config, error, message):
    with pytest.raises(error, match=message):
        FlopsModel.from_config(config)


def test_refuses_bad_numbers_and_files(tmp_path):
    model = FlopsModel.from_config(QWEN3_30B)
    for call in (lambda: model.prefill(-1), lambda: model.prefill(1, -1), lambda: model.decode(0)):
        with pytest.raises(ConfigError):
            call()
    with pytest.raises(ConfigError, match="mla_cache"):
        FlopsModel.from_config(QWEN3_30B, mla_cache="both")
    with pytest.raises(ConfigError, match="weight_bytes"):
        FlopsModel.from_config(QWEN3_30B, weight_bytes=0)
    broken = tmp_path / "config.json"
    broken.write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        FlopsModel.from_config(broken)
    broken.write_text(json.dumps([1]))
    with pytest.raises(ConfigError, match="JSON object"):
        FlopsModel.from_config(broken)
    with pytest.raises(FileNotFoundError):
        FlopsModel.from_config(tmp_path / "absent.json")


def test_imports_neither_torch_nor_transformers():
    code = "import sys, moe_opt.flops, moe_opt.devices; print({'torch', 'transformers'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
