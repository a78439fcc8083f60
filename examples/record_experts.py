"""Record which experts each request uses, in prefill and in decode: the raw material of expert signatures.

python examples/record_experts.py [MODEL]
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import moe_opt  # noqa: F401 - gives from_pretrained its moe_opt keyword

source = sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).parent / "demo_model")
tokenizer = AutoTokenizer.from_pretrained(source)
model = AutoModelForCausalLM.from_pretrained(source, moe_opt=True)

prompts = {
    "code": "def count_words(text):\n    words = text.split()",
    "code again": "function area(width, height) {\n    return width",
    "Russian": "Вечером, когда все уже сидели за столом, в комнату вошёл",
}
batch = tokenizer(list(prompts.values()), return_tensors="pt", padding=True, padding_side="left")
with model.moe_opt.record(num_requests=len(prompts)) as rec:
    model.generate(**batch, max_new_tokens=16, min_new_tokens=16, do_sample=False, pad_token_id=tokenizer.pad_token_id)

print("prefill counts [requests, layers, experts]:", tuple(rec.prefill.shape), rec.prefill.dtype)
flat = torch.nn.functional.normalize(rec.decode.flatten(1).double(), dim=1)
print("\nlikeness of the requests' decode experts (cosine):")
for name, row in zip(prompts, flat @ flat.T, strict=True):
    print(f"  {name:<11}" + "".join(f"{value:7.2f}" for value in row.tolist()))
