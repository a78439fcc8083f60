"""Train united experts for the demo model in a few seconds, then see what they cost and save.

The text is this repository's own documentation, which keeps the example small; recipes/demo.yaml is the
real thing.

    python examples/distill_united.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch

from moe_opt import MoEOptConfig, MoEOptimizedForCausalLM
from moe_opt.distill import DistillConfig, distill
from moe_opt.distill.config import DataSettings, MeasureSettings, ModelSettings, StageSettings, TrainingSettings

torch.set_num_threads(1)
root = Path(__file__).resolve().parent.parent
demo_model = str(root / "examples" / "demo_model")

with tempfile.TemporaryDirectory() as folder:
    text = Path(folder) / "docs.jsonl"
    pages = sorted(root.glob("docs/**/*.md"))
    paragraphs = [part for page in pages for part in page.read_text(encoding="utf-8").split("\n\n")]
    text.write_text("".join(json.dumps({"text": part}) + "\n" for part in paragraphs))

    recipe = DistillConfig(
        model=ModelSettings(name=demo_model, dtype="float32"),
        data=DataSettings(path="json", data_files=[str(text)], length=128, held_out=20),
        ways=[8],
        calibration_tokens=4096,
        logits=StageSettings(steps=4, learning_rate=1e-3, threshold=[0.0, 0.5]),
        training=TrainingSettings(batch_size=4, plan_size=4, logging_steps=1, use_cpu=True),
        measure=MeasureSettings(sequences=8, batch_size=4, thresholds=[0.0, 0.4]),
        output=str(Path(folder) / "united"),
    )
    distill(recipe)

    model = MoEOptimizedForCausalLM.from_pretrained(
        demo_model, moe_opt=MoEOptConfig(united_experts=recipe.output, ways=8)
    )
    model.moe_opt.set_brownout(threshold=0.4)
    with torch.no_grad():
        model(torch.randint(10, 1000, (4, 128)))
    step = model.moe_opt.last_step
    print(f"experts the router chose, per layer: {step.routed_experts.tolist()}")
    print(f"experts read at threshold 0.4:       {step.active_experts.tolist()}")
