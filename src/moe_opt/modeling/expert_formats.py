"""How checkpoints store expert weights: as they are computed with, in fp8 with a scale for each block, or in MXFP4.

Stored tensors move as they are, and become the model's dtype where they are used. What comes out equals what
Transformers makes of the same checkpoint when it loads it dequantised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
# The sixteen values of e2m1, by code (OCP Microscaling Formats v1.0, table 5).
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
MXFP4_BLOCK = 32  # values that share a scale
_SCRATCH_VALUES = 1 << 24  # fp32 values that are decoded at a time, if an expert is no larger

# Of one tensor: where a part's rows are in the checkpoint, a key or per expert the keys that follow each other.
Keys = str | list[list[str]]


class Part(NamedTuple):
    """One stored tensor: its keys, its shape with the expert dimension first, and its dtype there."""

    keys: Keys
    shape: tuple[int, ...]
    dtype: torch.dtype


class Stored(NamedTuple):
    """A module's tensor `name` in the checkpoint.

    Attributes:
        kind: "plain", "fp8" or "mxfp4".
        parts: by the name under which they move: `name` itself; with fp8 also `name_scale_inv`; for MXFP4 `name_blocks`
            and `name_scales`.
        shape: of the module's tensor, [E, ...].
    """

    name: str
    kind: str
    parts: dict[str, Part]
    shape: tuple[int, ...]

    @property
    def form(self) -> tuple[str, str, tuple[tuple[str, tuple[int, ...], torch.dtype], ...]]:
        """What has to be the same in all layers that share buffers."""
        return self.name, self.kind, tuple((key, part.shape, part.dtype) for key, part in self.parts.items())


def scale_values(scales: torch.Tensor) -> torch.Tensor:
    """Scales as fp32; bytes are exponents with a bias of 127 (e8m0)."""
    if scales.dtype == torch.uint8:
        return (scales.to(torch.int32) << 23).view(torch.float32)
    return scales.to(torch.float32)


class Decoder:
    """Turns stored parts into the tensors that kernels read, in buffers that are made once.

    Args:
        stored: the tensors of a layer. dtype: what kernels compute in. device: where parts arrive.
        rows: experts at a time that `decode` is given at most.
    """

    def __init__(self, stored: list[Stored], dtype: torch.dtype, device: torch.device, rows: int) -> None:
        self._stored = [one for one in stored if one.kind != "plain"]
        self._coded = {key for one in self._stored for key in one.parts}
        per_expert = max(math.prod(one.shape[1:]) for one in self._stored)
        self._chunk = max(1, min(rows, _SCRATCH_VALUES // per_expert))
        self._values = torch.empty(self._chunk * per_expert, dtype=torch.float32, device=device)
        packed = any(one.kind == "mxfp4" for one in self._stored)
        self._codes = torch.empty(self._chunk * per_expert // 2 if packed else 0, dtype=torch.int32, device=device)
        pairs = [(_E2M1[byte & 15], _E2M1[byte >> 4]) for byte in range(256)]  # the low half comes first
        self._pairs = torch.tensor(pairs, dtype=torch.float32, device=device)
        self._out = {one.name: torch.empty((rows, *one.shape[1:]), dtype=dtype, device=device) for one in self._stored}

    @property
    def bytes(self) -> int:
        buffers = (self._values, self._codes, *self._out.values())
        return sum(buffer.numel() * buffer.element_size() for buffer in buffers)

    def decode(self, parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors of a layer by their module's names; they are valid until the next call. Plain ones pass through."""
        tensors = {key: value for key, value in parts.items() if key not in self._coded}
        for one in self._stored:
            rows = len(parts[next(iter(one.parts))])
            out = self._out[one.name][:rows]
            self.decode_into(one, parts, out)
            tensors[one.name] = out
        return tensors

    def decode_into(self, one: Stored, parts: Mapping[str, torch.Tensor], out: torch.Tensor) -> None:
        """Decode one tensor's parts, all of their rows, into `out` [rows, ...]."""
        run = self._fp8 if one.kind == "fp8" else self._mxfp4
        first, second = (parts[key] for key in one.parts)
        for start in range(0, len(out), self._chunk):
            chunk = slice(start, min(start + self._chunk, len(out)))
            run(first[chunk], second[chunk], out[chunk])

    def _fp8(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        experts, rows, columns = out.shape
        values = self._values[: out.numel()].view(out.shape)
        values.copy_(codes)
        high, wide = scales.shape[1:]
        blocks = values.view(experts, high, rows // high, wide, columns // wide)
        blocks *= scale_values(scales)[:, :, None, :, None]
        out.copy_(values)

    def _mxfp4(self, blocks: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        codes = self._codes[: blocks.numel()]
        codes.copy_(blocks.reshape(-1))
        values = self._values[: 2 * blocks.numel()].view(-1, 2)
        torch.index_select(self._pairs, 0, codes, out=values)
        grouped = values.view(*scales.shape, MXFP4_BLOCK)
        grouped *= scale_values(scales)[..., None]
        out.copy_(values.view(*scales.shape[:2], -1).transpose(1, 2))  # stored [E, out, in], computed with [E, in, out]


def element(one: Stored, index: int, read: Callable[[str, int, int], torch.Tensor]) -> torch.Tensor:
    """One value of the module's tensor, by its place in row-major order, without decoding the others.

    Args: read(part, expert, place within the expert) -> a 0-d tensor as stored.
    """
    expert, rest = divmod(index, math.prod(one.shape[1:]))
    first, *others = one.parts
    if one.kind == "plain":
        return read(first, expert, rest)
    row, column = divmod(rest, one.shape[-1])
    high, wide = one.parts[others[0]].shape[1:]
    if one.kind == "fp8":
        block = row // (one.shape[1] // high) * wide + column // (one.shape[2] // wide)
        return read(first, expert, rest).float() * scale_values(read(others[0], expert, block))
    place = column * one.shape[1] + row  # of the value in [out, in]
    byte = int(read(first, expert, place // 2))
    code = byte >> 4 if row % 2 else byte & 15
    return _E2M1[code] * scale_values(read(others[0], expert, column * wide + row // MXFP4_BLOCK))
