"""Settings of `moe-opt serve`: TGI's launcher flags and environment variables, and ours.

A flag on the command line wins over its environment variable (the flag's name in capitals), which wins over the
default. Flags of TGI that mean nothing here are accepted and said to be ignored, so that its start scripts run as
they are; those that would change results or hardware use are refused.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

from moe_opt.config import KERNELS, PREFILL_DISPATCH, REPLICA_METHODS
from moe_opt.errors import ConfigError

DTYPES = ("auto", "float16", "bfloat16", "float32")


@dataclasses.dataclass(frozen=True, slots=True)
class Flag:
    """One setting. `parse` turns a command-line or environment text into its value."""

    name: str  # with dashes
    parse: Callable[[str], Any]
    default: Any
    help: str

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        return self.key.upper()


def _flag(text: str) -> bool:
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on", ""):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"expected true or false, got {text!r}")


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"expected one of {', '.join(choices)}, got {text!r}")
        return text

    return parse


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _layers(text: str) -> tuple[int, ...]:
    """ "2-21" or "0,3,5-7"."""
    layers: list[int] = []
    for part in _list(text):
        first, _, last = part.partition("-")
        layers.extend(range(int(first), int(last or first) + 1))
    return tuple(layers)


FLAGS: tuple[Flag, ...] = (
    Flag("model-id", str, None, "model to serve: a folder or a Hub id"),
    Flag("revision", str, None, "revision of the Hub repository"),
    Flag("dtype", _one_of(*DTYPES), "auto", "auto (the checkpoint's), float16, bfloat16 or float32"),
    Flag("device", str, None, "cpu, cuda, cuda:0, ...; default: cuda if there is one"),
    Flag("cpu-threads", int, None, "CPU threads of the model; default: OMP_NUM_THREADS, else all cores but one"),
    Flag("cpu-prefill-threads", int, None, "in steps with prompts; default: all cores, or --cpu-threads if given"),
    Flag("trust-remote-code", _flag, False, "run code from the model's repository"),
    Flag("tokenizer-config-path", str, None, "tokenizer_config.json whose chat_template replaces the model's"),
    # addresses
    Flag("hostname", str, "0.0.0.0", "address to listen on"),
    Flag("port", int, 3000, "port to listen on; 0 takes a free one"),
    Flag("prometheus-port", int, None, "a second port that serves /metrics only"),
    Flag("api-key", str, None, "key that clients send as a bearer token"),
    Flag("cors-allow-origin", _list, (), "origins that web pages may call from, separated by commas; default: any"),
    # bounds
    Flag("max-concurrent-requests", int, 128, "sequences waiting or running; more get 429"),
    Flag("max-best-of", int, 2, "highest best_of"),
    Flag("max-stop-sequences", int, 4, "most stop sequences of a request"),
    Flag("max-top-n-tokens", int, 5, "highest top_n_tokens"),
    Flag("max-input-tokens", int, None, "longest prompt; default: max-total-tokens - 1"),
    Flag("max-input-length", int, None, "TGI's older name of max-input-tokens"),
    Flag("max-total-tokens", int, None, "prompt and output together; default: the model's context, as far as KV fits"),
    Flag("max-batch-prefill-tokens", int, 512, "prompt tokens of one step; longer prompts are computed in chunks"),
    Flag("max-batch-total-tokens", int, None, "tokens in the KV cache; default: from the free memory"),
    Flag("max-batch-size", int, 32, "sequences that run at once"),
    Flag("max-client-batch-size", int, 4, "prompts of one /v1/completions request"),
    Flag("max-score-items", int, 1024, "prompts and choices of one /v1/score, /v1/classify or /v1/rerank request"),
    Flag("payload-limit", int, 2_000_000, "bytes of a request body"),
    Flag("request-timeout", float, None, "seconds for a whole answer; default: no bound"),
    Flag("body-timeout", float, 60.0, "seconds to receive a request body"),
    Flag("write-timeout", float, 60.0, "seconds that a client may leave a stream unread"),
    Flag("graceful-termination-timeout", float, 90.0, "seconds that requests get to finish after SIGTERM"),
    Flag("validation-workers", int, 2, "threads that tokenise"),
    Flag("disable-grammar-support", _flag, False, "refuse grammars, tools and response formats"),
    Flag("prefix-caching", _flag, True, "reuse the KV pages of equal prefixes"),
    Flag("page-size", int, 16, "tokens of a KV page"),
    Flag("cuda-graphs", _flag, True, "capture decode steps (CUDA)"),
    Flag("experts-kernels", _one_of(*KERNELS), "auto", "experts kernels; auto: ours on a CPU, else Transformers'"),
    # one expert-parallel group
    Flag("expert-parallel", int, None, "ranks that share the experts; rank r serves on --port + r"),
    Flag("replica-choice", _one_of(*REPLICA_METHODS), "metro", "which replica of an expert a decode step reads"),
    Flag("prefill-dispatch", _one_of(*PREFILL_DISPATCH), "auto", "how tokens of large steps travel between the ranks"),
    Flag("expert-replication", float, 1.0, "expert weights on all ranks together, over the number of experts"),
    Flag("expert-placement", str, None, "file of ExpertPlacement.save; default: all experts equally popular"),
    Flag("rebalance-steps", int, 0, "move experts to the loads seen, every so many steps; 0: never"),
    Flag("group-timeout", float, 120.0, "seconds after which a rank that does not answer is given up"),
    # prefill and decode on different workers
    Flag("kv-role", _one_of("prefill", "decode", "both"), None, "worker of a fleet: hands KV on or takes it"),
    Flag("kv-host", str, None, "address under which other workers reach this one; default: hostname, or 127.0.0.1"),
    Flag("kv-transfer-memory", int, 1 << 30, "bytes of handed-over KV that may wait to be fetched"),
    Flag("kv-transfer-expiry", float, 120.0, "seconds that handed-over KV waits to be fetched"),
    Flag("kv-transfer-timeout", float, 30.0, "seconds to fetch KV"),
    Flag("kv-shared-memory", _flag, True, "fetch through /dev/shm where both workers run on one machine"),
    # observability
    Flag("json-output", _flag, False, "logs as JSON lines"),
    Flag("log-level", str, "info", "debug, info, warning or error"),
    Flag("otlp-endpoint", str, None, "OpenTelemetry collector for traces, for instance http://localhost:4317"),
    Flag("otlp-service-name", str, "moe-opt.server", "service name in traces"),
    # brownout
    Flag("slo-ttft", float, None, "objective for the time to first token, seconds; browns out prefill to keep it"),
    Flag("slo-tpot", float, None, "objective for the time per output token, seconds; browns out decode to keep it"),
    Flag("slo-period", float, 0.5, "seconds between two decisions, at most 1"),
    Flag("slo-window", float, 2.0, "seconds that a latency counts for"),
    Flag("slo-headroom", float, 1.0, "share of an objective that its controller steers at"),
    Flag("united-experts", str, None, 'united experts: a folder, a Hub id, or "." for the model\'s own folder'),
    Flag("ways", int, None, "experts behind one united expert, where the source holds several"),
    Flag("brownout-strategy", str, None, "partial (default with united experts), reroute (without), full, top-k, zero"),
    Flag("brownout-keep", str, None, "which experts stay: count, mass or error"),
    Flag("brownout-layers", _layers, None, 'MoE layers that may brown out, for instance "2-21"'),
)  # fmt: skip

# Accepted because TGI's scripts and tests pass them; they have nothing to do here.
_IGNORED = (
    "master-addr", "master-port", "shard-uds-path", "waiting-served-ratio", "max-waiting-tokens",
    "cuda-memory-fraction", "enable-prefill-logprobs", "usage-stats", "weights-cache-override",
    "huggingface-hub-cache", "watermark-gamma", "watermark-delta", "disable-custom-kernels",
    "disable-usage-stats", "attention",
)  # fmt: skip
# Accepted with the value that asks for nothing; anything else is refused.
_REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "num-shard": (("1",), "one worker serves one device; start several workers behind a router instead"),
    "sharded": (("false", "0"), "one worker serves one device; start several workers behind a router instead"),
    "quantize": (("",), "serve a checkpoint that is quantised already, without this flag"),
    "kv-cache-dtype": (("", "auto"), "the KV cache has the model's dtype"),
    "speculate": (("", "0"), "speculative decoding is not supported"),
    "lora-adapters": (("",), "adapters are not served; merge them into the model"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every flag. Defaults are resolved later, so that environment variables can come in between."""
    parser.add_argument("model", nargs="?", help="the same as --model-id")
    for flag in FLAGS:
        shown = "" if flag.default in (None, (), False) else f" (default: {flag.default})"
        help_text = f"{flag.help}{shown} [env {flag.variable}]".replace("%", "%%")
        if flag.parse is _flag:
            parser.add_argument(f"--{flag.name}", nargs="?", const="true", metavar="BOOL", help=help_text)
        else:
            parser.add_argument(f"--{flag.name}", metavar=flag.key.split("_")[-1].upper(), help=help_text)
    for name in (*_IGNORED, *_REFUSED):
        parser.add_argument(f"--{name}", nargs="?", const="true", help=argparse.SUPPRESS)


