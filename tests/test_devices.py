"""Device presets: present, ordered as the hardware is, and consistent with published ratios."""

from __future__ import annotations

import pytest

from moe_opt.devices import DEVICES, device_preset
from moe_opt.errors import ConfigError


def test_every_preset_is_there_and_positive():
    assert set(DEVICES) == {"A100-40GB", "A100-80GB", "H100", "H200", "MI300X", "B200", "cpu"}
    for device in DEVICES.values():
        assert min(device.memory, device.memory_bandwidth, device.bf16_flops, device.fp8_flops) > 0
        assert min(device.interconnect_bandwidth, device.host_bandwidth) > 0
        assert device.flops("fp8") >= device.flops("bfloat16")


def test_generations_are_in_order():
    a100, h100, h200, b200 = (device_preset(name) for name in ("a100-80gb", "h100", "H200", "b200"))
    assert a100.memory_bandwidth < h100.memory_bandwidth < h200.memory_bandwidth < b200.memory_bandwidth
    assert h100.bf16_flops == h200.bf16_flops
    assert h100.fp8_flops == 2 * h100.bf16_flops
    assert a100.fp8_flops == a100.bf16_flops  # no fp8 hardware


def test_unknown_names_are_refused():
    with pytest.raises(ConfigError, match="MI300X"):
        device_preset("tpu")
    with pytest.raises(ConfigError, match="fp4"):
        device_preset("h100").flops("fp4")
