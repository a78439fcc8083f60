"""AsyncEP (MoE-Prefill, sections 4 and 5): expert weights arrive while the layer before computes.

"offload": experts stay in the mapped checkpoint (on CUDA in pinned host memory) and a window of layers is copied ahead.
"gather": each rank holds 1/N of every layer's experts and the ranks all-gather the next layer's; the first layer is on
every rank. "both": the ranks' parts are themselves streamed. Tokens never move: every rank computes its own batch.

Buffers are made once, one per layer of the window and one for the layer that computes, and go round by layer. A layer
waits once, for its own weights.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from moe_opt.config import AsyncEPConfig
from moe_opt.errors import ConfigError, MoEOptError
from moe_opt.modeling.expert_formats import Decoder
from moe_opt.modeling.expert_source import ExpertSource
from moe_opt.modeling.experts import ExpertsProxy, expert_tensor_names, stock_function
from moe_opt.modeling.replica_dispatch import all_gather
from moe_opt.modeling.united import weight_fingerprint

logger = logging.getLogger(__name__)


class StreamedExperts:
    """The streaming side of a `MoERuntime`; `runtime.async_ep`.

    Attributes:
        mode: "offload", "gather" or "both". buffer_bytes: of all buffers together, those included in which quantised
            weights become the model's dtype. resident_bytes: of experts that stay
            (a rank's part, the replicated first layer).
        transfer_seconds: per layer, of its last transfer. waited_seconds, moved_seconds: sums since `reset_times`.
        marks: while it is a list, where each layer's experts begin: (layer, time on arrival, time when its weights are
            there), as `layer_times` reads them.
    """

    def __init__(self, runtime: Any, source: ExpertSource, config: AsyncEPConfig, device: torch.device) -> None:
        self.runtime = runtime
        self.config = config
        self.mode = config.mode
        self.device = device
        self.num_layers = runtime.num_layers
        self._source = source
        runtime.base_fingerprint = weight_fingerprint(runtime.layers, source)
        self._copier = ThreadPoolExecutor(1, "moe-opt-experts")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.rank, self.num_ranks = 0, 1
        self._group: dist.ProcessGroup | None = None
        if self.mode != "offload":
            if not dist.is_initialized():
                _start_group()
            self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
            # A group of its own: weights move on another thread, and must not mix with the collectives of the caller.
            self._group = dist.new_group()
        experts = runtime.num_experts
        self._part = -(-experts // self.num_ranks)  # experts of a rank; the last one's may be padding
        self._first = min(self.rank * self._part, experts)
        self._last = min(self._first + self._part, experts)
        # Quantised weights keep their form until the layer that uses them runs.
        self._parts = {key: part for one in source.stored for key, part in one.parts.items()}
        slots = min(config.window + 1, self.num_layers)
        rows = self._part * self.num_ranks
        self._buffers = [self._empty(rows, device) for _ in range(slots)]
        self._staging = [self._empty(self._part, torch.device("cpu"), pinned=True) for _ in range(slots)]
        if self.mode == "gather" or (self.mode == "offload" and self._stream is None):
            self._staging = []
        self._decoder: Decoder | None = None
        if source.quantised:
            dtype = runtime.layers[0][1].down_proj.dtype
            self._decoder = Decoder(source.stored, dtype, device, runtime.num_experts)
        self._resident = self._load_resident()
        self._slot_of_layer: dict[int, int] = {}
        self._pending: dict[int, Any] = {}
        self._free = list(range(slots))
        self._used: list[Any] = [None] * slots  # CUDA: event after the last computation on a buffer
        self.transfer_seconds = [0.0] * self.num_layers
        self.waited_seconds = self.moved_seconds = 0.0
        self.marks: list[tuple[int, Any, Any]] | None = None

    # ------------------------------------------------------------- memory

    def _empty(self, rows: int, device: torch.device, pinned: bool = False) -> dict[str, torch.Tensor]:
        pin = pinned and self._stream is not None
        return {
            key: torch.empty((rows, *part.shape[1:]), dtype=part.dtype, device=device, pin_memory=pin)
            for key, part in self._parts.items()
        }

    def _load_resident(self) -> dict[int, dict[str, torch.Tensor]]:
        """What stays in memory: nothing when offloading from a map; a rank's parts and the first layer when gathering;
        all layers in pinned host memory when offloading to a GPU."""
        resident: dict[int, dict[str, torch.Tensor]] = {}
        for layer in range(self.num_layers):
            if self.mode in ("gather", "both") and layer == 0 and self.num_ranks > 1:
                resident[layer] = self._empty(self.runtime.num_experts, self.device)
                self._fill(layer, resident[layer], 0, self.runtime.num_experts)
            elif self.mode == "gather":
                resident[layer] = self._empty(self._part, self.device)
                self._fill(layer, resident[layer], self._first, self._last)
            elif self._stream is not None:
                resident[layer] = self._empty(self._part, torch.device("cpu"), pinned=True)
                self._fill(layer, resident[layer], self._first, self._last)
        return resident

    def _fill(self, layer: int, out: dict[str, torch.Tensor], first: int, last: int) -> None:
        if next(iter(out.values())).device.type == "cpu":
            self._source.read_stored(layer, out, first, last)
            return
        staged = self._empty(last - first, torch.device("cpu"))
        self._source.read_stored(layer, staged, first, last)
        for key, value in staged.items():
            out[key][: last - first].copy_(value)

    @property
    def buffer_bytes(self) -> int:
        decoder = self._decoder.bytes if self._decoder is not None else 0
        return sum(_bytes(buffer) for buffer in (*self._buffers, *self._staging)) + decoder

    @property
    def resident_bytes(self) -> int:
        return sum(_bytes(tensors) for tensors in self._resident.values())

    # ------------------------------------------------------------- a layer

    def run(
        self, layer: int, module: nn.Module, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """One layer's experts, as the experts function is called; the next layers' weights move meanwhile."""
        if torch.compiler.is_compiling():
            raise MoEOptError("weight streaming does not go with torch.compile")
        arrived = self._now() if self.marks is not None else None
        tensors = self._take(layer)
        if self.marks is not None:
            self.marks.append((layer, arrived, self._now()))
        for ahead in range(1, len(self._buffers)):
            self._prefetch((layer + ahead) % self.num_layers, keep=layer)
        kernel = stock_function(module, self.runtime.kernel)
        if self.runtime.kernel == "eager":
            kernel = stock_function(module, "grouped_mm")
        if self._decoder is not None:
            tensors = self._decoder.decode(tensors)
        out = kernel(ExpertsProxy(module, tensors), hidden, ids, weights)
        slot = self._slot_of_layer.pop(layer, None)
        if slot is not None:
            if self._stream is not None:
                self._used[slot] = torch.cuda.current_stream(self.device).record_event()
            self._free.append(slot)
        return out

    def _whole(self, layer: int) -> bool:
        """Whether the layer is on this rank as a whole and for good."""
        found = self._resident.get(layer)
        if found is None or self.mode == "offload":
            return False
        return next(iter(found.values())).shape[0] == self.runtime.num_experts and (layer == 0 or self.num_ranks == 1)

    def _take(self, layer: int) -> dict[str, torch.Tensor]:
        if self._whole(layer):
            return self._resident[layer]
        if layer not in self._slot_of_layer:  # the first pass, or one that was broken off in the middle
            if not self._free:
                self._drop_all()
            self._prefetch(layer, keep=layer)
        slot = self._slot_of_layer[layer]
        pending = self._pending.pop(layer, None)
        if pending is not None:
            start = time.perf_counter()
            self._wait(pending)
            self.waited_seconds += time.perf_counter() - start
        experts = self.runtime.num_experts
        return {key: value[:experts] for key, value in self._buffers[slot].items()}

    def _prefetch(self, layer: int, keep: int) -> None:
        if layer == keep and layer in self._slot_of_layer:
            return
        if self._whole(layer) or layer in self._slot_of_layer or not self._free:
            return
        slot = self._free.pop(0)
        self._slot_of_layer[layer] = slot
        self._pending[layer] = self._start(layer, slot)

    def _drop_all(self) -> None:
        """Forget what is under way for layers that will not be asked for next."""
        for pending in self._pending.values():
            self._wait(pending)
        self._pending.clear()
        self._slot_of_layer.clear()
        self._free = list(range(len(self._buffers)))

    def _start(self, layer: int, slot: int) -> Any:
        """Begin a transfer; what is returned goes to `_wait`."""
        if self._stream is not None:
            return self._start_on_stream(layer, slot)
        return self._copier.submit(self._move, layer, slot)

    def _move(self, layer: int, slot: int) -> None:
        """On the copying thread, without a GPU: the map or the ranks' parts into a buffer."""
        start = time.perf_counter()
        buffer = self._buffers[slot]
        if self.mode == "offload":
            self._source.read_stored(layer, buffer, 0, self.runtime.num_experts)
        else:
            part = self._resident.get(layer)
            if part is None:
                part = self._staging[slot]
                self._source.read_stored(layer, part, self._first, self._last)
            for key, value in part.items():
                all_gather(buffer[key].view(torch.uint8), value.view(torch.uint8), group=self._group)
        seconds = time.perf_counter() - start
        self.transfer_seconds[layer] = seconds
        self.moved_seconds += seconds

    def _start_on_stream(self, layer: int, slot: int) -> Any:
        assert self._stream is not None
        buffer, part = self._buffers[slot], self._resident[layer]
        if self._used[slot] is not None:
            self._stream.wait_event(self._used[slot])
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self._stream):
            begin.record()
            for key, value in part.items():
                if self.num_ranks == 1:
                    buffer[key].copy_(value, non_blocking=True)
                else:
                    mine = buffer[key][self.rank * self._part : (self.rank + 1) * self._part]
                    mine.copy_(value, non_blocking=True)
                    all_gather(buffer[key].view(torch.uint8), mine.view(torch.uint8), group=self._group)
            end.record()
        return begin, end, layer

    def _wait(self, pending: Any) -> None:
        if isinstance(pending, Future):
            pending.result()
            return
        _, end, _ = pending
        torch.cuda.current_stream(self.device).wait_event(end)

    # ------------------------------------------------------------- figures

    @property
    def hidden_share(self) -> float:
        """Share of the transfer time that no layer waited for, since `reset_times`; nan before any transfer."""
        return 1.0 - min(1.0, self.waited_seconds / self.moved_seconds) if self.moved_seconds else float("nan")

    def _now(self) -> Any:
        """This moment: on CUDA as an event on the stream that computes."""
        if self._stream is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def layer_times(self, marks: list[tuple[int, Any, Any]]) -> list[tuple[float, float]]:
        """(seconds from one layer's experts to the next one's, seconds of it that weights were waited for) of a pass,
        for all layers but the last."""
        if self._stream is not None:
            torch.cuda.synchronize(self.device)

        def between(a: Any, b: Any) -> float:
            return float(b - a) if self._stream is None else float(a.elapsed_time(b)) / 1e3

        return [
            (between(arrived, following[1]), between(arrived, there))
            for (layer, arrived, there), following in itertools.pairwise(marks)
            if following[0] == layer + 1
        ]

    def reset_times(self) -> None:
        self.waited_seconds = self.moved_seconds = 0.0

    @torch.no_grad()
    def idle(self) -> None:
        """Take part in one forward pass of the other ranks with nothing of one's own."""
        with self.runtime.batch([-1], phase="decode"):
            self.runtime._model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=self.device), use_cache=False)


