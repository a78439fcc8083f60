"""Streamed experts against the stock model: layouts of checkpoints, broken-off passes, memory, groups of ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from families import make_batch, make_config, make_stock
from test_expert_parallel import run_group, save_case

from moe_opt import MoEOptConfig, MoEOptimizedForCausalLM
from moe_opt.errors import ConfigError, UnsupportedModelError
from moe_opt.modeling.expert_source import MappedCheckpoint

FAMILIES = (
    "qwen2_moe",
    "qwen3_moe",
    "mixtral",
    "olmoe",
    "deepseek_v3",
    "gpt_oss",
    "gemma4_text",
    "glm4_moe",
    "minimax_m2",
)


def both(folder: Path, family: str, settings: Any, **kwargs: Any) -> tuple[Any, Any]:
    """(as it is, streamed) from one checkpoint."""
    make_stock(family).save_pretrained(folder, **kwargs)
    stock = MoEOptimizedForCausalLM.from_pretrained(folder, moe_opt=True, dtype=torch.float32).eval()
    streamed = MoEOptimizedForCausalLM.from_pretrained(folder, moe_opt={"async_ep": settings}, dtype=torch.float32)
    return stock, streamed.eval()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("window", [1, 2, 9])
def test_offload_equals_stock_to_the_bit(tmp_path: Path, family: str, window: int) -> None:
    stock, streamed = both(tmp_path, family, {"mode": "offload", "window": window}, max_shard_size="40KB")
    batch = make_batch()
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(stock(**batch).logits, streamed(**batch).logits)
    mine = streamed.generate(**batch, max_new_tokens=5, do_sample=False)
    assert torch.equal(mine, stock.generate(**batch, max_new_tokens=5, do_sample=False))
    names = {name for name, _ in streamed.named_parameters()}
    assert not any(name.endswith(("experts.gate_up_proj", "experts.down_proj")) for name in names)
    assert streamed.moe_opt.last_step.active_experts.tolist() == stock.moe_opt.last_step.active_experts.tolist()


def test_recorder_counts_as_before(tmp_path: Path) -> None:
    stock, streamed = both(tmp_path, "qwen3_moe", "offload")
    batch = make_batch()
    counts = []
    for model in (stock, streamed):
        with torch.no_grad(), model.moe_opt.record(num_requests=3) as recorder:
            model(**batch)
        counts.append(recorder.counts)
    assert torch.equal(*counts)


def test_buffers_are_made_once(tmp_path: Path) -> None:
    _, streamed = both(tmp_path, "qwen3_moe", {"window": 1})
    stream = streamed.moe_opt.async_ep
    places = [value.data_ptr() for buffer in stream._buffers for value in buffer.values()]
    with torch.no_grad():
        for _ in range(3):
            streamed(**make_batch())
    assert places == [value.data_ptr() for buffer in stream._buffers for value in buffer.values()]
    layer = sum(p.numel() * 4 for n, p in make_stock("qwen3_moe").named_parameters() if "layers.0.mlp.experts" in n)
    assert stream.buffer_bytes == 2 * layer
    assert stream.resident_bytes == 0
    assert 0 <= stream.hidden_share <= 1


def test_a_broken_off_pass_leaves_nothing_behind(tmp_path: Path) -> None:
    stock, streamed = both(tmp_path, "qwen3_moe", {"window": 2})
    batch = make_batch()
    layer = streamed.model.layers[1]

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("broken off")

    for module in (layer.mlp.gate, streamed.model.layers[2].self_attn, layer.input_layernorm):
        handle = module.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="broken off"):
            streamed(**batch)
        handle.remove()
        with torch.no_grad():
            assert torch.equal(stock(**batch).logits, streamed(**batch).logits)


def test_engine_serves_streamed_experts(demo_model_dir: Path) -> None:
    from moe_opt.serving.engine.config import EngineConfig
    from moe_opt.serving.engine.engine import Engine
    from moe_opt.serving.engine.types import FinishEvent, GenerationRequest, SamplingParams

    settings: Any = {"async_ep": "offload"}
    model = MoEOptimizedForCausalLM.from_pretrained(demo_model_dir, moe_opt=settings, dtype=torch.float32)
    stock = MoEOptimizedForCausalLM.from_pretrained(demo_model_dir, moe_opt=True, dtype=torch.float32)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model_dir)
    ids = tokenizer("The court held that", return_tensors="pt").input_ids
    expected = stock.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)[0, ids.shape[1] :].tolist()
    engine = Engine(model, tokenizer, EngineConfig(max_total_tokens=128))
    engine.add(GenerationRequest("a", tuple(ids[0].tolist()), SamplingParams(max_new_tokens=8, ignore_eos=True)), None)
    events = []
    while engine.has_work:
        events += [event for _, event in engine.step()]
    engine.close()
    tokens = [event.token.id for event in events if not isinstance(event, FinishEvent) and hasattr(event, "token")]
    assert tokens[:8] == expected


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_two_ranks_gather(tmp_path: Path, family: str) -> None:
    base = {**save_case(tmp_path, family, 2), "feature": "async_ep"}
    cases = [{**base, "settings": {"mode": mode, "window": window}} for mode, window in (("gather", 1), ("both", 2))]
    cases[0]["generate"] = True
    for rank, found in enumerate(run_group(tmp_path, 2, cases)):
        for result in found:
            assert result["difference"] < 1e-5
        assert found[0]["tokens"] == base["tokens"][rank]


def test_four_ranks_gather_one_of_them_idle(tmp_path: Path) -> None:
    base = {**save_case(tmp_path, "qwen3_moe", 4), "feature": "async_ep"}
    for found in run_group(tmp_path, 4, [{**base, "settings": "gather"}, {**base, "settings": "both"}]):
        for result in found:
            assert result["difference"] < 1e-5


_LIMITED = """
import json, os, sys, threading, time
import torch
from moe_opt import MoEOptimizedForCausalLM
torch.set_num_threads(1)
def anonymous():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
before, peak = anonymous(), 0
def watch():  # what a container's memory limit does: the process ends when it holds more
    global peak
    while True:
        peak = max(peak, anonymous() - before)
        if peak > int(sys.argv[2]):
            os._exit(9)
        time.sleep(0.002)
