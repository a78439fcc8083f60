"""Checkpoints with fp8 and MXFP4 experts: streamed and sharded as they are stored, and equal to what Transformers makes
of the same files when it loads them dequantised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import make_batch, make_config, make_stock
from safetensors.torch import load_file, save_file
from test_expert_parallel import case_of, run_group
from transformers import AutoModelForCausalLM

from moe_opt import MoEOptimizedForCausalLM
from moe_opt.errors import UnsupportedModelError
from moe_opt.modeling.expert_formats import _E2M1, Decoder, Part, Stored

BLOCK = 8  # real checkpoints have 128; a tiny model's expert is smaller than that


def quantise_fp8(weight: torch.Tensor, scale_dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of BLOCK x BLOCK over the last two dimensions, and their scales."""
    *lead, rows, columns = weight.shape
    blocks = weight.float().reshape(*lead, rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scales = blocks.abs().amax((-3, -1)).clamp_min(1e-6) / 448
    if scale_dtype == torch.uint8:
        exponents = scales.log2().ceil().clamp(-126, 127)
        scales, stored = exponents.exp2(), (exponents + 127).to(torch.uint8)
    else:
        stored = scales
    codes = (blocks / scales[..., :, None, :, None]).to(torch.float8_e4m3fn)
    return codes.reshape(weight.shape), stored


def quantise_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[E, in, out] as gpt-oss computes -> blocks uint8 [E, out, in/32, 16] and scales uint8 [E, out, in/32]."""
    values = weight.float().transpose(1, 2).reshape(weight.shape[0], weight.shape[2], -1, 32)
    exponents = (values.abs().amax(-1).clamp_min(1e-12) / 6).log2().ceil().clamp(-126, 127)
    scaled = values / exponents.exp2()[..., None]
    codes = (scaled[..., None] - torch.tensor(_E2M1)).abs().argmin(-1).to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8)


def save_fp8(
    folder: Path, family: str, dtype: torch.dtype, *, fused: bool = False, scales: torch.dtype = torch.float32
) -> Path:
    """A stock checkpoint with its experts and attention in fp8; experts one by one, as they are published, or fused."""
    make_stock(family, dtype).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    if fused:
        merge_experts(tensors)
    out: dict[str, torch.Tensor] = {}
    for key, value in tensors.items():
        if ".experts." in key or key.endswith(("q_proj.weight", "o_proj.weight")):
            out[key], out[f"{key}_scale_inv"] = quantise_fp8(value, scales)
        else:
            out[key] = value
    save_file(out, folder / "model.safetensors", {"format": "pt"})
    config = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
    add_config(folder, {**config, "modules_to_not_convert": ["lm_head", "k_proj", "v_proj"]})
    return folder


def merge_experts(tensors: dict[str, torch.Tensor]) -> None:
    prefixes = {key.split(".experts.")[0] for key in tensors if ".experts." in key}
    for prefix in prefixes:
        parts = {
            name: [tensors.pop(f"{prefix}.experts.{e}.{name}.weight") for e in range(8)]
            for name in ("gate_proj", "up_proj", "down_proj")
        }
        halves = zip(parts["gate_proj"], parts["up_proj"], strict=True)
        tensors[f"{prefix}.experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in halves])
        tensors[f"{prefix}.experts.down_proj"] = torch.stack(parts["down_proj"])


def save_mxfp4(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config("gpt_oss", intermediate_size=64), dtype=dtype)
    for name, parameter in model.named_parameters():
        if "experts" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    out: dict[str, torch.Tensor] = {}
    for key, value in load_file(folder / "model.safetensors").items():
        if key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            out[f"{key}_blocks"], out[f"{key}_scales"] = quantise_mxfp4(value)
        else:
            out[key] = value
    save_file(out, folder / "model.safetensors", {"format": "pt"})
    add_config(folder, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]})
    return folder


def add_config(folder: Path, quantisation: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantisation}))


CASES = {
    "fp8, experts one by one": lambda folder, dtype: save_fp8(folder, "qwen3_moe", dtype),
    "fp8, fused": lambda folder, dtype: save_fp8(folder, "qwen3_moe", dtype, fused=True),
    "fp8, Mixtral": lambda folder, dtype: save_fp8(folder, "mixtral", dtype),
    "fp8, e8m0 scales": lambda folder, dtype: save_fp8(folder, "qwen3_moe", dtype, scales=torch.uint8),
    "mxfp4": save_mxfp4,
}


def dequantised(folder: Path, **kwargs: Any) -> Any:
    """What Transformers makes of the checkpoint."""
    return AutoModelForCausalLM.from_pretrained(folder, **kwargs).eval()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_streamed_equals_dequantised_to_the_bit(tmp_path: Path, case: str, dtype: torch.dtype) -> None:
    stored, reference = tmp_path / "stored", tmp_path / "reference"
    CASES[case](stored, dtype)
    # Transformers does not dequantise fused experts: what it makes of the same blocks one by one stands for them.
    save_fp8(reference, "qwen3_moe", dtype) if "fused" in case else CASES[case](reference, dtype)
    stock = dequantised(reference, dtype=dtype, experts_implementation="grouped_mm")
    ours = MoEOptimizedForCausalLM.from_pretrained(stored, moe_opt={"async_ep": "offload"}, dtype=dtype).eval()
    batch = make_batch()
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(stock(**batch).logits, ours(**batch).logits)
    weights = {key: value for key, value in ours.moe_opt.async_ep._buffers[0].items() if not key.endswith("bias")}
    moved = sum(value.numel() * value.element_size() for value in weights.values())
    values = sum(p.numel() for name, p in stock.named_parameters() if ".1." in name and name.endswith("up_proj"))
    values += sum(p.numel() for name, p in stock.named_parameters() if ".1." in name and name.endswith("down_proj"))
    if case == "mxfp4":
        assert moved == values / 2 + values / 32  # 4.25 bits a value
    else:
        assert moved == values + values / BLOCK**2 * (1 if "e8m0" in case else 4)


def test_generate_and_buffers(tmp_path: Path) -> None:
    save_mxfp4(tmp_path)
    stock = dequantised(tmp_path, dtype=torch.bfloat16)
    ours = MoEOptimizedForCausalLM.from_pretrained(tmp_path, moe_opt={"async_ep": "offload"}, dtype=torch.bfloat16)
    stream = ours.moe_opt.async_ep
    batch = make_batch()
    mine = ours.generate(**batch, max_new_tokens=6, do_sample=False)
    places = [value.data_ptr() for value in (stream._decoder._values, *stream._decoder._out.values())]
    assert torch.equal(mine, stock.generate(**batch, max_new_tokens=6, do_sample=False))
    assert places == [value.data_ptr() for value in (stream._decoder._values, *stream._decoder._out.values())]
    assert stream.buffer_bytes > stream._decoder.bytes > 0


@pytest.mark.parametrize("case", ["fp8, experts one by one", "mxfp4"])
@pytest.mark.parametrize("feature", ["async_ep", "expert_parallel"])
def test_two_ranks(tmp_path: Path, case: str, feature: str) -> None:
    """Parts are gathered as they are stored; ranks of an expert-parallel group read and decode their experts only."""
    CASES[case](tmp_path / "model", torch.float32)
    base = {**case_of(tmp_path / "model", 2), "feature": feature}
    modes: list[Any] = ["gather", "both"] if feature == "async_ep" else [{"method": "metro"}]
    for found in run_group(tmp_path, 2, [{**base, "settings": mode} for mode in modes]):
        for result in found:
            assert result["difference"] < 1e-5


@pytest.mark.parametrize("case", ["fp8, experts one by one", "mxfp4"])
def test_the_fingerprint_is_that_of_the_dequantised_weights(tmp_path: Path, case: str) -> None:
    """United experts trained on the dequantised model fit the streamed one, and the other way round."""
    CASES[case](tmp_path, torch.bfloat16)
    whole = MoEOptimizedForCausalLM.from_pretrained(tmp_path, moe_opt=True, dtype=torch.bfloat16)
    ours = MoEOptimizedForCausalLM.from_pretrained(tmp_path, moe_opt={"async_ep": "offload"}, dtype=torch.bfloat16)
    from moe_opt.modeling.united import weight_fingerprint

    assert ours.moe_opt.base_fingerprint == weight_fingerprint(whole.moe_opt.layers)


def test_decoding_in_chunks_is_decoding_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    codes, scales = quantise_fp8(torch.randn(5, 16, 24))
    blocks, exponents = quantise_mxfp4(torch.randn(5, 64, 24))
    stored = [
        Stored(
            "up",
            "fp8",
            {"up": Part("", codes.shape, codes.dtype), "s": Part("", scales.shape, scales.dtype)},
            (5, 16, 24),
        ),
        Stored(
            "down",
            "mxfp4",
            {"b": Part("", blocks.shape, torch.uint8), "e": Part("", exponents.shape, torch.uint8)},
            (5, 64, 24),
        ),
    ]
    parts = {"up": codes, "s": scales, "b": blocks, "e": exponents, "bias": torch.ones(5)}
    found = []
    for limit in (1, 1 << 24):
        monkeypatch.setattr("moe_opt.modeling.expert_formats._SCRATCH_VALUES", limit)
        found.append(Decoder(stored, torch.float32, torch.device("cpu"), 5).decode(parts))
    assert all(torch.equal(found[0][key], found[1][key]) for key in ("up", "down", "bias"))
    plain = torch.zeros(5, 64, 24)  # by the standard's own words, a value at a time
    for e, o, i in torch.cartesian_prod(torch.arange(5), torch.arange(24), torch.arange(64)).tolist():
        byte = int(blocks[e, o, i // 32, i % 32 // 2])
        plain[e, i, o] = _E2M1[byte >> 4 if i % 2 else byte & 15] * 2.0 ** (int(exponents[e, o, i // 32]) - 127)
    assert torch.equal(found[0]["down"], plain)


def test_what_is_not_known_is_refused(tmp_path: Path) -> None:
    """Never fp8 codes taken for weights."""
    folder = save_fp8(tmp_path, "qwen3_moe", torch.float32)
    tensors = load_file(folder / "model.safetensors")
    kept = {key: value for key, value in tensors.items() if "experts.3.down_proj.weight_scale_inv" not in key}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"layers\.0\.mlp\.experts\.down_proj.*does not know"):
        MoEOptimizedForCausalLM.from_pretrained(folder, moe_opt={"async_ep": "offload"})
    first = "model.layers.0.mlp.experts."
    mixed = {
        key: value.to(torch.bfloat16) if key.startswith(first) and value.dtype == torch.float8_e4m3fn else value
        for key, value in tensors.items()
        if not (key.startswith(first) and key.endswith("scale_inv"))
    }
    save_file(mixed, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match="another way than those of"):
        MoEOptimizedForCausalLM.from_pretrained(folder, moe_opt={"async_ep": "offload"})
