"""The fused decode kernel in Triton's interpreter: against its reference, against Transformers, under brownout."""

import os
import subprocess
import sys

import pytest
import torch
from families import make_stock
from fused_models import assert_equal_on_both_kernels
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moe_opt.errors import ConfigError
from moe_opt.modeling import experts
from moe_opt.modeling.experts import find_moe_layers
from moe_opt.modeling.kernels.storage import ACTIVATIONS, FusedWeights, experts_reference

kernels = pytest.importorskip("moe_opt.modeling.kernels.fused_experts", reason="needs triton")
fused_experts = kernels.fused_experts
interpreter = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in Triton's interpreter")


def storage(slots, width, inner, activation, transposed, biased, dtype, seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return (torch.randn(*shape, generator=generator) / 4).to(dtype)

    gate_up, down = (slots, 2 * inner, width), (slots, width, inner)
    if transposed:
        gate_up, down = (slots, width, 2 * inner), (slots, inner, width)
    return FusedWeights(
        draw(*gate_up), draw(*down), draw(slots, 2 * inner) if biased else None, draw(slots, width) if biased else None,
        transposed=transposed, interleaved=activation == "gpt_oss", activation=activation, limit=0.8,
    )  # fmt: skip


def assert_equal_but_for_rounding(found, *inputs):
    """In bf16 what gate/up leaves is rounded once, here and there, from sums in another order; down's sum may cancel.

    The error goes with the size of down's terms, so each element is held to one rounding of those.
    """
    expected, sizes = experts_reference(*inputs), experts_reference(*inputs, sizes=True)
    error, allowed = (found.float() - expected.float()).abs(), 2.0**-7 * (sizes + expected.abs()) + 1e-5
    assert (error <= allowed).all(), (error / allowed).max()


@interpreter
@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(1, 20),
    top_k=st.integers(1, 5),
    slots=st.integers(1, 9),
    width=st.sampled_from([16, 40]),
    inner=st.sampled_from([16, 24]),
    activation=st.sampled_from(ACTIVATIONS),
    transposed=st.booleans(),
    biased=st.booleans(),
    remapped=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_equals_the_reference(
    tokens, top_k, slots, width, inner, activation, transposed, biased, remapped, dtype, seed
):
    weights = storage(slots, width, inner, activation, transposed, biased, dtype, seed)
    generator = torch.Generator().manual_seed(seed)
    experts = slots + 3 if remapped else slots
    ids = torch.randint(-1, experts + 1, (tokens, top_k), generator=generator)  # -1 and one too many: dropped
    remap = torch.randint(-1, slots, (experts,), generator=generator) if remapped else None
    gates = torch.rand(tokens, top_k, generator=generator)
    hidden = torch.randn(tokens, width, generator=generator).to(dtype)
    found = fused_experts(hidden, ids, gates, weights, remap)
    if dtype == torch.float32:
        expected = experts_reference(hidden, ids, gates, weights, remap)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
        return
    assert_equal_but_for_rounding(found, hidden, ids, gates, weights, remap)


@interpreter
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "olmoe", "gemma4_text"])
def test_equals_grouped_mm_on_real_layers(family):
    _, module = find_moe_layers(make_stock(family))[0]
    weights = FusedWeights.of(module)
    assert weights is not None
    width = weights.down.shape[2 if weights.transposed else 1]
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(11, width, generator=generator)
    ids = torch.randint(0, module.num_experts, (11, 3), generator=generator)
    gates = torch.rand(11, 3, generator=generator)
    with torch.inference_mode():
        expected = ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, hidden, ids, gates)
        found = fused_experts(hidden, ids, gates, weights)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@interpreter
@pytest.mark.parametrize("threshold", [1.0, 0.5, 0.0])
def test_a_model_with_the_fused_kernel_equals_one_without(threshold, monkeypatch):
    monkeypatch.setattr(experts, "_fused_on_cpu", experts._fused_in_triton)
    assert_equal_on_both_kernels("partial", threshold)


