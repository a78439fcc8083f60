"""Expert weights read straight from a checkpoint's safetensors files, layer by layer, into buffers that exist already.

Files are mapped, not read: a copy touches only the pages of the tensors that it needs, and gives them back afterwards.
Checkpoints hold experts fused (`experts.gate_up_proj` [E, ...]) or one by one (`experts.7.gate_proj.weight`, Mixtral's
`w1`, `w2`, `w3`); both end in the module's own layout.
"""

from __future__ import annotations

import json
import mmap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from moe_opt.errors import ConfigError, UnsupportedModelError
from moe_opt.modeling.experts import expert_tensor_names

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I8": torch.int8, "U8": torch.uint8,
}  # fmt: skip
# How single experts are called: gate, up and down projection, and where their folder differs from the module's name.
_SINGLE = (
    ("gate_proj.weight", "up_proj.weight", "down_proj.weight", None),
    ("w1.weight", "w3.weight", "w2.weight", None),
    ("w1.weight", "w3.weight", "w2.weight", (".mlp.experts", ".block_sparse_moe.experts")),
)


class _Stored(NamedTuple):
    file: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class MappedCheckpoint:
    """The tensors of a checkpoint folder, mapped.

    Raises:
        ConfigError: no safetensors files there, or damaged ones.
    """

    def __init__(self, folder: Path) -> None:
        files = sorted(folder.glob("*.safetensors"))
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            files = [folder / name for name in names]
        files = [file for file in files if file.name != "united_experts.safetensors"]
        if not files:
            raise ConfigError(f"{folder} holds no safetensors files to stream experts from")
        self.bytes_read = 0
        self._maps: list[mmap.mmap] = []
        self._stored: dict[str, _Stored] = {}
        for number, file in enumerate(files):
            with file.open("rb") as handle:
                self._maps.append(mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ))
            size = int.from_bytes(self._maps[-1][:8], "little")
            try:
                header = json.loads(self._maps[-1][8 : 8 + size])
            except (ValueError, UnicodeDecodeError) as error:
                raise ConfigError(f"{file} is no safetensors file: {error}") from error
            for key, entry in header.items():
                if key == "__metadata__" or entry["dtype"] not in _DTYPES:
                    continue
                first, last = (8 + size + offset for offset in entry["data_offsets"])
                self._stored[key] = _Stored(number, _DTYPES[entry["dtype"]], tuple(entry["shape"]), first, last)

    def __contains__(self, key: str) -> bool:
        return key in self._stored

    def shape(self, key: str) -> tuple[int, ...]:
        return self._stored[key].shape

    def dtype(self, key: str) -> torch.dtype:
        return self._stored[key].dtype

    def copy(self, key: str, out: torch.Tensor, rows: slice | None = None) -> None:
        """Copy a tensor, or some of its rows, into `out` (converted to its dtype), and let go of the pages."""
        stored = self._stored[key]
        start, stop, shape = stored.start, stored.stop, stored.shape
        if rows is not None:
            width = (stop - start) // shape[0]
            first, last, _ = rows.indices(shape[0])
            start, stop, shape = start + first * width, start + last * width, (last - first, *shape[1:])
        if stop == start:
            return
        self.bytes_read += stop - start
        mapped = self._maps[stored.file]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the mapping cannot be written to; nobody does
            view = torch.frombuffer(memoryview(mapped)[start:stop], dtype=torch.uint8)
        source = view if start % stored.dtype.itemsize == 0 else view.clone()
        out.copy_(source.view(stored.dtype).view(shape))
        page = mmap.PAGESIZE
        low, high = start // page * page, -(-stop // page) * page
        mapped.madvise(mmap.MADV_DONTNEED, low, min(high, len(mapped)) - low)

    def element(self, key: str, index: int) -> torch.Tensor:
        """One number of a tensor, by its place in row-major order."""
        stored = self._stored[key]
        size = stored.dtype.itemsize
        raw = bytearray(self._maps[stored.file][stored.start + index * size : stored.start + (index + 1) * size])
        return torch.frombuffer(raw, dtype=stored.dtype)[0]


class ExpertSource:
    """Experts of a model in a mapped checkpoint.

    Args: layers: (name, experts module) as the runtime knows them; their tensors may be on the meta device.

    Raises:
        UnsupportedModelError: a layout that is not known here.
    """

    def __init__(self, folder: Path, layers: Sequence[tuple[str, nn.Module]]) -> None:
        self._checkpoint = MappedCheckpoint(folder)
        self._plans: list[dict[str, Any]] = []
        for name, module in layers:
            self._plans.append({key: self._find(name, key, module) for key in expert_tensor_names(module)})

    def _find(self, name: str, key: str, module: nn.Module) -> list[list[str]] | str:
        """Where a tensor lies: one key, or per expert the keys whose rows follow each other."""
        wanted = tuple(getattr(module, key).shape)
        fused = f"{name}.{key}"
        if fused in self._checkpoint and self._checkpoint.shape(fused) == wanted:
            return fused
        experts = int(module.num_experts)
        for gate, up, down, renamed in _SINGLE:
            folder = name.replace(*renamed) if renamed else name
            parts = {"gate_up_proj": [gate, up], "down_proj": [down], "up_proj": [up]}.get(key, [])
            found = [[f"{folder}.{expert}.{part}" for part in parts] for expert in range(experts)]
            if parts and all(single in self._checkpoint for singles in found for single in singles):
                rows = sum(self._checkpoint.shape(single)[0] for single in found[0])
                if (rows, *self._checkpoint.shape(found[0][0])[1:]) == wanted[1:]:
                    return found
        raise UnsupportedModelError(
            f"{name}.{key}: the checkpoint stores it in a way that weight streaming does not know; load it without "
            "async_ep"
        )

    @property
    def bytes_read(self) -> int:
        """Bytes of weights copied out of the checkpoint so far."""
        return self._checkpoint.bytes_read

    def elements(self, layer: int, key: str, indices: Sequence[int], per_expert: int) -> torch.Tensor:
        """Numbers of a layer's tensor by their place in row-major order, `per_expert` of them to an expert; of tensors
        that are one key or one key per expert."""
        plan = self._plans[layer][key]
        found = []
        for index in indices:
            expert, rest = divmod(index, per_expert)
            found.append(
                self._checkpoint.element(plan, index)
                if isinstance(plan, str)
                else self._checkpoint.element(plan[expert][0], rest)
            )
        return torch.stack(found)

    def read(self, layer: int, out: dict[str, torch.Tensor], first: int = 0, last: int | None = None) -> None:
        """Copy experts first..last of a layer into the rows 0.. of `out`'s tensors."""
        for key, plan in self._plans[layer].items():
            target = out[key]
            stop = target.shape[0] + first if last is None else last
            if isinstance(plan, str):
                self._checkpoint.copy(plan, target[: stop - first], slice(first, stop))
                continue
            for row, singles in enumerate(plan[first:stop]):
                start = 0
                for single in singles:
                    rows = self._checkpoint.shape(single)[0]
                    self._checkpoint.copy(single, target[row, start : start + rows])
                    start += rows
