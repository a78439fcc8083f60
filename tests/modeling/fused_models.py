"""One model on Transformers' experts kernel and on ours."""

import torch
from families import make_config

from moe_opt import MoEOptimizedForCausalLM, UnitedExperts, attach_united_experts


def assert_equal_on_both_kernels(strategy: str, threshold: float) -> None:
    """Logits and experts read are the same under brownout."""
    models = []
    for kernels in ("grouped_mm", "fused"):
        model = MoEOptimizedForCausalLM.from_config(
            make_config("qwen2_moe"), dtype=torch.float32, moe_opt={"kernels": kernels}
        ).eval()
        if models:
            model.load_state_dict(models[0].state_dict(), strict=False)
        models.append(model)
    for model in models:
        attach_united_experts(model, UnitedExperts.from_average(models[0], ways=4))
        model.moe_opt.set_brownout(threshold=threshold, strategy=strategy)
    ids = torch.arange(3, 19).view(2, 8)
    with torch.inference_mode():
        first, second = (model(ids).logits for model in models)
    torch.testing.assert_close(first, second, atol=1e-4, rtol=1e-3)
    assert torch.equal(models[0].moe_opt.last_step.active_experts, models[1].moe_opt.last_step.active_experts)
