"""BalanceRoute's Table 3 on public traces: how well do the predictors of remaining length foresee the next 48
steps?

    python benchmarks/predictor_scores.py            # half a minute

"held out": trained on the first 70 % of a trace, scored on the rest. "online": scored on each 250 requests in
turn, which are then learned; means over the second half of the trace. AUC of "ends within H steps" and mean
absolute error in decode steps, given that it does; every request is asked about at the ages 0, 16, 32, ...
tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from common import write_result

from moe_opt.cluster import Request
from moe_opt.cluster.predictors import PredictorScore, make_predictor, score_predictor
from moe_opt.workloads import TraceRequest, load_trace

HORIZON = 48
LIMIT = 9000
CHUNK = 250
TRACES = {
    "azure-conv": ("azure-conv", 1),
    "azure-conv, 250 output tokens or more": ("azure-conv", 250),
    "azure-code": ("azure-code", 1),
    "mooncake-conv": ("mooncake-conv", 1),
    "mooncake-synthetic": ("mooncake-synthetic", 1),
}
PREDICTORS = ("survival", "exact-match", "length-bucket", "learned")


def as_finished(row: TraceRequest) -> tuple[Request, int]:
    """Mooncake names no prompts, but the same blocks are the same prompt."""
    prompt_hash = row.prompt_hash if row.prompt_hash is not None else (row.block_hashes or None)
    return Request(row.id, row.prompt_tokens, row.arrival, prompt_hash=prompt_hash), row.output_tokens


def held_out(name: str, finished: list[tuple[Request, int]]) -> PredictorScore:
    predictor: Any = make_predictor(name)
    split = len(finished) * 7 // 10
    for request, generated in finished[:split]:
        predictor.observe(request, generated)
    if name == "learned":
        predictor.refit(HORIZON)
    return score_predictor(predictor, finished[split:], HORIZON)


def online(name: str, finished: list[tuple[Request, int]]) -> tuple[float, float]:
    """(AUC, conditional MAE): means over the chunks of the second half."""
    predictor: Any = make_predictor(name)
    scores = []
    for start in range(0, len(finished) - CHUNK, CHUNK):
        chunk = finished[start : start + CHUNK]
        score = score_predictor(predictor, chunk, HORIZON)
        if start >= len(finished) // 2:
            scores.append((score.auc, score.conditional_mae))
        for request, generated in chunk:
            predictor.observe(request, generated)
    auc, mae = np.nanmean(scores, axis=0)
    return float(auc), float(mae)


def main() -> None:
    rows = []
    print("| trace | predictor | AUC, held out | MAE, held out | AUC, online | MAE, online |")
    print("|---|---|---|---|---|---|")
    for label, (trace, min_output) in TRACES.items():
        requests = [row for row in load_trace(trace) if row.output_tokens >= min_output][:LIMIT]
        finished = [as_finished(row) for row in requests]
        for name in PREDICTORS:
            score = held_out(name, finished)
            online_auc, online_mae = online(name, finished)
            rows.append(
                {
                    "trace": label,
                    "requests": len(finished),
                    "predictor": name,
                    "held_out": {k: round(v, 4) for k, v in score._asdict().items()},
                    "online": {"auc": round(online_auc, 4), "conditional_mae": round(online_mae, 2)},
                }
            )
            print(
                f"| {label} | {name} | {score.auc:.3f} | {score.conditional_mae:.1f} "
                f"| {online_auc:.3f} | {online_mae:.1f} |",
                flush=True,
            )
    write_result("predictor_scores", {"horizon": HORIZON, "rows": rows})


if __name__ == "__main__":
    main()
