"""Loss of united experts over all held-out text, pooled as it comes, at the settings that the project asks for.

    python benchmarks/held_out.py [--united PATH] [--settings 2:0 4:0.2 8:0.4 8:0] [--sequences 96]

The cards of the checkpoints have the first 96 sequences; this takes every one there is (crc32 of a text a multiple of
20: no recipe trains on those). Beside the loss of next-token accuracy stand its paired standard error, the share of
tokens on which both outputs agree, and the ratio of perplexities: training with the text's own tokens can raise
accuracy without bringing the output nearer to the exact one, and these two would tell.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import write_result
from table1 import PAPER, TARGETS, THRESHOLDS
from torch.nn import functional

from moe_opt import UnitedExperts, attach_united_experts
from moe_opt.distill.config import DistillConfig
from moe_opt.distill.data import first_sequences, load_tokenizer
from moe_opt.distill.pipeline import load_teacher
from moe_opt.evaluation.losses import compare_tokens

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = [(2, 0.0), (4, 0.2), (8, 0.4), (8, 0.0)]


@dataclasses.dataclass
class Output:
    """Of one setting, over all scored tokens: predicted ids and nats, and the experts read per layer and step."""

    predicted: np.ndarray
    nll: np.ndarray
    experts_read: float


@torch.inference_mode()
def output_of(model: Any, sequences: torch.Tensor, batch_size: int) -> Output:
    """Teacher-forced, `batch_size` of the sequences int64 [N, S] to a step, under the model's current brownout."""
    predicted, nll, reads = [], [], []
    for batch in sequences.split(batch_size):
        logits = model(batch, use_cache=False).logits[:, :-1]
        for scores, labels in zip(logits, batch[:, 1:], strict=True):  # one row's logits in fp32 at a time
            predicted.append(scores.argmax(-1))
            nll.append(functional.cross_entropy(scores.float(), labels, reduction="none"))
        reads.append(float(model.moe_opt.last_step.active_experts.float().mean()))
    return Output(torch.cat(predicted).numpy(), torch.cat(nll).double().numpy(), float(np.mean(reads)))


def setting(text: str) -> tuple[int, float]:
    """ "8:0.4" as (8, 0.4)."""
    ways, found, threshold = text.partition(":")
    try:
        if not found or not 0 <= float(threshold) <= 1:
            raise ValueError(text)
        return int(ways), float(threshold)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: give WAYS:THRESHOLD, for example 8:0.4") from error


def of_the_paper(ways: int, threshold: float) -> float | None:
    """Loss in % of Table I, where it has that cell."""
    losses = PAPER.get(f"{ways}-way")
    return losses[THRESHOLDS.index(threshold)] if losses and threshold in THRESHOLDS else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(ROOT / "recipes" / "demo.yaml"), help="whose model and held-out data")
    parser.add_argument("--united", default=str(ROOT / "examples" / "demo_model" / "united"))
    parser.add_argument("--settings", nargs="+", type=setting, default=SETTINGS, metavar="WAYS:THRESHOLD")
    parser.add_argument("--sequences", type=int, default=1_000_000, help="at most so many; all of them by default")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", default="held_out")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    config = DistillConfig.from_yaml(args.config, {"output": "unused"})
    sequences = first_sequences(config.data, load_tokenizer(config.model.name, None), args.sequences, 0, held_out=True)
    if sequences is None:
        raise SystemExit(f"the data of {args.config} holds less than one held-out sequence")
    model = load_teacher(config, torch.device("cpu"))
    labels = sequences[:, 1:].reshape(-1).numpy()
    rows = np.repeat(np.arange(len(sequences)), sequences.shape[1] - 1)
    exact = output_of(model, sequences, args.batch_size)
    cells = []
    for ways, threshold in args.settings:
        asked, paper = TARGETS.get((f"{ways}-way", threshold)), of_the_paper(ways, threshold)
        attach_united_experts(model, UnitedExperts.from_pretrained(args.united, ways=ways))
        model.moe_opt.set_brownout(threshold=threshold, strategy="partial")
        found = output_of(model, sequences, args.batch_size)
        model.moe_opt.remove_united()
        figures = compare_tokens(found.predicted == labels, exact.predicted == labels, found.nll, exact.nll, rows)
        cells.append(
            {
                "ways": ways,
                "threshold": threshold,
                **figures,
                "agreement": float((found.predicted == exact.predicted).mean()),
                "experts_read": found.experts_read,
                "asked_percent": asked,
                "paper_percent": paper,
            }
        )
        loss, error = 100 * figures["relative_loss"], 100 * figures["relative_loss_se"]
        print(
            f"({ways}, {threshold:g}): {loss:.2f} ± {error:.2f} % lost, "
            f"agreement {100 * cells[-1]['agreement']:.1f} %, perplexity x{figures['perplexity_ratio']:.3f}, "
            f"{found.experts_read:.1f} of {exact.experts_read:.1f} experts read; asked {asked}, paper {paper}",
            flush=True,
        )
    write_result(
        args.out,
        {
            "model": Path(config.model.name).name,
            "sequences": list(sequences.shape),
            "batch_size": args.batch_size,
            "exact": {"experts_read": exact.experts_read, "accuracy": float((exact.predicted == labels).mean())},
            "cells": cells,
        },
    )


if __name__ == "__main__":
    main()
