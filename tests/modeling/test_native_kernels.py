"""The CPU kernels in C++ against plain torch, on the edges of their tiles, and what happens without a compiler."""

import copy
import logging
import os
import subprocess
import sys
import types

import pytest
import torch
from families import make_stock
from fused_models import assert_equal_on_both_kernels
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.activations import GELUTanh
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate
from transformers.models.qwen3_moe import modeling_qwen3_moe

from moe_opt.modeling.experts import find_moe_layers
from moe_opt.modeling.kernels import native_experts
from moe_opt.modeling.kernels.native import library
from moe_opt.modeling.kernels.native_modules import NativeModules
from moe_opt.modeling.kernels.native_rows import logsumexp, rotary_or_none
from moe_opt.modeling.kernels.storage import FusedWeights, experts_reference

pytestmark = pytest.mark.skipif(library.load() is None, reason="the CPU kernels cannot be compiled here")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Experts(nn.Module):
    """What the kernels read of an experts module of Transformers."""

    has_gate, has_bias, is_transposed = True, False, False
    _apply_gate = _default_apply_gate

    def __init__(self, experts: int, width: int, inner: int, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.num_experts = experts
        self.act_fn = nn.SiLU()
        self.gate_up_proj = nn.Parameter((torch.randn(experts, 2 * inner, width, generator=generator) / 4).to(dtype))
        self.down_proj = nn.Parameter((torch.randn(experts, width, inner, generator=generator) / 4).to(dtype))

    def reference(self, hidden, ids, weights, sizes=False):
        storage = FusedWeights(self.gate_up_proj.detach(), self.down_proj.detach())
        return experts_reference(hidden, ids, weights, storage, sizes=sizes).float()


def compute(module, hidden, ids, weights):
    out = native_experts.native_experts_or_none(module, hidden, ids, weights, any_number=True)
    assert out is not None
    return out


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 70),
    top_k=st.integers(1, 4),
    experts=st.integers(1, 6),
    width=st.sampled_from([16, 40, 64, 258]),  # a multiple of the tiles, tails of the reduction, two blocks of columns
    inner=st.sampled_from([16, 24, 48, 80, 272]),
    dtype=st.sampled_from(DTYPES),
    threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 1000),
)
def test_experts_equal_the_reference(tokens, top_k, experts, width, inner, dtype, threads, seed):
    module = Experts(experts, width, inner, dtype, seed)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, experts + 1, (tokens, top_k), generator=generator)  # -1 and one too many: dropped
    shares = torch.rand(tokens, top_k, generator=generator)
    hidden = torch.randn(tokens, width, generator=generator).to(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = compute(module, hidden, ids, shares)
        assert torch.equal(found, compute(module, hidden, ids, shares))
    finally:
        torch.set_num_threads(before)
    expected, sizes = module.reference(hidden, ids, shares), module.reference(hidden, ids, shares, sizes=True)
    # one rounding of what gate/up leaves and of the sum; float32 sums differ in order alone
    rounding = {torch.float32: 2.0**-19, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[dtype]
    error = (found.float() - expected).abs()
    allowed = rounding * (sizes + expected.abs()) + 1e-5
    assert (error <= allowed).all(), (error / allowed).max()


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "olmoe", "gemma4_text"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_equal_grouped_mm_on_real_layers(family, dtype):
    _, module = find_moe_layers(make_stock(family).to(dtype))[0]
    storage = FusedWeights.of(module)
    width = storage.down.shape[2 if storage.transposed else 1]
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(37, width, generator=generator).to(dtype)
    ids = torch.randint(0, module.num_experts, (37, 3), generator=generator)
    shares = torch.rand(37, 3, generator=generator)
    expected = ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, hidden, ids, shares)
    close = {"atol": 1e-5, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    torch.testing.assert_close(compute(module, hidden, ids, shares), expected, **close)


def test_what_the_kernel_has_no_form_for_is_left_to_torch():
    module = Experts(3, 16, 16, torch.float32, 0)
    hidden, ids, shares = torch.randn(2, 16), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    take = native_experts.native_experts_or_none
    assert take(module, hidden.double(), ids, shares) is None
    assert take(module, hidden[:0], ids[:0], shares[:0]) is None
    many = native_experts.MAX_TOKENS_PER_EXPERT * 3 + 1
    assert take(module, hidden[:1].expand(many, 16), ids[:1].expand(many, 1), shares[:1].expand(many, 1)) is None
    module.act_fn = nn.Tanh()
    native_experts._prepared.clear()
    assert take(module, hidden, ids, shares) is None


def test_new_weights_are_seen():
    module = Experts(3, 16, 16, torch.float32, 0)
    hidden, ids, shares = torch.randn(5, 16), torch.randint(0, 3, (5, 2)), torch.rand(5, 2)
    for seed in range(12):  # more than the kernel remembers
        other = Experts(3, 16, 16, torch.float32, seed)
        module.gate_up_proj, module.down_proj = other.gate_up_proj, other.down_proj
        torch.testing.assert_close(
            compute(module, hidden, ids, shares), module.reference(hidden, ids, shares), atol=1e-5, rtol=1e-4
        )


@pytest.mark.parametrize("threshold", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("strategy", ["partial", "full", "top-k"])
def test_a_browned_out_model_equals_one_without_the_kernels(threshold, strategy):
    assert_equal_on_both_kernels(strategy, threshold)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.one_of(st.integers(1, 150), st.sampled_from([256, 257, 300])),  # also tasks that pack the weights
    width=st.sampled_from([2, 30, 32, 70, 96, 256]),
    columns=st.sampled_from([1, 15, 16, 40, 48, 128, 304]),
    biased=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_linear_layers_equal_torch(rows, width, columns, biased, seed):
    torch.manual_seed(seed)
    module = nn.Linear(width, columns, bias=biased).to(torch.bfloat16)
    x = torch.randn(1, rows, width).to(torch.bfloat16)
    exact = nn.functional.linear(x.float(), module.weight.float(), None if not biased else module.bias.float())
    sizes = nn.functional.linear(x.float().abs(), module.weight.float().abs())
    taken = NativeModules(module)
    found = module(x)
    assert found.shape == (1, rows, columns)
    assert ((found.float() - exact).abs() <= 2.0**-8 * exact.abs() + 2.0**-20 * sizes + 1e-6).all()
    taken.remove()
    assert "forward" not in module.__dict__


@settings(max_examples=60, deadline=None)
@given(
    rows=st.one_of(st.integers(1, 90), st.sampled_from([256, 290])),
    width=st.sampled_from([32, 40, 128]),
    inner=st.sampled_from([16, 24, 48, 160]),
    columns=st.sampled_from([32, 40, 128]),
    act=st.sampled_from([nn.SiLU, GELUTanh]),
    threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 1000),
)
def test_mlps_equal_torch(rows, width, inner, columns, act, threads, seed):
    class MLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
            self.down_proj, self.act_fn = nn.Linear(inner, columns, bias=False), act()

        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    torch.manual_seed(seed)
    module = MLP().to(torch.bfloat16)
    x = torch.randn(1, rows, width).to(torch.bfloat16)
    middle = module.act_fn(x.float() @ module.gate_proj.weight.float().T) * (
        x.float() @ module.up_proj.weight.float().T
    )
    middle = middle.to(torch.bfloat16).float()
    down = module.down_proj.weight.float().T
    exact, sizes = middle @ down, middle.abs() @ down.abs()
    taken = NativeModules(module)
    assert library.load().moe_opt_has_tiles() == ("forward" in module.__dict__)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = module(x)
    finally:
        torch.set_num_threads(before)
    assert found.shape == (1, rows, columns)
    # torch's own way rounds gate, up and their product as well
    allowed = 2.0**-7 * (exact.abs() + sizes) + 1e-6
    assert ((found.float() - exact).abs() <= allowed).all()
    taken.remove()


def test_an_mlp_that_does_more_is_not_taken():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
            self.down_proj, self.act_fn = nn.Linear(32, 32, bias=False), nn.SiLU()

        def forward(self, x):
            return 1.5 * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    module = Scaled().to(torch.bfloat16)
    NativeModules(module)
    assert "forward" not in module.__dict__


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 7, 200])
def test_routers_choose_as_stock_ones_do(family, dtype, rows):
    model = make_stock(family)
    generator = torch.Generator().manual_seed(5)
    routers = [module for module in model.modules() if "router" in type(module).__name__.lower()]
    for router in routers:
        router.weight.data = torch.randn(router.weight.shape, generator=generator)
    model = model.to(dtype)
    router = routers[0]
    x = torch.randn(rows, router.weight.shape[1], generator=generator).to(dtype)
    logits, scores, ids = router(x)
    taken = NativeModules(model)
    assert "forward" in router.__dict__
    found_logits, found_scores, found_ids = router(x)
    taken.remove()
    assert (found_scores.dtype, found_ids.dtype) == (scores.dtype, ids.dtype)
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-3, "rtol": 2e-2}
    torch.testing.assert_close(found_logits, logits, **close)
    best = found_logits.float().topk(ids.shape[1]).values  # of equal logits it may take another, of unequal it may not
    assert torch.equal(found_logits.float().gather(1, found_ids), best)
    same = (found_ids == ids).all(1)
    assert same.float().mean() > 0.9
    torch.testing.assert_close(found_scores[same], scores[same], **close)
    assert all(len(set(row)) == len(row) for row in found_ids.tolist())


