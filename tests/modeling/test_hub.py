"""Publishing and loading united experts by Hub id, against a server that speaks the Hub's HTTP API.

The client side runs in a process of its own, because `huggingface_hub` reads HF_ENDPOINT and HF_HUB_OFFLINE once, when
it is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from hub_server import Hub, running_hub

HERE = Path(__file__).resolve().parent

CLIENT = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch
from families import make_stock
from moe_opt import MoEOptConfig, MoEOptimizedForCausalLM, UnitedExperts, attach_united_experts
from moe_opt.errors import MoEOptError

out, work = {}, Path(sys.argv[2])

def refusal(action):
    try:
        action()
    except MoEOptError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"

make_stock("qwen2_moe").save_pretrained(work / "base")
model = MoEOptimizedForCausalLM.from_pretrained(work / "base", moe_opt=True)
two, four = (UnitedExperts.from_average(model, ways) for ways in (2, 4))
two.config.recipe = {"model": {"licence": "apache-2.0"}, "data": {"data_files": ["text.jsonl"], "split": "train"}}
out["commit"] = two.push_to_hub("someone/one")
two.push_to_hub("someone/several", subfolder=True)
four.push_to_hub("someone/several", subfolder=True)

loaded = UnitedExperts.from_pretrained("someone/one")
out["same"] = all(torch.equal(a[k], b[k]) for a, b in zip(two.tensors, loaded.tensors) for k in a)
out["groups"] = loaded.config.groups == two.config.groups

first = out["commit"].rsplit("/", 1)[1]
for layer in two.tensors:
    for value in layer.values():
        value.add_(1.0)
two.push_to_hub("someone/one", commit_message="Second training")
newest = UnitedExperts.from_pretrained("someone/one")
pinned = UnitedExperts.from_pretrained("someone/one", revision=first)
out["newest"] = float(newest.tensors[0]["down_proj"].mean() - loaded.tensors[0]["down_proj"].mean())
out["pinned"] = all(torch.equal(a[k], b[k]) for a, b in zip(pinned.tensors, loaded.tensors) for k in a)
offline = UnitedExperts.from_pretrained("someone/one", revision=first, local_files_only=True)
out["from cache"] = torch.equal(offline.tensors[0]["down_proj"], pinned.tensors[0]["down_proj"])

out["picked"] = [UnitedExperts.from_pretrained("someone/several", ways=k).ways for k in (2, 4)]
by_config = MoEOptimizedForCausalLM.from_pretrained(
    work / "base", moe_opt=MoEOptConfig(united_experts="someone/several", ways=4))
out["by config"] = by_config.moe_opt.united_config.ways

out["ambiguous"] = refusal(lambda: UnitedExperts.from_pretrained("someone/several"))
out["no such ways"] = refusal(lambda: UnitedExperts.from_pretrained("someone/several", ways=8))
out["no such repository"] = refusal(lambda: UnitedExperts.from_pretrained("someone/nothing"))
out["no such revision"] = refusal(lambda: UnitedExperts.from_pretrained("someone/one", revision="no-branch"))

def other(**changes):
    from families import make_config
    return MoEOptimizedForCausalLM.from_config(make_config("qwen2_moe", **changes), dtype=torch.float32)

out["other weights"] = refusal(lambda: attach_united_experts(other(), pinned))
out["other experts"] = refusal(lambda: attach_united_experts(other(num_experts=12), pinned))
out["other layers"] = refusal(lambda: attach_united_experts(other(num_hidden_layers=2), pinned))
out["other width"] = refusal(lambda: attach_united_experts(other(hidden_size=64), pinned))
print("RESULT " + json.dumps(out))
"""


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with running_hub() as running:
        yield running


@pytest.fixture(scope="module")
def session(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What a user's session against the server returned, step by step."""
    folder = tmp_path_factory.mktemp("client")
    env = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HOME": str(folder / "home"),
        "HF_TOKEN": "hf_test",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
    }
    env.pop("HF_HUB_CACHE", None)
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, str(HERE), str(folder)], capture_output=True, text=True, env=env, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))[7:])


def test_what_is_pushed_is_what_is_loaded(session: dict[str, object], hub: Hub) -> None:
    assert session["same"]
    assert session["groups"]
    files = hub.repositories["someone/one"].commits[hub.repositories["someone/one"].branches["main"]]
    assert {"united_experts.safetensors", "united_experts_config.json", "README.md"} == set(files)
    assert not [name for name in files if name.endswith((".bin", ".pt", ".pkl"))]


def test_the_model_card_says_what_it_is_and_how_to_use_it(session: dict[str, object], hub: Hub) -> None:
    repository = hub.repositories["someone/one"]
    card = repository.commits[repository.branches["main"]]["README.md"].decode()
    assert card.startswith("---\nlibrary_name: moe_opt")
    assert "license: apache-2.0" in card
    assert "Trained on text.jsonl (train split)" in card
    assert "MoEOptConfig(united_experts=" in card


def test_a_revision_pins_the_weights_and_the_cache_serves_them_offline(session: dict[str, object]) -> None:
    assert abs(float(session["newest"]) - 1.0) < 1e-3  # type: ignore[arg-type]
    assert session["pinned"]
    assert session["from cache"]


def test_several_ways_share_a_repository_and_the_config_picks_one(session: dict[str, object], hub: Hub) -> None:
    assert session["picked"] == [2, 4]
    assert session["by config"] == 4
    repository = hub.repositories["someone/several"]
    files = repository.commits[repository.branches["main"]]
    assert {"ways-2/united_experts.safetensors", "ways-4/united_experts.safetensors", "README.md"} <= set(files)


@pytest.mark.parametrize(
    "case, says",
    [
        ("ambiguous", "holds united experts of 2, 4 ways: say which"),
        ("no such ways", "holds no 8-way united experts, only 2, 4"),
        ("no such repository", "no united experts at 'someone/nothing'"),
        ("no such revision", "no united experts at 'someone/one'"),
        ("other weights", "they belong to another model"),
        ("other experts", "3 MoE layers of 8 experts do not fit this model (3 layers of 12)"),
        ("other layers", "3 MoE layers of 8 experts do not fit this model (2 layers of 8)"),
        ("other width", "has shape"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_reason(session: dict[str, object], case: str, says: str) -> None:
    assert str(session[case]).startswith("IncompatibleUnitedExpertsError")
    assert says in str(session[case])


def test_only_the_needed_files_are_downloaded(session: dict[str, object], hub: Hub) -> None:
    downloads = {line.rpartition("/")[2] for line in hub.requests if "/resolve/" in line}
    assert downloads == {"united_experts.safetensors", "united_experts_config.json"}