threading.Thread(target=watch, daemon=True).start()
settings = {"async_ep": {"mode": "offload", "window": 1}} if sys.argv[3] == "offload" else True
model = MoEOptimizedForCausalLM.from_pretrained(sys.argv[1], moe_opt=settings, dtype=torch.float32).eval()
with torch.no_grad():
    for _ in range(3):
        logits = model(torch.arange(3, 35).view(2, 16), use_cache=False).logits
stream = model.moe_opt.async_ep
other = sum(p.numel() * p.element_size() for p in model.parameters())
print(json.dumps({"peak": peak, "computed": other + (stream.buffer_bytes if stream else 0),
                  "sum": float(logits.double().sum())}))
"""


def test_a_model_of_three_times_the_memory_runs(tmp_path: Path) -> None:
    """400 MB of experts under a limit of a third of the model, in a process of its own; measured against computed."""
    from transformers import AutoModelForCausalLM

    config = make_config("qwen3_moe", num_hidden_layers=12, hidden_size=256, moe_intermediate_size=256, num_experts=43)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    size = sum(p.numel() * 4 for p in model.parameters())
    model.save_pretrained(tmp_path / "model", max_shard_size="60MB")
    with torch.no_grad():
        expected = float(model.eval()(torch.arange(3, 35).view(2, 16), use_cache=False).logits.double().sum())

    def run(limit: int, mode: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-c", _LIMITED, str(tmp_path / "model"), str(limit), mode]
        return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)

    assert size > 400e6
    limited = run(size // 3, "offload")
    assert limited.returncode == 0, limited.stderr[-2000:]
    found = json.loads(limited.stdout.splitlines()[-1])
    assert found["sum"] == pytest.approx(expected, rel=1e-4)
    # Code, workspaces and activations stand beside the weights: some MB whatever the model's size.
    assert found["peak"] < 1.1 * found["computed"] + 40e6
    assert run(size // 3, "plain").returncode == 9, "without streaming the same limit is too tight"


def test_settings_and_what_cannot_work(tmp_path: Path) -> None:
    assert MoEOptConfig(async_ep="offload").to_dict()["async_ep"] == {"mode": "offload", "window": 1}
    with pytest.raises(ConfigError, match="unknown async_ep mode"):
        MoEOptConfig(async_ep="fast")
    with pytest.raises(ConfigError, match="window must be"):
        MoEOptConfig(async_ep={"window": 0})
    with pytest.raises(ConfigError, match="choose one"):
        MoEOptConfig(async_ep="offload", expert_parallel=True)
    with pytest.raises(ConfigError, match="from_pretrained"):
        MoEOptimizedForCausalLM.from_config(make_config("qwen3_moe"), moe_opt={"async_ep": "offload"})
    _, streamed = both(tmp_path, "qwen3_moe", "offload")
    with pytest.raises(ConfigError, match="saves nothing while whole layers are streamed"):
        streamed.moe_opt.set_brownout(threshold=0.5, strategy="full")
    with pytest.raises(ConfigError, match="streamed and not in it"):
        streamed.save_pretrained(tmp_path / "copy")


def test_a_layout_that_is_not_known_is_named(tmp_path: Path) -> None:
    make_stock("granitemoe").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="weight streaming does not know"):
        MoEOptimizedForCausalLM.from_pretrained(tmp_path, moe_opt={"async_ep": "offload"})


def test_auto_says_what_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    import moe_opt.modeling.async_ep as async_ep

    make_stock("qwen3_moe").save_pretrained(tmp_path)
    model = MoEOptimizedForCausalLM.from_pretrained(tmp_path, moe_opt={"async_ep": "auto"})
    assert model.moe_opt.async_ep is None, "it fits"
    monkeypatch.setattr(async_ep, "needs_streaming", lambda *_: True)
    with caplog.at_level("WARNING", logger="moe_opt"):
        model = MoEOptimizedForCausalLM.from_pretrained(tmp_path, moe_opt={"async_ep": "auto"})
    assert model.moe_opt.async_ep is not None
    assert "does not fit the free memory" in caplog.text


def test_damaged_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no safetensors files"):
        MappedCheckpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((5).to_bytes(8, "little") + b"{bad}" + b"\0" * 50)
    with pytest.raises(ConfigError, match="is no safetensors file"):
        MappedCheckpoint(tmp_path)
