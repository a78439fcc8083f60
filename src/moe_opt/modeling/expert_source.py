"""Expert weights read straight from a checkpoint's safetensors files, layer by layer, into buffers that exist already.

Files are mapped, not read: a copy touches only the pages of the tensors that it needs, and gives them back afterwards.
Checkpoints hold experts fused (`experts.gate_up_proj` [E, ...]) or one by one (`experts.7.gate_proj.weight`, Mixtral's
`w1`, `w2`, `w3`), plain or quantised (`expert_formats.py`); all end in the module's own layout.
"""

from __future__ import annotations

import json
import math
import mmap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from moe_opt.errors import ConfigError, UnsupportedModelError
from moe_opt.modeling.expert_formats import FP8_DTYPES, MXFP4_BLOCK, Decoder, Keys, Part, Stored, element
from moe_opt.modeling.experts import expert_tensor_names

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8, "U8": torch.uint8,
}  # fmt: skip
# How single experts are called: gate, up and down projection, and where their folder differs from the module's name.
_SINGLE = (
    ("gate_proj.weight", "up_proj.weight", "down_proj.weight", None),
    ("w1.weight", "w3.weight", "w2.weight", None),
    ("w1.weight", "w3.weight", "w2.weight", (".mlp.experts", ".block_sparse_moe.experts")),
)