def test_what_is_not_fused_is_said():
    with pytest.raises(ConfigError, match="not fused"):
        FusedWeights(torch.empty(1, 2, 1), torch.empty(1, 1, 1), activation="relu")
    weights = FusedWeights(torch.empty(1, 2, 1), torch.empty(1, 1, 1))
    with pytest.raises(ConfigError, match="at most 256 tokens"):
        fused_experts(torch.empty(257, 1), torch.zeros(257, 1, dtype=torch.int64), torch.ones(257, 1), weights)


_COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from moe_opt.modeling.kernels import fused_experts as fused
target = GPUTarget("cuda", 90, 32)
def compile(kernel, pointers, numbers, floats, constants):
    signature = {**pointers, **dict.fromkeys(numbers, "i32"), **dict.fromkeys(floats, "fp32"),
                 **dict.fromkeys(constants, "constexpr")}
    order = {name: signature[name] for name in kernel.arg_names}
    print(len(triton.compile(ASTSource(kernel, order, constants), target=target).asm["ptx"]))
compile(fused._list_kernel,
        {"ids_ptr": "*i64", "weights_ptr": "*fp32", "slot_ptr": "*i64", "lists_ptr": "*i32",
         "list_weights_ptr": "*fp32", "counts_ptr": "*i32"},
        ("num_tokens", "top_k", "num_experts"), (), {"REMAP": True, "TOKENS": 256, "TOP_K": 8})
tiles = {"TILE_M": 16, "TILE_N": 32, "TILE_K": 128}
for transposed in (False, True):
    compile(fused._gate_up_kernel,
            {"hidden_ptr": "*bf16", "weight_ptr": "*bf16", "bias_ptr": "*bf16", "lists_ptr": "*i32",
             "counts_ptr": "*i32", "out_ptr": "*bf16"},
            ("width", "inner", "num_tokens", "top_k", "stride_slot", "stride_column", "stride_row"), ("alpha", "limit"),
            {"ACTIVATION": 2, "INTERLEAVED": transposed, "HAS_BIAS": transposed, "UPCAST": False, **tiles})
compile(fused._down_kernel,
        {"inner_ptr": "*bf16", "weight_ptr": "*bf16", "bias_ptr": "*bf16", "lists_ptr": "*i32",
         "list_weights_ptr": "*fp32", "counts_ptr": "*i32", "out_ptr": "*fp32"},
        ("inner", "width", "num_tokens", "stride_slot", "stride_column", "stride_row"), (),
        {"HAS_BIAS": True, "UPCAST": False, **tiles})
"""


def test_the_kernels_compile_for_a_gpu_that_is_not_here():
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.split()) == 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tokens", [1, 7, 32, 256])
@pytest.mark.parametrize(
    ("slots", "top_k", "width", "inner", "activation"),
    [(128, 8, 2048, 768, "silu"), (32, 4, 2880, 2880, "gpt_oss")],
)
def test_on_a_gpu_and_in_a_graph(tokens, slots, top_k, width, inner, activation):
    oss = activation == "gpt_oss"
    cpu = storage(slots, width, inner, activation, oss, oss, torch.bfloat16, 0)
    moved = {
        name: value.cuda() if isinstance(value := getattr(cpu, name), torch.Tensor) else value
        for name in cpu.__dataclass_fields__
    }
    weights = FusedWeights(**moved)
    hidden = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    ids = torch.rand(tokens, slots, device="cuda").topk(top_k).indices
    gates = torch.rand(tokens, top_k, device="cuda")
    found = fused_experts(hidden, ids, gates, weights)
    some = slice(0, min(tokens, 4))
    assert_equal_but_for_rounding(found[some].cpu(), hidden[some].cpu(), ids[some].cpu(), gates[some].cpu(), cpu)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = fused_experts(hidden, ids, gates, weights)
    graph.replay()
    assert torch.equal(again, found)
