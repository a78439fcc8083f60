"""Settings of the engine: every bound is explicit."""

from __future__ import annotations

import dataclasses

from moe_opt.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class EngineConfig:
    """Bounds and sizes. What is None is derived from the model and the machine at start.

    Attributes:
        max_batch_size: sequences that run at once.
        max_batch_prefill_tokens: prompt tokens of one step, over all requests; longer prompts are computed in chunks.
        max_total_tokens: prompt plus generated tokens of one request; None takes the model's
            `max_position_embeddings`, at most what the pages hold.
        max_waiting: requests that may wait while `max_batch_size` run; one more is refused with `OverloadedError`.
        page_size: tokens of one KV page. kv_pages: how many; None takes them from `kv_memory`.
        kv_memory: bytes for the KV cache; None takes a tenth of the free memory on a CPU and, on CUDA, 0.85 of what is
            free after the weights, in both cases no more than `max_batch_size * max_total_tokens` needs.
        prefix_caching: reuse pages of equal prefixes.
        decode_between_prefills: while requests decode, at least this many steps without prefill rows between two
            steps with them. 0 mixes prefill chunks into every step.
        record_experts: count the router's choices per KV page (expert signatures); costs one scatter per step.
        step_statistics: read the number of active experts after each step (a host sync on CUDA).
        cuda_graphs: capture decode steps, CUDA only.
        prefill_threads: torch's threads in steps with a chunk of a prompt, on a CPU; None leaves them as they are. A
            decode step of a millisecond per layer must leave a core to whoever sends its tokens out, a prefill step
            of tens of milliseconds need not.
        rebalance_steps, group_timeout: of an expert-parallel group (`LockStep`).
    """

    max_batch_size: int = 32
    max_batch_prefill_tokens: int = 512
    max_total_tokens: int | None = None
    max_waiting: int = 1024
    page_size: int = 16
    kv_pages: int | None = None
    kv_memory: int | None = None
    prefix_caching: bool = True
    decode_between_prefills: int = 0
    record_experts: bool = True
    step_statistics: bool = True
    cuda_graphs: bool = True
    prefill_threads: int | None = None
    rebalance_steps: int = 0
    group_timeout: float = 120.0

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_batch_prefill_tokens", "page_size"):
            self._at_least(name, 1)
        for name in ("max_waiting", "decode_between_prefills", "rebalance_steps"):
            self._at_least(name, 0)
        for name in ("max_total_tokens", "kv_pages", "kv_memory", "prefill_threads"):
            if getattr(self, name) is not None:
                self._at_least(name, 1)

        if not self.group_timeout > 0:
            raise ConfigError(f"engine: group_timeout must be above 0 seconds, got {self.group_timeout!r}")

    def _at_least(self, name: str, lowest: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
            raise ConfigError(f"engine: {name} must be an integer of at least {lowest}, got {value!r}")
