"""Placement and replica choice over tensors, and the Triton kernel against plain code (interpreted without a GPU)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_opt.cluster.replicas import METHODS, choose_reference
from moe_opt.errors import ConfigError
from moe_opt.modeling.metro import choose_replicas
from moe_opt.modeling.placement import ExpertPlacement, place_experts, rebalance_experts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random_instance(seed: int, experts: int, ranks: int, density: float) -> tuple[torch.Tensor, torch.Tensor]:
    random = np.random.default_rng(seed)
    hosts = random.random((experts, ranks)) < density
    hosts[np.arange(experts), random.integers(0, ranks, experts)] = True
    return torch.from_numpy(random.integers(0, 4, experts)), torch.from_numpy(hosts)


def reference(tokens: torch.Tensor, hosts: torch.Tensor) -> list[int]:
    return choose_reference(tokens.tolist(), [row.nonzero().flatten().tolist() for row in hosts], hosts.shape[1])


def test_contract() -> None:
    load = torch.rand(3, 8, generator=torch.Generator().manual_seed(0))
    hosts = place_experts(load, 4, 3).hosts
    assert hosts.shape == (3, 8, 4)
    assert hosts.dtype == torch.bool
    assert hosts.any(2).all()
    assert (hosts.sum(1) <= 3).all()
    tokens = torch.tensor([3, 0, 1, 9, 0, 2, 1, 1])
    for method in METHODS:
        activated = choose_replicas(tokens, hosts[0], method=method)
        assert activated.shape == (8, 4)
        assert activated.dtype == torch.bool
        assert (activated.any(1) == (tokens > 0)).all()
        assert not (activated & ~hosts[0]).any()
    assert torch.equal(choose_replicas(tokens, hosts[0]), choose_replicas(tokens, hosts[0], method="metro"))


def test_slots_list_each_ranks_experts(tmp_path: Path) -> None:
    placement = place_experts(np.random.default_rng(1).random((2, 6)), 3, 4)
    slots = placement.slots()
    assert slots.shape == (2, 3, 4)
    for layer in range(2):
        for rank in range(3):
            held = [expert for expert in slots[layer, rank].tolist() if expert >= 0]
            assert held == placement.experts_of(layer, rank)
    placement.save(tmp_path / "placement.json")
    again = ExpertPlacement.load(tmp_path / "placement.json")
    assert torch.equal(again.hosts, placement.hosts)
    assert again.slots_per_rank == 4
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"bad\.json"):
        ExpertPlacement.load(tmp_path / "bad.json")


def test_methods_of_placement() -> None:
    random = np.random.default_rng(2)
    load = random.random((2, 8))
    routing = random.integers(0, 8, (100, 2, 2))
    activation = place_experts(load, 2, 5, method="activation", routing=routing, batch_size=4, samples=8)
    assert activation.hosts.any(2).all()
    nodes = place_experts(load, 4, 3, method="hierarchical", num_nodes=2, num_groups=4)
    assert (nodes.hosts.view(2, 8, 2, 2).any(3).sum(2) == 1).all()
    moved, moves = rebalance_experts(activation, random.random((2, 8)))
    for layer in range(2):
        assert len(moves[layer]) == int((moved.hosts[layer] & ~activation.hosts[layer]).sum())


def test_wrong_input_is_refused() -> None:
    with pytest.raises(ConfigError, match="layers, experts"):
        place_experts(torch.ones(8), 2, 4)
    with pytest.raises(ConfigError, match="negative"):
        place_experts(-torch.ones(1, 8), 2, 4)
    with pytest.raises(ConfigError, match="cannot hold 8 experts"):
        place_experts(torch.ones(1, 8), 2, 3)
    with pytest.raises(ConfigError, match="needs `routing`"):
        place_experts(torch.ones(1, 8), 2, 4, method="activation")
    with pytest.raises(ConfigError, match="unknown placement"):
        place_experts(torch.ones(1, 8), 2, 4, method="best")
    with pytest.raises(ConfigError, match="unknown method"):
        choose_replicas(torch.ones(2, dtype=torch.int64), torch.ones(2, 2, dtype=torch.bool), method="best")
    with pytest.raises(ConfigError, match="do not belong together"):
        choose_replicas(torch.ones(3, dtype=torch.int64), torch.ones(2, 2, dtype=torch.bool))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), experts=st.integers(1, 40), ranks=st.integers(1, 9), density=st.floats(0, 0.6))
def test_kernel_is_the_plain_code(seed: int, experts: int, ranks: int, density: float) -> None:
    kernels = pytest.importorskip("moe_opt.modeling.kernels.metro")
    tokens, hosts = random_instance(seed, experts, ranks, density)
    replicas = kernels.DeviceReplicas.from_hosts(hosts, DEVICE)
    assert kernels.choose_on_device(tokens.to(DEVICE), replicas).tolist() == reference(tokens, hosts)


_COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from moe_opt.modeling.kernels.metro import _metro_kernel
pointers = {"tokens_ptr": "*i64", "masks_ptr": "*i64", "order_ptr": "*i32", "choice_ptr": "*i32", "active_ptr": "*i32"}
numbers = dict.fromkeys(("num_experts", "num_singles", "num_ranks", "limit"), "i32")
constants = {"EXPERTS": 256, "RANKS": 16}
source = ASTSource(_metro_kernel, {**pointers, **numbers, **dict.fromkeys(constants, "constexpr")}, constants)
print(len(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]))
"""


def test_kernel_compiles_for_a_gpu_that_is_not_here() -> None:
    """What a GPU would be given, in a process of its own: under the interpreter nothing is compiled."""
    pytest.importorskip("triton")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[-1]) > 1000


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("experts", "ranks"), [(64, 4), (128, 8), (256, 16)])
def test_kernel_in_a_graph(experts: int, ranks: int) -> None:
    from moe_opt.modeling.kernels.metro import DeviceReplicas, choose_on_device

    tokens, hosts = random_instance(0, experts, ranks, 0.1)
    replicas = DeviceReplicas.from_hosts(hosts, "cuda")
    static = tokens.to("cuda")
    out = torch.empty(experts, dtype=torch.int32, device="cuda")
    scratch = torch.empty_like(out)
    choose_on_device(static, replicas, out, scratch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        choose_on_device(static, replicas, out, scratch)
    for seed in range(20):
        other, _ = random_instance(seed, experts, ranks, 0.1)
        static.copy_(other)
        graph.replay()
        assert out.tolist() == reference(other, hosts)
