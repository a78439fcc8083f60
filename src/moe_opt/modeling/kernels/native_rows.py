"""Row-wise kernels that stand alone (native/rows.cpp)."""

from __future__ import annotations

import torch

from moe_opt.modeling.kernels.native import library


def logsumexp(logits: torch.Tensor) -> torch.Tensor:
    """float32 [N] of logits [N, V]: over the last dimension. torch makes four passes and a copy of the logits of it."""
    loaded = library.load() if logits.device.type == "cpu" and logits.dtype == torch.float32 else None
    if loaded is None or logits.dim() != 2 or not logits.is_contiguous():
        return logits.logsumexp(-1)
    out = torch.empty(logits.shape[0])
    loaded.moe_opt_logsumexp(
        logits.data_ptr(), logits.shape[0], logits.shape[1], out.data_ptr(), torch.get_num_threads()
    )
    return out
