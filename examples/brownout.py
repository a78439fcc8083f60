"""Brown a model out by hand: load with `moe_opt=True`, attach united experts, turn thresholds, see what was read.

python examples/brownout.py [MODEL]
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import moe_opt

source = sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).parent / "demo_model")
tokenizer = AutoTokenizer.from_pretrained(source)
model = AutoModelForCausalLM.from_pretrained(source, moe_opt=True)
runtime = model.moe_opt

trained = Path(source) / "united"
if trained.is_dir():
    united = moe_opt.UnitedExperts.from_pretrained(trained, ways=4)
else:
    united = moe_opt.UnitedExperts.from_average(model, ways=4)
moe_opt.attach_united_experts(model, united)

prompts = ["def add(a, b):", "What are the symptoms of asthma?", "The Minister may, by order,", "Он вошёл в комнату"]
batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
for threshold in (1.0, 0.6, 0.2):
    runtime.set_brownout(threshold=threshold)
    with torch.no_grad():
        out = model.generate(**batch, max_new_tokens=12, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    step = runtime.last_step
    print(f"threshold {threshold}: experts read per layer in the last decode step {step.active_experts.tolist()}")
    print("   ", repr(tokenizer.decode(out[0, batch["input_ids"].shape[1] :])))

# One phase, one layer range, another strategy; what is left out stays as it is.
runtime.set_brownout(threshold=1.0)
runtime.set_brownout(threshold=0.5, strategy="reroute", phase="decode", layers=range(1, runtime.num_layers - 1))
print(runtime.brownout("decode"))
