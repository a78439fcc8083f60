"""What does brownout cost this model? A small grid on held-out text, exact against browned out.

python examples/evaluate_brownout.py [MODEL] [TEXTS.jsonl.gz ...]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from moe_opt import UnitedExperts
from moe_opt.evaluation.command import load_model
from moe_opt.evaluation.grid import GridOptions, Setting, evaluate_grid
from moe_opt.evaluation.texts import domain_name, make_rows, read_texts

HERE = Path(__file__).resolve().parent
DATA = Path(os.environ.get("MOE_OPT_DATA", HERE.parent.parent / "shared" / "data"))


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "demo_model"
    files = [Path(name) for name in sys.argv[2:]] or [
        DATA / "corpus" / f"corpus_{domain}.jsonl.gz" for domain in ("code", "legal", "math")
    ]
    model, tokenizer = load_model(str(path))

    # Trained united experts lie beside the demo model; any other model gets untrained means.
    trained = (path / "united" / "ways-4").is_dir()
    four = UnitedExperts.from_pretrained(path / "united", ways=4) if trained else UnitedExperts.from_average(model, 4)

    # Only texts that nothing was trained on, 32 rows that decode together, one token a step.
    texts = {domain_name(file): read_texts(file, split="held-out") for file in files}
    rows = make_rows(texts, tokenizer, length=48, tokens=48 * 32)
    results = evaluate_grid(
        model,
        tokenizer,
        [Setting("partial", 0.2, "4-way"), Setting("full", 0.2), Setting("top-k", 0.2), Setting("reroute", 0.2)],
        united={"4-way": four},
        decode_rows=rows,
        options=GridOptions(phases=("decode",), decode_batch=32, prompt=16, timing_repeats=3, progress=False),
    )
    exact = results["exact"]["decode"]
    print(
        f"exact output: accuracy {exact['accuracy']:.3f}, {exact['experts_read']:.1f} experts read per layer and step"
    )
    print(f"{'threshold 0.2':20} {'loss':>16} {'experts read':>13} {'step time':>10}")
    for cell in results["cells"]:
        name = ("trained " if trained else "average ") + cell["united"] if cell["united"] else cell["strategy"]
        loss = f"{100 * cell['relative_loss']:.1f} ± {100 * cell['relative_loss_se']:.1f} %"
        print(f"{name:20} {loss:>16} {cell['experts_read']:>13.1f} {cell['step_time_ratio']:>9.2f}x")


if __name__ == "__main__":
    main()
