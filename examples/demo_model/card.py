"""Writes the model card README.md and the picture expert_use.png from metrics.json.

python examples/demo_model/card.py --model examples/demo_model
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from string import Template
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

NAMES = {
    "code": "code",
    "math": "mathematics",
    "medical": "medicine",
    "legal": "law",
    "general": "prose and drama",
    "lang_de": "German",
    "lang_es": "Spanish",
    "lang_fr": "French",
    "lang_ru": "Russian",
    "lang_zh": "Chinese",
}
LANGUAGES = {
    "en": "English",
    "de": "German",
    "es": "Spanish",
    "fr": "French",
    "ru": "Russian",
    "zh": "Chinese",
}


def draw_expert_use(use: dict[str, list[list[float]]], top_k: int, path: Path) -> None:
    """One panel a layer: how much more often than an average expert each expert is read, domain by domain."""
    shares = np.array([use[domain] for domain in NAMES])  # [domains, layers, experts]
    domains, layers, experts = shares.shape
    relative = shares * experts / top_k
    figure, axes = plt.subplots((layers + 1) // 2, 2, figsize=(15, 2.5 * ((layers + 1) // 2) + 1), layout="constrained")
    for layer, axis in enumerate(axes.flat):
        panel = relative[:, layer]
        # Experts stand under the domain that reads them most, so that what belongs to a domain forms a block.
        order = np.lexsort((-panel.max(axis=0), panel.argmax(axis=0)))
        image = axis.imshow(panel[:, order], aspect="auto", cmap="magma_r", vmin=0, vmax=5)
        axis.set_title(f"layer {layer}", fontsize=11)
        axis.set_xticks(range(experts), order, fontsize=7)
        axis.set_yticks(range(domains), list(NAMES.values()), fontsize=9)
        axis.set_xticks(np.arange(experts + 1) - 0.5, minor=True)
        axis.set_yticks(np.arange(domains + 1) - 0.5, minor=True)
        axis.grid(which="minor", color="white", linewidth=0.6)
        axis.tick_params(which="both", length=0)
    bar = figure.colorbar(image, ax=axes, shrink=0.6, extend="max", pad=0.01)
    bar.set_label("times as often as under even use")
    figure.suptitle("Experts read by held-out texts (numbers: expert ids, grouped by the domain that reads them most)")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|---" + "|---:" * (len(header) - 1) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def loss_table(first: str, rows: dict[str, dict[str, float]], names: dict[str, str]) -> str:
    header = [first, "tokens", "unigram", "trigram", "**demo model**", "below trigram", "bits per byte"]
    body = []
    for key, name in names.items():
        row = rows[key]
        body.append(
            [
                name,
                f"{row['tokens']:,}",
                f"{row['unigram']:.2f}",
                f"{row['trigram']:.2f}",
                f"**{row['model']:.2f}**",
                f"{row['trigram'] - row['model']:.2f}",
                f"{row['model_bits_per_byte']:.2f}",
            ]
        )
    return table(header, body)


def locality_table(measured: dict[str, dict[str, dict[str, float]]]) -> str:
    titles = {"all": "all ten domains", "tasks": "the five tasks", "languages": "the five languages"}
    body = [
        [
            titles[mix],
            size,
            f"{row['same_domain']:.1f}",
            f"{row['mixed']:.1f}",
            f"**{row['fewer_percent']:.0f} %**",
        ]
        for mix, sizes in measured.items()
        for size, row in sizes.items()
    ]
    return table(["drawn from", "requests", "same domain", "mixed", "fewer"], body)


def sample_list(samples: dict[str, dict[str, str]]) -> str:
    def quoted(text: str) -> str:
        return " ".join(text.split()).replace("`", "'").replace("|", "\\|").replace("�", "")

    rows = [[NAMES[key], quoted(s["prompt"]), quoted(s["continuation"])] for key, s in samples.items()]
    return table(["domain", "start of a held-out text", "continuation"], rows).replace("---:", "---")


def write_card(metrics: dict[str, Any], template: Path, path: Path) -> None:
    sizes, training = metrics["sizes"], metrics["training"]
    held_out, special = metrics["held_out"], metrics["specialisation"]
    card = Template(template.read_text()).substitute(
        parameters=f"{sizes['parameters'] / 1e6:.1f}",
        weight_mb=f"{sizes['weight_bytes'] / 1e6:.1f}",
        expert_mb=f"{sizes['routed_expert_bytes'] / 1e6:.1f}",
        steps=f"{training['steps']:,}",
        tokens=f"{training['tokens'] / 1e6:.1f}",
        corpus=f"{metrics['corpus_tokens'] / 1e6:.1f}",
        passes=f"{training['tokens'] / metrics['corpus_tokens']:.1f}",
        minutes=f"{training['minutes']:.0f}",
        tokens_per_step=f"{training['tokens_per_step']:,}",
        length=training["sequence_length"],
        double_length=2 * training["sequence_length"],
        learning_rate=training["learning_rate"],
        weight_decay=training["weight_decay"],
        muon_scale=training["muon_scale"],
        exponent=training["domain_exponent"],
        all_model=f"{held_out['all']['model']:.2f}",
        all_trigram=f"{held_out['all']['trigram']:.2f}",
        all_unigram=f"{held_out['all']['unigram']:.2f}",
        domain_table=loss_table("domain", held_out["domains"], NAMES),
        language_table=loss_table("language", held_out["languages"], LANGUAGES),
        locality_table=locality_table(special["distinct_experts"]),
        requests=special["requests"],
        prefill=special["prefill_tokens"],
        decode=special["decode_tokens"],
        correlation=f"{special['prefill_decode_correlation']:.2f}",
        rho=f"{special['signature_rho']:.2f}",
        smallest=f"{special['smallest_load']:.2f}",
        largest=f"{special['largest_load']:.2f}",
        samples=sample_list(metrics["samples"]),
    )
    path.write_text(card)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("examples/demo_model"))
    args = parser.parse_args()
    metrics = json.loads((args.model / "metrics.json").read_text())
    config = json.loads((args.model / "config.json").read_text())
    draw_expert_use(metrics["specialisation"]["use"], config["num_experts_per_tok"], args.model / "expert_use.png")
    write_card(metrics, Path(__file__).with_name("card_template.md"), args.model / "README.md")
    print(f"written {args.model / 'README.md'} and {args.model / 'expert_use.png'}")


if __name__ == "__main__":
    main()