def test_of_equal_logits_a_router_takes_the_first():
    router = next(m for m in make_stock("qwen3_moe").modules() if "router" in type(m).__name__.lower())
    router.weight.data = torch.randn(router.weight.shape)
    taken = NativeModules(router)
    assert len(taken) == 1
    _, scores, ids = router(torch.zeros(2, router.weight.shape[1]))
    top_k = ids.shape[1]
    assert ids.tolist() == [list(range(top_k))] * 2
    assert torch.allclose(scores.sum(1), torch.full((2,), 1.0 if router.norm_topk_prob else top_k / router.num_experts))
    taken.remove()


def test_a_router_of_another_kind_or_without_weights_is_left_alone():
    for family in ("deepseek_v3", "gemma4_text"):
        model = make_stock(family)
        taken = NativeModules(model)
        routers = [module for module in model.modules() if "router" in type(module).__name__.lower()]
        assert routers
        assert not any("forward" in router.__dict__ for router in routers)
        taken.remove()
    router = next(m for m in make_stock("qwen3_moe").modules() if "router" in type(m).__name__.lower())
    router.weight.data.zero_()
    assert len(NativeModules(router)) == 0


@settings(max_examples=60, deadline=None)
@given(
    rows=st.sampled_from([1, 5, 200]),
    heads=st.integers(1, 5),
    kv_heads=st.integers(1, 2),
    dim=st.sampled_from([2, 6, 32, 48, 64, 128]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_rotary_embeddings_are_torchs(rows, heads, kv_heads, dim, dtype, seed):
    own = modeling_qwen3_moe.apply_rotary_pos_emb
    ours = rotary_or_none(own, library.load())
    assert ours is not None
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(1, rows, n, dim, generator=generator).to(dtype).transpose(1, 2) for n in (heads, kv_heads))
    angles = torch.rand(1, rows, dim, generator=generator) * 6
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    for found, expected in zip(ours(q, k, cos, sin), own(q, k, cos, sin), strict=True):
        assert found.stride() == expected.stride() or found.shape == expected.shape
        if dtype == torch.float32:  # a compiler may fuse a product and a sum, with one rounding less
            torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
        else:
            assert torch.equal(found, expected)
    wide = torch.cat([q, q], -1)  # partial rotary embeddings and batches stay with torch
    with pytest.raises(RuntimeError):
        ours(wide, wide, cos, sin)
    both = [torch.cat([part, part]) for part in (q, k, cos, sin)]
    for found, expected in zip(ours(*both), own(*both), strict=True):
        assert torch.equal(found, expected)


def test_the_rotary_function_is_given_back_when_the_last_model_is(monkeypatch):
    def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
        half = q.shape[-1] // 2
        turned = [torch.cat((-x[..., half:], x[..., :half]), -1) for x in (q, k)]
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return q * cos + turned[0] * sin, k * cos + turned[1] * sin

    family = types.ModuleType("modeling_of_a_family")  # engines of other tests may hold the real ones
    family.apply_rotary_pos_emb = apply_rotary_pos_emb
    monkeypatch.setitem(sys.modules, family.__name__, family)
    layer = type("Layer", (nn.Module,), {"__module__": family.__name__})
    first, second = NativeModules(layer()), NativeModules(layer())
    assert family.apply_rotary_pos_emb is not apply_rotary_pos_emb
    first.remove()
    first.remove()  # once more changes nothing
    assert family.apply_rotary_pos_emb is not apply_rotary_pos_emb
    second.remove()
    assert family.apply_rotary_pos_emb is apply_rotary_pos_emb


@pytest.mark.parametrize(
    "family", ["qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "gpt_oss", "deepseek_v3", "gemma4_text"]
)
def test_a_model_is_as_exact_as_before_and_is_given_back(family):
    exact = make_stock(family)
    model = copy.deepcopy(exact).to(torch.bfloat16)
    exact = exact.to(torch.bfloat16).float()
    ids = torch.arange(3, 43).view(1, 40)
    right, before = exact(ids).logits, model(ids).logits
    taken = NativeModules(model)
    if family == "qwen2_moe":
        norms = [module for module in model.modules() if "norm" in type(module).__name__.lower()]
        assert all("forward" in norm.__dict__ for norm in norms)
    error = (model(ids).logits.float() - right).abs().median()  # a token that is routed elsewhere is far off in both
    assert error <= 1.5 * (before.float() - right).abs().median() + 1e-6
    taken.remove()
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert torch.equal(model(ids).logits, before)


def test_a_norm_that_only_looks_alike_is_not_taken():
    class ShiftedRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.variance_epsilon = nn.Parameter(torch.randn(8)), 1e-6

        def forward(self, x):
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon) * (1 + self.weight)

    assert len(NativeModules(ShiftedRMSNorm())) == 0


def test_logsumexp_as_torch_has_it():
    torch.manual_seed(0)
    logits = torch.randn(9, 1003) * 20
    logits[1, 7], logits[2, 3], logits[5] = float("-inf"), float("inf"), float("-inf")
    logits[3, 500], logits[4, 2], logits[4, 3] = float("nan"), float("inf"), float("-inf")
    torch.testing.assert_close(logsumexp(logits), logits.logsumexp(-1), atol=1e-6, rtol=1e-6, equal_nan=True)
    assert logsumexp(logits.double()).dtype == torch.float64


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )


