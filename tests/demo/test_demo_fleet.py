"""The fleet stage of the demo on fewer requests: every policy answers all, and the table says what was counted."""

import asyncio

from moe_opt.demo import fleet as demo
from moe_opt.serving.calibrate import collect, fit
from moe_opt.serving.launcher import FleetPlan, LocalFleet
from moe_opt.workloads.sample_texts import calibration_prompts


def test_policies_share_one_fleet_and_all_requests_are_answered(demo_model_dir, tmp_path):
    async def main():
        flags = ("--max-batch-size", "16", "--dtype", "float32")
        fleet = LocalFleet(FleetPlan(str(demo_model_dir), prefill=1, decode=2, flags=flags))
        await fleet.start()
        try:
            path = tmp_path / "signatures.npz"
            prompts = calibration_prompts()[::2]
            fit(await collect(fleet.specs[1].url, prompts, output_tokens=8), num_workers=2).save(path)
            return [await demo.measure(fleet, policy, str(path), demo.burst(24)) for policy in ("round-robin", "eldr")]
        finally:
            await fleet.end()

    results = asyncio.run(main())
    for result in results:
        assert result.ok == result.requests == 24
        assert 4 <= result.active_experts <= 32  # top-4 of 32
        assert 0 < result.experts_per_token < result.active_experts
        assert result.tpot_p50 <= result.tpot_p99
    table = demo.table(results)
    assert "| round-robin |    24/24 |" in table
    assert "| eldr" in table
