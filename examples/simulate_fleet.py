"""Three routers on one simulated fleet: eight data-parallel ranks that wait for each other at every step.

Runs in a few seconds without a GPU: `python examples/simulate_fleet.py`. With the shared data folder
(MOE_OPT_DATA) it replays the Azure conversation trace, otherwise a synthetic one of the same shape."""

from __future__ import annotations

import numpy as np

from moe_opt.cluster import make_policy
from moe_opt.devices import device_preset
from moe_opt.errors import ConfigError
from moe_opt.report import markdown_table
from moe_opt.simulate import FleetConfig, StepCost, get_model, simulate
from moe_opt.workloads import TraceRequest, load_trace


def requests() -> list[TraceRequest]:
    """A conversation trace: long prompts, short answers, heavy tails."""
    try:
        return load_trace("azure-conv", limit=4000)
    except ConfigError:
        rng = np.random.default_rng(0)
        prompts, outputs = rng.lognormal(6.5, 1.1, 4000), rng.lognormal(4.9, 0.9, 4000)
        lengths = zip(prompts.astype(int) + 1, outputs.astype(int) + 1, strict=True)
        return [TraceRequest(f"r{i}", 0.0, int(p), int(o)) for i, (p, o) in enumerate(lengths)]


def main() -> None:
    """Heavy load: 128 requests always wait, as in BalanceRoute's Table 1."""
    trace = requests()
    cost = StepCost.of(get_model("qwen3-235b-a22b"), device_preset("H100"))
    fleet = FleetConfig.uniform(workers=8, slots=32, pool_depth=128)
    rows = []
    for name in ("jsq", "br-0", "br-h"):
        result = simulate(trace, make_policy(name), fleet, cost, max_steps=1500)
        figures = result.summary(warmup_steps=300, min_waiting=128)
        rows.append([name, figures["imbalance"], figures["tpot_p50"] * 1e3, figures["throughput"]])
    print(markdown_table(["policy", "max - min KV load (tokens)", "TPOT p50 (ms)", "tokens/s"], rows))
    print("\nbr-h sees the true remaining lengths here; give it predictor='survival' to do without.")


if __name__ == "__main__":
    main()
