"""Accelerators by their published figures, for roofline estimates and the fleet simulator. No torch.

FLOP/s are dense (vendors' headline figures with sparsity are halved). Link bandwidths are per direction,
because a transfer goes one way: half of the bidirectional figure that data sheets print. GB is 1e9 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_opt.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Device:
    """What one accelerator can move and compute at best; real kernels reach 60 to 90 % of it."""

    name: str
    memory: float
    """Bytes of device memory."""
    memory_bandwidth: float
    """Bytes per second between device memory and the cores."""
    bf16_flops: float
    """Dense FLOP/s in bfloat16."""
    fp8_flops: float
    """Dense FLOP/s in fp8; equal to `bf16_flops` where there is no fp8 hardware."""
    interconnect_bandwidth: float
    """Bytes per second to the other devices of the node, per direction, all links together."""
    host_bandwidth: float
    """Bytes per second from host memory, per direction."""

    def flops(self, dtype: str = "bfloat16") -> float:
        """Dense FLOP/s for "bfloat16" ("float16", "bf16") or "fp8" ("float8_e4m3fn").

        Raises:
            ConfigError: another dtype.
        """
        if dtype in ("bfloat16", "float16", "bf16", "fp16"):
            return self.bf16_flops
        if dtype in ("fp8", "float8_e4m3fn", "float8_e5m2"):
            return self.fp8_flops
        raise ConfigError(f"no peak rate for dtype {dtype!r}; use bfloat16 or fp8")


_PCIE_4 = 31.5e9  # x16: 16 GT/s x 16 lanes x 128/130 encoding / 8 bits
_PCIE_5 = 63.0e9  # x16: 32 GT/s, likewise

_DEVICES = (
    # NVIDIA A100 data sheet (nvidia-a100-datasheet-us-nvidia-1758950-r4): SXM4, 1,555 and 2,039 GB/s, 312
    # TFLOP/s bf16, NVLink 600 GB/s (both directions), PCIe 4.0; no fp8.
    Device("A100-40GB", 40e9, 1.555e12, 312e12, 312e12, 300e9, _PCIE_4),
    Device("A100-80GB", 80e9, 2.039e12, 312e12, 312e12, 300e9, _PCIE_4),
    # NVIDIA H100 data sheet, SXM5: 3.35 TB/s, 1,979 / 3,958 TFLOP/s bf16 / fp8 with sparsity, NVLink 900
    # GB/s, PCIe 5.
    Device("H100", 80e9, 3.35e12, 989.5e12, 1_979e12, 450e9, _PCIE_5),
    # NVIDIA H200 data sheet, SXM: 141 GB, 4.8 TB/s, else as H100.
    Device("H200", 141e9, 4.8e12, 989.5e12, 1_979e12, 450e9, _PCIE_5),
    # AMD Instinct MI300X data sheet: 192 GB, 5.3 TB/s, 1,307.4 / 2,614.9 TFLOP/s bf16 / fp8 dense, seven
    # Infinity Fabric links of 128 GB/s (both directions), PCIe 5.
    Device("MI300X", 192e9, 5.3e12, 1_307.4e12, 2_614.9e12, 448e9, _PCIE_5),
    # NVIDIA DGX B200 data sheet, an eighth of it: 1,440 GB, 64 TB/s, 72 PFLOP/s fp8 with sparsity, NVLink
    # 14.4 TB/s; bf16 is half of fp8. Host: PCIe 5.
    Device("B200", 180e9, 8.0e12, 2_250e12, 4_500e12, 900e9, _PCIE_5),
    # Two cores of an Intel Xeon with AMX in a virtual machine that ran other work, measured with torch 2.13
    # in bfloat16: a 2048^3 matrix product (420 GFLOP/s) and a matrix-vector product over 256 MB (8.6 GB/s).
    # There is one memory: what is "host" or "another rank" elsewhere is a copy here, a read and a write.
    Device("cpu", 16e9, 8.6e9, 4.2e11, 4.2e11, 4.3e9, 4.3e9),
)

DEVICES: dict[str, Device] = {device.name: device for device in _DEVICES}
"""Presets by name."""


def device_preset(name: str) -> Device:
    """The preset called `name`, in any case.

    Raises:
        ConfigError: no such preset; the message lists them.
    """
    for known, device in DEVICES.items():
        if known.lower() == name.lower():
            return device
    raise ConfigError(f"unknown device {name!r}; presets: {', '.join(DEVICES)}")
