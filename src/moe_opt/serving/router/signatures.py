"""Where a request's expert signature comes from, best source first (`reference/engines.md`):

1. `worker`: expert counts of the prompt from our own workers, exact;
2. `routed`: routed experts of every prompt token, from a vLLM or SGLang worker that returns them;
3. `token-table`: expected counts from the prompt's token ids, where the signature model has such a table.

Without any the request is routed by load alone.
"""

from __future__ import annotations

import base64
import binascii
import io
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe_opt.cluster.expert_counts import count_experts
from moe_opt.cluster.signature import SignatureModel
from moe_opt.errors import ConfigError

logger = logging.getLogger("moe_opt.router")
SOURCES = ("worker", "routed", "token-table", "none")


def decode_counts(body: Mapping[str, Any]) -> np.ndarray:
    """Expert counts [L, E] as our workers send them (`api.hand_off.encode_counts`).

    Raises:
        ConfigError: it is something else.
    """
    try:
        width = np.dtype(str(body["dtype"])).newbyteorder("<")
        if width.kind != "u":
            raise ValueError(f"dtype {width}")
        data = np.frombuffer(base64.b64decode(body["data"], validate=True), width)
        return data.reshape([int(size) for size in body["shape"]]).astype(np.int64)
    except (KeyError, ValueError, TypeError, binascii.Error) as error:
        raise ConfigError(f"expert counts cannot be read: {error!r}") from error


def routed_experts(reply: Mapping[str, Any]) -> np.ndarray | None:
    """int [tokens, L, k] of a vLLM or SGLang reply, None if it has none.

    Raises:
        ConfigError: there are some that cannot be read.
    """
    choice = (reply.get("choices") or [{}])[0]
    found = choice.get("routed_experts") or reply.get("prompt_routed_experts")
    meta = reply.get("meta_info") or {}
    try:
        if isinstance(found, str):
            return np.asarray(np.load(io.BytesIO(base64.b64decode(found, validate=True)), allow_pickle=False))
        if isinstance(found, list) and found:
            return np.asarray(found, dtype=np.int64)
        if isinstance(meta.get("routed_experts"), str):  # SGLang: raw int32 without a shape
            flat = np.frombuffer(base64.b64decode(meta["routed_experts"], validate=True), "<i4")
            layers, top_k = int(meta["num_layers"]), int(meta["top_k"])
            return flat.reshape(-1, layers, top_k)
    except (KeyError, ValueError, TypeError, binascii.Error) as error:
        raise ConfigError(f"routed experts cannot be read: {error!r}") from error
    return None


class SignatureSource:
    """Signatures of prefilled requests under the current model.

    Attributes:
        model: None while there is none: everything is routed by load then.
        used: how many requests got their signature from which source.
    """

    def __init__(self, model: SignatureModel | None = None) -> None:
        self.model = model
        self.used = dict.fromkeys(SOURCES, 0)

    def counts(self, reply: Mapping[str, Any]) -> tuple[np.ndarray | None, str]:
        """(expert counts [L, E] of the prompt, source) of a prefill worker's reply."""
        try:
            if reply.get("prefill_expert_counts"):
                return decode_counts(reply["prefill_expert_counts"]), "worker"
            routed = routed_experts(reply)
            if routed is not None and self.model is not None:
                return count_experts(routed, self.model.num_experts), "routed"
        except ConfigError as error:
            logger.warning("%s", error)
        return None, "none"

    def signature(self, reply: Mapping[str, Any], token_ids: Sequence[int] | None) -> tuple[np.ndarray | None, str]:
        """(unit vector, source) for a request, from its prefill's reply and its prompt's ids."""
        vector, source = self._signature(reply, token_ids)
        self.used[source] += 1
        return vector, source

    def _signature(self, reply: Mapping[str, Any], token_ids: Sequence[int] | None) -> tuple[np.ndarray | None, str]:
        model = self.model
        if model is None:
            return None, "none"
        counts, source = self.counts(reply)
        try:
            if counts is not None:
                return np.asarray(model.transform(counts)), source
            if model.token_table is not None and token_ids:
                return np.asarray(model.transform_tokens(token_ids)), "token-table"
            return None, "none"
        except ConfigError as error:  # another model's routing
            logger.warning("%s", error)
            return None, "none"
