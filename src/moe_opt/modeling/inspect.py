"""`moe-opt inspect MODEL`: what a checkpoint holds and which features apply, without reading its weights."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from moe_opt.errors import MoEOptError, UnsupportedModelError

HELP = "Show a model's MoE layers, experts, top-k, parameters by kind, memory, and which features apply."
EXAMPLE = """moe-opt inspect examples/demo_model
moe-opt inspect Qwen/Qwen3-30B-A3B --dtype bfloat16 --json"""

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}
_WAYS = (2, 4, 8)
_REGIME_DEVICES = ("A100-80GB", "H100", "H200", "B200")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a folder or Hub id; only its config is read")
    parser.add_argument(
        "--dtype", choices=sorted(_BYTES), help="count memory in this dtype (default: the checkpoint's)"
    )
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(args: argparse.Namespace) -> int:
    report = inspect_model(args.model, dtype=args.dtype, trust_remote_code=args.trust_remote_code)
    print(json.dumps(report, indent=2) if args.json else render(report))
    return 0


def inspect_model(source: str, dtype: str | None = None, trust_remote_code: bool = False) -> dict[str, Any]:
    """A report on a checkpoint, from its config alone (the model is built on the meta device).

    Raises:
        MoEOptError: no config there. UnsupportedModelError: nothing that moe_opt can act on.
    """
    import torch
    import transformers
    from transformers import AutoConfig

    from moe_opt.modeling.auto import MoEOptimizedForCausalLM
    from moe_opt.modeling.source import require_source

    require_source(source)
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise MoEOptError(f"no model config at {source!r}: {first}") from error
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with torch.device("meta"):
            model = MoEOptimizedForCausalLM.from_config(config, moe_opt={"united_experts": None, "ways": None})
    except ValueError as error:
        if isinstance(error, UnsupportedModelError):
            raise
        raise UnsupportedModelError(f"{source}: {str(error).strip().splitlines()[0]}") from error
    finally:
        transformers.logging.set_verbosity(level)

    saved_dtype = str(getattr(config.get_text_config(), "dtype", None) or "float32").removeprefix("torch.")
    dtype = dtype or (saved_dtype if saved_dtype in _BYTES else "bfloat16")
    return describe(model, source, dtype)


def describe(model: Any, source: str, dtype: str) -> dict[str, Any]:
    """The report on a model that is built already (weights may be on the meta device)."""
    from moe_opt.modeling.experts import expert_tensors

    runtime = model.moe_opt
    routed_names = {f"{name}.{key}" for name, module in runtime.layers for key in expert_tensors(module)}
    kinds = {"routed experts": 0, "shared experts": 0, "routers": 0, "embeddings": 0, "attention and rest": 0}
    for name, parameter in model.named_parameters():
        kinds[_kind(name, parameter, routed_names, runtime.num_experts)] += parameter.numel()
    total = sum(kinds.values())
    size = _BYTES[dtype]
    per_expert = sum(t[0].numel() for t in expert_tensors(runtime.layers[0][1]).values())
    active = total - kinds["routed experts"] + runtime.num_layers * runtime.top_k * per_expert
    text = model.config.get_text_config()
    united = {
        f"{ways}-way": {
            "united_experts": math.ceil(runtime.num_experts / ways),
            "extra_bytes": math.ceil(runtime.num_experts / ways) * per_expert * runtime.num_layers * size,
        }
        for ways in _WAYS
        if ways <= runtime.num_experts
    }
    return {
        "model": _shown_name(source),
        "family": text.model_type,
        "class": type(model).__name__,
        "moe_layers": runtime.num_layers,
        "layers": getattr(text, "num_hidden_layers", None),
        "experts": runtime.num_experts,
        "top_k": runtime.top_k,
        "dtype": dtype,
        "parameters": {**kinds, "total": total, "active per token": active},
        "bytes": total * size,
        "bytes_per_expert": per_expert * size,
        "united": united,
        "decode": decode_regimes(text, size),
        "features": features(model),
    }


def decode_regimes(config: Any, size: int) -> dict[str, dict[str, float]]:
    """Device -> up to how many tokens a decode step is memory-bound, and what METRO must save there to pay; empty for
    families whose FLOPs are not modelled."""
    from moe_opt.devices import device_preset
    from moe_opt.errors import ConfigError
    from moe_opt.flops import FlopsModel
    from moe_opt.regime import Regime

    try:
        model = FlopsModel.from_config(config, weight_bytes=size, expert_weight_bytes=size)
    except (ConfigError, UnsupportedModelError):
        return {}
    found = {}
    for name in _REGIME_DEVICES:
        regime = Regime.from_model(model, device_preset(name))
        found[name] = {
            "memory_bound_up_to_tokens": regime.largest_memory_bound_step(),
            "metro_pays_from_experts_saved": round(regime.least_experts_saved(), 2),
        }
    return found


def features(model: Any) -> dict[str, str]:
    """Feature -> "yes", or the reason why not."""
    runtime = model.moe_opt
    brownout = "yes"
    if runtime.top_k >= runtime.num_experts:
        brownout = "no: every token uses every expert"
    return {
        "brownout": brownout,
        "brownout without united experts (full, reroute, top-k)": brownout,
        "expert recorder and signatures": "yes",
        "experts kernel where nothing is browned out": runtime.kernel,
    }


def _kind(name: str, parameter: Any, routed_names: set[str], num_experts: int) -> str:
    if name in routed_names:
        return "routed experts"
    if "shared_expert" in name or "shared_mlp" in name:
        return "shared experts"
    if parameter.dim() <= 2 and parameter.shape[0] == num_experts and ("gate" in name or "router" in name):
        return "routers"
    if "embed" in name or name.startswith("lm_head"):
        return "embeddings"
    return "attention and rest"


def _shown_name(source: str) -> str:
    return Path(source).resolve().name if Path(source).exists() else source


def human_bytes(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def render(report: dict[str, Any]) -> str:
    """The report as text for a terminal."""
    lines = [
        f"{report['model']}: {report['class']} ({report['family']})",
        f"  MoE layers          {report['moe_layers']} of {report['layers']}",
        f"  experts per layer   {report['experts']}, top-{report['top_k']}",
        f"  one expert          {human_bytes(report['bytes_per_expert'])} in {report['dtype']}",
        "",
        "  parameters",
    ]
    total = report["parameters"]["total"]
    for kind, count in report["parameters"].items():
        if count:
            lines.append(f"    {kind:<22}{count:>16,}  {100 * count / total:5.1f} %")
    lines += ["", f"  memory in {report['dtype']}", f"    {'model':<22}{human_bytes(report['bytes']):>16}"]
    for ways, entry in report["united"].items():
        grown = 100 * entry["extra_bytes"] / report["bytes"]
        label = f"+ {ways} united experts"
        lines.append(
            f"    {label:<22}{human_bytes(report['bytes'] + entry['extra_bytes']):>16}  +{grown:.1f} %"
            f"  ({entry['united_experts']} a layer)"
        )
    if report["decode"]:
        lines += ["", "  decode is memory-bound, and METRO pays once it saves the busiest rank so many experts a layer"]
        for device, entry in report["decode"].items():
            lines.append(
                f"    {device:<12}up to {entry['memory_bound_up_to_tokens']:>7,} tokens a step"
                f"    {entry['metro_pays_from_experts_saved']:>7.1f} experts"
            )
    lines += ["", "  features"]
    lines += [f"    {name:<56}{state}" for name, state in report["features"].items()]
    return "\n".join(lines)
