"""Fit expert signatures on calibration prompts, save them, and let them route requests.

python examples/fit_signatures.py                                # planted routing, no data needed
python examples/fit_signatures.py esft_dsv2lite_token_routing.npz   # real routing of DeepSeek-V2-Lite (ESFT)
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

from moe_opt.cluster import Request, Worker, make_policy
from moe_opt.cluster.expert_counts import split_sequences
from moe_opt.cluster.signature import SignatureModel

WORKERS = 4


def planted() -> tuple[np.ndarray, np.ndarray, list[str]]:
    """200 prompts of four kinds over 8 layers of 32 experts; each kind prefers experts of its own."""
    rng = np.random.default_rng(0)
    kind = rng.integers(0, 4, 200)
    probs = rng.gamma(0.3, size=(4, 8, 32))[kind] * rng.gamma(3.0, size=(200, 8, 32))
    probs /= probs.sum(axis=-1, keepdims=True)
    return rng.poisson(probs * 400), rng.poisson(probs * 400) / 100, [f"kind {k}" for k in kind]


def from_esft(path: str) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """First half of each published sequence as prefill, the rest as decode."""
    arrays = np.load(path)
    tasks = ("intent", "law", "summary", "translation")
    parts = [split_sequences(arrays[f"{task}_ids"], arrays[f"{task}_seq"], num_experts=64) for task in tasks]
    names = [task for task, (counts, _) in zip(tasks, parts, strict=True) for _ in counts]
    return np.concatenate([p for p, _ in parts]), np.concatenate([d for _, d in parts]), names


prefill, decode, kinds = from_esft(sys.argv[1]) if len(sys.argv) > 1 else planted()
model = SignatureModel.fit(prefill, decode, WORKERS)
rounded = {name: round(rho, 3) for name, rho in model.cross_validated_rho.items()}
print(f"{len(prefill)} prompts, {model.num_layers} layers of {model.num_experts} experts")
print(f"weighting {model.weighting!r} (held-out rho {rounded})")
print(f"layers kept {list(model.layers)}, rho {model.rho:.3f}")

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "signatures.npz"
    model.save(path)
    print(f"saved in {path.stat().st_size / 1000:.0f} kB")
    model = SignatureModel.load(path)

policy = make_policy("eldr", signature_model=model, tau=0.1)
workers = [Worker(f"decode-{k}", max_running=len(prefill)) for k in range(WORKERS)]
waiting = [Request(i, 100, signature=signature) for i, signature in enumerate(model.transform(prefill))]
placed = {a.request_id: a.worker_id for a in policy.assign(waiting, workers, now=0.0)}
for worker in workers:
    here = [kinds[i] for i, worker_id in placed.items() if worker_id == worker.id]
    print(f"{worker.id}: {len(here)} requests,", {kind: here.count(kind) for kind in sorted(set(here))})