LOAD = "import logging; logging.basicConfig(level='INFO')\n" + (
    "from moe_opt.modeling.kernels.native import library; print(library.load() is not None)"
)


def test_compiled_once_per_machine(tmp_path):
    first = run_python(LOAD, MOE_OPT_CACHE=str(tmp_path))
    assert first.stdout.strip() == "True", first.stderr
    assert "compiling the CPU kernels" in first.stderr
    again = run_python(LOAD, MOE_OPT_CACHE=str(tmp_path))
    assert again.stdout.strip() == "True"
    assert "compiling" not in again.stderr
    assert len(list((tmp_path / "native").glob("*"))) == 1  # nothing is left of the build


def test_a_cache_that_cannot_be_written_is_said_and_built_around(tmp_path):
    (tmp_path / "file").write_text("")
    found = run_python(LOAD, MOE_OPT_CACHE=str(tmp_path / "file"), TMPDIR=str(tmp_path))
    assert found.stdout.strip() == "True", found.stderr
    assert "cannot be written" in found.stderr


def test_without_a_compiler_torch_runs(tmp_path):
    found = run_python(LOAD, MOE_OPT_CACHE=str(tmp_path), PATH=str(tmp_path), CXX="no-such-compiler")
    assert found.stdout.strip() == "False"
    assert "no C++ compiler" in found.stderr
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\n[ \"$1\" = --version ] && echo 1 && exit\necho 'error: no' >&2; exit 1\n")
    broken.chmod(0o755)
    found = run_python(LOAD, MOE_OPT_CACHE=str(tmp_path), CXX=str(broken), PATH=f"{tmp_path}:/bin:/usr/bin")
    assert found.stdout.strip() == "False"
    assert "could not be built" in found.stderr
    assert "error: no" in found.stderr


def test_switched_off(monkeypatch, caplog):
    monkeypatch.setenv("MOE_OPT_NATIVE", "0")
    library.load.cache_clear()
    try:
        with caplog.at_level(logging.INFO):
            assert library.load() is None
        assert not caplog.records
    finally:
        monkeypatch.undo()
        library.load.cache_clear()
    assert library.load() is not None