def _bytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(value.numel() * value.element_size() for value in tensors.values())


def strip_experts(layers: list[tuple[str, nn.Module]]) -> None:
    """Take the expert parameters off the modules before a checkpoint is loaded, so that they are never materialised.
    What stays is a meta tensor for shape and dtype, which `.to()`, hooks and state dicts do not see."""
    for _, module in layers:
        for key in expert_tensor_names(module):
            value = module._parameters.pop(key)
            assert value is not None
            module.__dict__[key] = torch.empty(value.shape, dtype=value.dtype, device="meta")
        module._is_hf_initialized = True  # type: ignore[assignment]


def checkpoint_folder(source: str, options: dict[str, Any]) -> Path:
    """The folder of a checkpoint's safetensors files; of a Hub id, its snapshot in the cache."""
    if Path(source).is_dir():
        return Path(source) / options.get("subfolder", "")
    from transformers.utils import cached_file

    for name in ("model.safetensors.index.json", "model.safetensors"):
        found = cached_file(source, name, _raise_exceptions_for_missing_entries=False, **options)
        if found is not None:
            return Path(found).parent
    raise ConfigError(f"{source} has no safetensors files to stream experts from")


def needs_streaming(expert_bytes: int, other_bytes: int, device: torch.device) -> bool:
    """Whether a model of this size does not fit the device's free memory (with a tenth to spare)."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        meminfo = Path("/proc/meminfo")
        if meminfo.is_file():
            for line in meminfo.read_text().splitlines():
                if line.startswith("MemAvailable:"):
                    free = int(line.split()[1]) * 1024
    return expert_bytes + other_bytes > 0.9 * free


def _start_group() -> None:
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise ConfigError(
            "async_ep mode 'gather' needs one process per rank: start with torchrun --nproc-per-node N script.py"
        )
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
