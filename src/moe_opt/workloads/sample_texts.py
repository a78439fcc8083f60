"""Texts of ten domains and languages that this project wrote: for demos, and to calibrate where the user has none."""

from __future__ import annotations

import json
from importlib.resources import files


def sample_texts() -> tuple[dict[str, list[str]], dict[str, str]]:
    """(domain -> texts, domain -> prompt)."""
    texts: dict[str, list[str]] = {}
    prompts: dict[str, str] = {}
    for line in files("moe_opt.workloads").joinpath("sample_texts.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "prompt" in row:
            prompts[row["domain"]] = row["prompt"]
        else:
            texts.setdefault(row["domain"], []).append(row["text"])
    return texts, prompts


def calibration_prompts(characters: int = 160) -> list[str]:
    """The texts in pieces of about so many characters, cut between words; some hundred of them."""
    texts, prompts = sample_texts()
    pieces = list(prompts.values())
    for text in (text for group in texts.values() for text in group):
        count = max(1, round(len(text) / characters))
        size = -(-len(text) // count)
        start = 0
        while start < len(text):
            end = start + size
            blank = text.find(" ", end)
            end = len(text) if blank < 0 or len(text) - blank < size // 3 else blank
            pieces.append(text[start:end].strip() if start else text[:end])
            start = end
    return [piece for piece in pieces if piece]
