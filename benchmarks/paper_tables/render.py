"""docs/reproduction.md from benchmarks/results/paper_tables.json: every figure of the page comes from that
file."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from common import RESULTS, ROOT

from moe_opt.report import format_interval, format_value, markdown_table

PAGE = ROOT / "docs" / "reproduction.md"


def _cell(interval: dict[str, Any], scale: float = 1.0) -> str:
    low, high = interval["low"], interval["high"]
    nan = float("nan")
    return format_interval(
        interval["mean"] * scale, nan if low is None else low * scale, nan if high is None else high * scale
    )


def _change(value: float, base: float) -> str:
    return f"{value / base - 1:+.1%}"


def _note(section: dict[str, Any]) -> str:
    m = section["machine"]
    return (
        f"`{m['command']}`, {m['date']}, {m['processor']} ({m['cores']} cores), Python {m['python']}, "
        f"NumPy {m['numpy']}."
    )


def _balance(section: dict[str, Any], title: str, paper_column: int | None) -> str:
    from balanceroute import PAPER_TABLE_1

    rows, base = section["rows"], section["rows"]["jsq"]
    table = []
    for label, row in rows.items():
        paper = PAPER_TABLE_1.get(label)
        figures = ("–", "–")
        if paper is not None and paper_column is not None:
            own, jsq = paper[paper_column], PAPER_TABLE_1["jsq"][paper_column]
            figures = (_change(own[0], jsq[0]), _change(own[2], jsq[2]))
        table.append(
            [
                label,
                _cell(row["imbalance"]),
                _change(row["imbalance"]["mean"], base["imbalance"]["mean"]),
                figures[0],
                _cell(row["tpot_p95"], 1e3),
                _change(row["throughput"]["mean"], base["throughput"]["mean"]),
                figures[1],
            ]
        )
    columns = ["policy", "imbalance (tokens)", "vs JSQ", "paper vs JSQ", "TPOT P95 (ms)", "throughput vs JSQ", "paper"]
    facts = section["summary"]
    fitted = section["throughput_with_fitted_cost"]
    gains = ", ".join(
        f"{label} {_change(v['mean'], fitted['jsq']['mean'])}" for label, v in fitted.items() if label != "jsq"
    )
    return (
        f"### {title}\n\n{markdown_table(columns, table)}\n\n"
        f"Trace: mean prompt {facts['mean_prompt_tokens']:,.0f}, mean output "
        f"{facts['mean_output_tokens']:,.0f} tokens. "
        f"Step cost: Qwen3-235B-A22B, one H100 per rank. With a step cost fitted to the paper's Table 1 "
        f"(fixed {section['fitted_cost']['fixed'] * 1e3:.0f} ms, {section['fitted_cost']['per_kv_token'] * 1e6:.2f} us "
        f"per KV token) throughput changes by: {gains}.\n\n{_note(section)}\n"
    )


def _sweep(section: dict[str, Any], title: str) -> str:
    table = []
    for workers in section["counts"]:
        jsq, br0, brh = (section["rows"][f"{p}@{workers}"] for p in ("jsq", "br-0", "br-h oracle"))
        base, tput = jsq["imbalance"]["mean"], jsq["throughput"]["mean"]
        table.append(
            [
                str(workers),
                _cell(jsq["imbalance"]),
                _change(br0["imbalance"]["mean"], base),
                _change(brh["imbalance"]["mean"], base),
                _change(br0["throughput"]["mean"], tput),
                _change(brh["throughput"]["mean"], tput),
                brh["decision_ms_p50"],
            ]
        )
    columns = [
        "workers",
        "JSQ imbalance",
        "BR-0",
        "BR-H oracle",
        "BR-0 throughput",
        "BR-H throughput",
        "BR-H tick (ms)",
    ]
    return f"### {title}\n\n{markdown_table(columns, table)}\n\n{_note(section)}\n"


def _sensitivity(section: dict[str, Any], title: str) -> str:
    from balanceroute import PAPER_SENSITIVITY

    base = section["rows"]["jsq"]["imbalance"]["mean"]
    table = []
    for key, row in section["rows"].items():
        if key == "jsq":
            continue
        horizon, gamma = key.split("/")
        paper = PAPER_SENSITIVITY[section["workers"]].get(key)
        table.append([horizon, gamma, _cell(row["imbalance"]), _change(row["imbalance"]["mean"], base), paper])
    columns = ["H", "gamma", "imbalance (tokens)", "vs JSQ", "paper's imbalance (its trace)"]
    return f"### {title}\n\n{markdown_table(columns, table)}\n\n{_note(section)}\n"


def _bound(section: dict[str, Any], title: str) -> str:
    base = section["rows"]["jsq"]["imbalance"]["mean"]
    best = section["bounds"]["whole pool"]["mean"]
    table = [
        [
            label,
            _cell(row["imbalance"]),
            _change(row["imbalance"]["mean"], base),
            f"{(base - row['imbalance']['mean']) / (base - best):.1%}",
        ]
        for label, row in section["rows"].items()
    ]
    table.append(["hindsight plan", _cell(section["bounds"]["whole pool"]), _change(best, base), "100%"])
    facts = section["summary"]
    return (
        f"### {title}\n\n{markdown_table(['', 'imbalance (tokens)', 'vs JSQ', 'gap closed'], table)}\n\n"
        f"Mean prompt {facts['mean_prompt_tokens']:,.0f}, mean output {facts['mean_output_tokens']:,.0f} tokens. "
        f"{_note(section)}\n"
    )


def _eldr(section: dict[str, Any], title: str) -> str:
    rates = sorted({float(key.split("@")[1]) for key in section["rows"]})
    names = list(dict.fromkeys(key.split("@")[0] for key in section["rows"]))
    balancers = [n for n in names if n not in ("eldr", "domain")]
    table = []
    for name in names:
        cells: list[object] = [name]
        for rate in rates:
            row = section["rows"][f"{name}@{rate:g}"]
            cells += [_cell(row["tpot_p50"], 1e3), _cell(row["tpot_p99"], 1e3), row["active_experts"]["mean"]]
        table.append(cells)
    cells = ["eldr vs best balancer"]
    for rate in rates:
        for key in ("tpot_p50", "tpot_p99", "active_experts"):
            best = min(section["rows"][f"{n}@{rate:g}"][key]["mean"] for n in balancers)
            cells.append(_change(section["rows"][f"eldr@{rate:g}"][key]["mean"], best))
    table.append(cells)
    columns = ["policy"]
    for rate in rates:
        columns += [f"p50 at {rate:g}/s (ms)", "p99 (ms)", "experts"]
    return (
        f"### {title}\n\n{markdown_table(columns, table)}\n\n"
        f"Signature rho on held-out requests {section['held_out_rho']:.2f} ({section['weighting']}, "
        f"{section['layers']} of 26 layers). {_note(section)}\n"
    )


def _pools(section: dict[str, Any], title: str) -> str:
    paper = {8: ("-8.0%", "-2.5%"), 16: ("-9.8%", "-0.8%"), 24: ("-10.2%", "-1.1%")}
    table = []
    for workers, (p50, p99) in paper.items():
        rows = {n: section["rows"][f"{n}@{workers}"] for n in ("round-robin", "jsq", "eldr")}
        line: list[object] = [str(workers)]
        for base in ("round-robin", "jsq"):
            for key in ("tpot_p50", "tpot_p99"):
                line.append(_change(rows["eldr"][key]["mean"], rows[base][key]["mean"]))
        table.append([*line, p50, p99])
    columns = ["decoders", "p50 vs RR", "p99 vs RR", "p50 vs JSQ", "p99 vs JSQ", "paper p50 vs RR", "paper p99 vs RR"]
    return f"### {title}\n\n{markdown_table(columns, table)}\n\n{_note(section)}\n"


def _ablations(section: dict[str, Any], title: str) -> str:
    base = section["rows"]["round-robin"]
    table = [
        [
            label,
            row.get("rho"),
            _cell(row["tpot_p50"], 1e3),
            _change(row["tpot_p50"]["mean"], base["tpot_p50"]["mean"]),
            _change(row["tpot_p99"]["mean"], base["tpot_p99"]["mean"]),
            _change(row["active_experts"]["mean"], base["active_experts"]["mean"]),
        ]
        for label, row in section["rows"].items()
    ]
    columns = ["variant", "rho (fit)", "TPOT p50 (ms)", "p50 vs RR", "p99 vs RR", "experts vs RR"]
    return f"### {title}\n\n{markdown_table(columns, table)}\n\n{_note(section)}\n"


def _prefill(section: dict[str, Any], title: str) -> str:
    base = section["rows"]["least requests (vLLM's default)"]["throughput"]
    table = [
        [
            label,
            row["throughput"],
            _change(row["throughput"], base),
            f"{row['hit_rate']:.1%}",
            f"{row['exposed_transfer']:.1%}",
            row["busy_spread"],
            row["latency_p50"],
        ]
        for label, row in section["rows"].items()
    ]
    columns = [
        "scheduler",
        "tokens/s",
        "vs default",
        "prefix hits",
        "transfer exposed",
        "busy spread",
        "latency p50 (s)",
    ]
    return (
        f"### {title}\n\n{markdown_table(columns, table)}\n\n"
        f"{section['requests']:,} requests on {section['engines']} engines. {_note(section)}\n"
    )


def _metro(section: dict[str, Any], title: str) -> str:
    table = []
    for row in section["rows"]:
        busiest, tpot = row["busiest"], row["tpot_ms"]
        table.append(
            [
                row["model"],
                f"{row['replication']:g}x",
                row["overhead"],
                " / ".join(format_value(busiest[m]) for m in ("eplb", "metro", "optimal")),
                " / ".join(format_value(tpot[m]) for m in ("eplb", "metro", "optimal")),
                _change(tpot["metro"], tpot["eplb"]),
                f"{row['max_gain']:.2f}x at {row['max_gain_slo_ms']:.1f} ms",
            ]
        )
    columns = ["model", "replicas", "METRO's own cost", "busiest rank, EPLB / METRO / optimal"]
    columns += ["TPOT (ms), likewise", "METRO TPOT", "throughput at a fixed objective, up to"]
    return f"### {title}\n\n{markdown_table(columns, table)}\n\n{_note(section)}\n"


PARTS: tuple[tuple[str, str, Callable[[dict[str, Any], str], str]], ...] = (
    ("balanceroute-azure", "Table 1, Azure conversation", lambda s, t: _balance(s, t, 1)),
    ("balanceroute-mooncake", "Table 1, a heavy-tailed trace (Mooncake)", lambda s, t: _balance(s, t, 0)),
    ("balanceroute-sweep-azure", "Table 2, workers on Azure conversation", _sweep),
    ("balanceroute-sweep-mooncake", "Table 2, workers on Mooncake", _sweep),
    ("balanceroute-sensitivity-8", "Table 6, H and gamma at 8 workers (Mooncake)", _sensitivity),
    ("balanceroute-sensitivity-16", "Table 7, H and gamma at 16 workers (Mooncake)", _sensitivity),
    ("balanceroute-bound-mooncake", "Gap to a hindsight plan, Mooncake", _bound),
    ("balanceroute-bound-servegen", "Gap to a hindsight plan, ServeGen m-large", _bound),
    ("balanceroute-bound-servegen-r1", "Gap to a hindsight plan, ServeGen deepseek-r1", _bound),
    ("eldr-tpot", "TPOT against load balancers (Figure 11)", _eldr),
    ("eldr-pools", "Decoder pool size (Table 2)", _pools),
    ("eldr-ablations", "Ablations (Figures 8 and 14 to 17)", _ablations),
    ("moe_prefill-mooncake", "Frontend on Mooncake prompts (section 8.3)", _prefill),
    ("moe_prefill-mooncake-open", "Mooncake prompts at their own arrival times, 16 engines", _prefill),
    ("moe_prefill-multi-selection", "Frontend on multi-selection requests", _prefill),
    ("metro", "Table II, decode Pareto on B200", _metro),
)
HEADINGS = {"balanceroute": "BalanceRoute", "eldr": "ELDR", "moe_prefill": "MoE-Prefill", "metro": "METRO"}


def render() -> None:
    """Write the page from whatever sections have been measured."""
    sections = json.loads(RESULTS.read_text(encoding="utf-8"))["sections"]
    notes = json.loads((ROOT / "benchmarks" / "paper_tables" / "notes.json").read_text(encoding="utf-8"))
    lines = ["# The papers' tables beside ours", "", notes["intro"], ""]
    seen = ""
    for name, title, draw in PARTS:
        paper = name.split("-")[0]
        if name not in sections:
            continue
        if paper != seen:
            lines += [f"## {HEADINGS[paper]}", "", notes[paper], ""]
            seen = paper
        lines += [draw(sections[name], title)]
        if name in notes:
            lines += [notes[name], ""]
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    render()