class _Place(NamedTuple):
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
        self._stored: dict[str, _Place] = {}
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
                self._stored[key] = _Place(number, _DTYPES[entry["dtype"]], tuple(entry["shape"]), first, last)

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
        UnsupportedModelError: a layout that is not known here, or one that differs from layer to layer.
    """

    def __init__(self, folder: Path, layers: Sequence[tuple[str, nn.Module]]) -> None:
        self._checkpoint = MappedCheckpoint(folder)
        self._plans: list[dict[str, Stored]] = []
        self._dtype = layers[0][1].down_proj.dtype
        for name, module in layers:
            self._plans.append({key: self._find(name, key, module) for key in expert_tensor_names(module)})
            if [one.form for one in self._plans[-1].values()] != [one.form for one in self._plans[0].values()]:
                raise UnsupportedModelError(
                    f"{name}: the checkpoint stores these experts in another way than those of {layers[0][0]}; load it "
                    "without async_ep"
                )
        self._decoder: Decoder | None = None

    def _find(self, name: str, key: str, module: nn.Module) -> Stored:
        """Where a tensor lies, and in which format."""
        tensor = getattr(module, key)
        wanted = tuple(tensor.shape)
        keys = self._keys(name, key, wanted)
        if keys is not None:
            dtype = self._checkpoint.dtype(_first(keys))
            if dtype not in FP8_DTYPES:
                return Stored(key, "plain", {key: Part(keys, wanted, tensor.dtype)}, wanted)
            scales = self._scales(keys, wanted)
            if scales is not None:
                return Stored(key, "fp8", {key: Part(keys, wanted, dtype), f"{key}_scale_inv": scales}, wanted)
        blocks, scale = f"{name}.{key}_blocks", f"{name}.{key}_scales"
        if len(wanted) == 3 and blocks in self._checkpoint and scale in self._checkpoint:
            experts, inner, outer = wanted
            shape = (experts, outer, inner // MXFP4_BLOCK, MXFP4_BLOCK // 2)
            if self._checkpoint.shape(blocks) == shape and self._checkpoint.shape(scale) == shape[:-1]:
                parts = {
                    f"{key}_blocks": Part(blocks, shape, torch.uint8),
                    f"{key}_scales": Part(scale, shape[:-1], torch.uint8),
                }
                return Stored(key, "mxfp4", parts, wanted)
        raise UnsupportedModelError(
            f"{name}.{key}: the checkpoint stores it in a way that weight streaming does not know; load it without "
            "async_ep"
        )

    def _keys(self, name: str, key: str, wanted: tuple[int, ...]) -> Keys | None:
        """One key, or per expert the keys whose rows follow each other."""
        fused = f"{name}.{key}"
        if fused in self._checkpoint and self._checkpoint.shape(fused) == wanted:
            return fused
        for gate, up, down, renamed in _SINGLE:
            folder = name.replace(*renamed) if renamed else name
            parts = {"gate_up_proj": [gate, up], "down_proj": [down], "up_proj": [up]}.get(key, [])
            found = [[f"{folder}.{expert}.{part}" for part in parts] for expert in range(wanted[0])]
            if parts and all(single in self._checkpoint for singles in found for single in singles):
                rows = sum(self._checkpoint.shape(single)[0] for single in found[0])
                if (rows, *self._checkpoint.shape(found[0][0])[1:]) == wanted[1:]:
                    return found
        return None

    def _scales(self, keys: Keys, wanted: tuple[int, ...]) -> Part | None:
        """The scales of fp8 weights: beside each of their keys, one for each block of equal size."""
        names: Keys = f"{keys}_scale_inv" if isinstance(keys, str) else [[f"{k}_scale_inv" for k in ks] for ks in keys]
        singles = [names] if isinstance(names, str) else [single for part in names for single in part]
        if any(single not in self._checkpoint or len(self._checkpoint.shape(single)) < 2 for single in singles):
            return None
        shape = self._checkpoint.shape(_first(names))
        if not isinstance(names, str):
            if any(
                self._checkpoint.shape(k)[0] % self._checkpoint.shape(n)[0]
                for k, n in zip(keys[0], names[0], strict=True)
            ):
                return None
            shape = (len(names), sum(self._checkpoint.shape(single)[0] for single in names[0]), shape[1])
        if len(shape) != 3 or wanted[1] % shape[1] or wanted[2] % shape[2]:
            return None
        return Part(names, shape, self._checkpoint.dtype(_first(names)))

    @property
    def bytes_read(self) -> int:
        """Bytes of weights copied out of the checkpoint so far."""
        return self._checkpoint.bytes_read

    @property
    def stored(self) -> list[Stored]:
        """A layer's tensors as the checkpoint has them; the same for all layers."""
        return list(self._plans[0].values())

    @property
    def quantised(self) -> bool:
        return any(one.kind != "plain" for one in self.stored)

    def elements(self, layer: int, key: str, indices: Sequence[int]) -> torch.Tensor:
        """Numbers of a layer's tensor by their place in row-major order, fp32; of tensors that are one key or one key
        per expert."""
        one = self._plans[layer][key]

        def read(part: str, expert: int, place: int) -> torch.Tensor:
            keys, shape, _ = one.parts[part]
            if isinstance(keys, str):
                return self._checkpoint.element(keys, expert * math.prod(shape[1:]) + place)
            return self._checkpoint.element(keys[expert][0], place)

        return torch.stack([element(one, index, read).float() for index in indices])

    def read_stored(self, layer: int, out: dict[str, torch.Tensor], first: int, last: int) -> None:
        """Copy experts first..last of a layer, as they are stored, into the rows 0.. of `out`: a tensor a part."""
        for one in self._plans[layer].values():
            for name, part in one.parts.items():
                self._read_part(part, out[name], first, last)

    def read(self, layer: int, out: dict[str, torch.Tensor], first: int, last: int) -> None:
        """Copy experts first..last of a layer into the rows 0.. of the tensors in `out`, in their dtype."""
        for key, one in self._plans[layer].items():
            target = out[key][: last - first]
            if one.kind == "plain":
                self._read_part(one.parts[key], target, first, last)
                continue
            parts = {
                name: torch.empty((last - first, *part.shape[1:]), dtype=part.dtype) for name, part in one.parts.items()
            }
            for name, part in one.parts.items():
                self._read_part(part, parts[name], first, last)
            if self._decoder is None:
                self._decoder = Decoder(self.stored, self._dtype, torch.device("cpu"), 1)
            self._decoder.decode_into(one, parts, target)

    def _read_part(self, part: Part, target: torch.Tensor, first: int, last: int) -> None:
        if isinstance(part.keys, str):
            self._checkpoint.copy(part.keys, target[: last - first], slice(first, last))
            return
        for row, singles in enumerate(part.keys[first:last]):
            start = 0
            for single in singles:
                rows = self._checkpoint.shape(single)[0]
                self._checkpoint.copy(single, target[row, start : start + rows])
                start += rows


def _first(keys: Keys) -> str:
    return keys if isinstance(keys, str) else keys[0][0]