def resolve(args: argparse.Namespace, environ: Mapping[str, str] | None = None) -> tuple[dict[str, Any], list[str]]:
    """Values by key, and what to warn about.

    Raises:
        ConfigError: a value that does not parse, TGI's two names of one setting at once, or a setting that this server
            cannot honour.
    """
    env = os.environ if environ is None else environ
    given = {flag.key: _given(args, env, flag) for flag in FLAGS}
    values: dict[str, Any] = {}
    for flag in FLAGS:
        text, where = given[flag.key]
        if text is None:
            values[flag.key] = flag.default
            continue
        try:
            values[flag.key] = flag.parse(text)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from error
    if args.model is not None:
        if given["model_id"][0] not in (None, args.model) and given["model_id"][1].startswith("--"):
            raise ConfigError(f"two models: {args.model} and --model-id {given['model_id'][0]}")
        values["model_id"] = args.model
    if values["model_id"] is None:
        raise ConfigError("no model: give --model-id FOLDER_OR_HUB_ID, or set MODEL_ID")
    if values["max_input_length"] is not None:
        if values["max_input_tokens"] is not None:
            raise ConfigError("max-input-length is the older name of max-input-tokens: set one of them")
        values["max_input_tokens"] = values["max_input_length"]
    # TGI reads the log format from a variable of its own.
    if env.get("LOG_FORMAT", "").lower() == "json":
        values["json_output"] = True
    for name, (allowed, hint) in _REFUSED.items():
        text, where = _text(args, env, name)
        if text is not None and text.lower() not in allowed:
            raise ConfigError(f"{where}={text} is not supported: {hint}")
    ignored = [where for name in _IGNORED for text, where in [_text(args, env, name)] if text is not None]
    warnings = [f"{where} has no effect here" for where in ignored if where.startswith("--")]
    return values, warnings


def given_flags(args: argparse.Namespace) -> list[str]:
    """The command line again, as far as it has settings of ours."""
    names = [*(flag.name for flag in FLAGS), *_REFUSED, *_IGNORED]
    texts = [(name, getattr(args, name.replace("-", "_"), None)) for name in names]
    return [part for name, text in texts if text is not None for part in (f"--{name}", text)]


def _given(args: argparse.Namespace, env: Mapping[str, str], flag: Flag) -> tuple[str | None, str]:
    text, where = _text(args, env, flag.name)
    # An empty variable is how compose files and charts say "not set".
    return (None, where) if text == "" and not where.startswith("--") else (text, where)


def _text(args: argparse.Namespace, env: Mapping[str, str], name: str) -> tuple[str | None, str]:
    """(text, where it came from)."""
    key = name.replace("-", "_")
    from_args = getattr(args, key, None)
    if from_args is not None:
        return from_args, f"--{name}"
    return env.get(key.upper()), key.upper()
