"""Prefill here, decode there: vLLM's `kv_transfer_params` on every route that generates (DESIGN.md, decision 4).

- `{"do_remote_decode": true}`: compute the prompt and one token, keep the KV, and answer with a ticket in
  `kv_transfer_params`, the prompt's ids, and the router's choices for it (`prefill_expert_counts`).
- a ticket, `{"do_remote_prefill": true, ...}`: fetch that KV and go on; without it, if it is gone.
- `return_expert_counts`: the answer brings the router's choices for prompt and output (not in streams).
- `generated_token_ids` beside either: output that the client has already; the answer goes on behind it.
"""

from __future__ import annotations

import base64
import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
from aiohttp import web

from moe_opt.serving.api.errors import ApiError, validation_error
from moe_opt.serving.api.schemas import HandOffFields
from moe_opt.serving.engine.types import FinishEvent

if TYPE_CHECKING:
    from moe_opt.serving.api.state import ApiState
    from moe_opt.serving.api.validation import ValidRequest

_KEY = "hand_off"


@dataclasses.dataclass(frozen=True, slots=True)
class HandOff:
    """What a request asks for. `ticket` is None unless KV waits elsewhere."""

    prefill: bool
    ticket: dict[str, Any] | None
    generated_ids: tuple[int, ...]
    token_ids: bool
    expert_counts: bool = False


NOTHING = HandOff(False, None, (), False)


def note_hand_off(request: web.Request, state: ApiState, body: HandOffFields, *, single: bool, stream: bool) -> HandOff:
    """Read a body's hand-off and keep it with the HTTP request.

    Args:
        single: whether the request generates one sequence, without tools; others cannot be split.

    Raises:
        ApiError: the server takes no part in hand-offs, or the request cannot be handed off.
    """
    params = body.kv_transfer_params
    if not params and not body.return_token_ids and not body.return_expert_counts:
        return NOTHING
    params = params or {}
    ids = params.get("generated_token_ids") or []
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        raise validation_error("`kv_transfer_params.generated_token_ids` must be a list of token ids")
    prefill, ticket = params.get("do_remote_decode") is True, params.get("do_remote_prefill") is True
    if prefill and ticket:
        raise validation_error("`kv_transfer_params` asks for do_remote_decode and do_remote_prefill at once")
    if (prefill or ticket) and state.kv is None:
        raise validation_error("this server hands no KV on: start it with --kv-role prefill, decode or both")
    if (prefill or ticket or ids) and not single:
        raise validation_error("`kv_transfer_params` needs a request of one sequence, without tools")
    if prefill and stream:
        raise validation_error("`kv_transfer_params.do_remote_decode` is for requests without `stream`")
    found = HandOff(
        prefill,
        dict(params) if ticket else None,
        tuple(ids),  # type: ignore[arg-type]
        bool(body.return_token_ids),
        bool(body.return_expert_counts),
    )
    request[_KEY] = found
    return found


def hand_off_of(request: web.Request) -> HandOff:
    found: HandOff = request.get(_KEY, NOTHING)
    return found


async def with_hand_off(request: web.Request, state: ApiState, valid: ValidRequest) -> ValidRequest:
    """A validated request with what its hand-off says: KV fetched, output so far, one token for a prefill."""
    wanted = hand_off_of(request)
    if wanted is NOTHING:
        return valid
    limit = valid.params.max_new_tokens or 0
    if len(wanted.generated_ids) > limit:
        raise validation_error(f"{len(wanted.generated_ids)} generated_token_ids are more than max_new_tokens {limit}")
    if wanted.prefill:
        params = dataclasses.replace(valid.params, max_new_tokens=1, stop=())
        return dataclasses.replace(valid, params=params, hand_off=True, expert_counts=True)
    kv = None
    if wanted.ticket is not None:
        assert state.kv is not None
        kv = await state.kv.fetch(wanted.ticket)
    return dataclasses.replace(valid, generated_ids=wanted.generated_ids, kv=kv, expert_counts=wanted.expert_counts)


async def hand_off_fields(
    request: web.Request, state: ApiState, valid: ValidRequest, finish: FinishEvent
) -> dict[str, Any]:
    """What the answer of a prefill carries beside its one token."""
    wanted = hand_off_of(request)
    if not wanted.prefill:
        fields: dict[str, Any] = {}
        if wanted.token_ids:
            fields["prompt_token_ids"] = list(valid.prompt_ids)
        if wanted.expert_counts:
            for name, counts in (("prefill", finish.expert_counts), ("decode", finish.decode_expert_counts)):
                fields[f"{name}_expert_counts"] = None if counts is None else encode_counts(counts)
        return fields
    assert state.kv is not None
    ticket = await state.kv.store(finish.kv) if finish.kv is not None else None
    return {
        "kv_transfer_params": ticket,
        "prompt_token_ids": list(valid.prompt_ids),
        "prefill_expert_counts": None if finish.expert_counts is None else encode_counts(finish.expert_counts),
    }


def encode_counts(counts: np.ndarray) -> dict[str, Any]:
    """Expert counts [L, E] as JSON: the smallest unsigned integers that hold them, base64, little-endian."""
    width = np.min_scalar_type(int(counts.max(initial=0)))
    data = counts.astype(width.newbyteorder("<"))
    return {"shape": list(counts.shape), "dtype": width.name, "data": base64.b64encode(data.tobytes()).decode()}


async def send_kv(request: web.Request) -> web.StreamResponse:
    """GET /kv_transfer/{name}: the safetensors file behind a ticket."""
    from moe_opt.serving.api.state import state_of

    transfer = state_of(request).kv
    path = transfer.path_of(request.match_info["name"]) if transfer is not None else None
    if path is None:
        raise ApiError(404, "not_found", "no such KV: it was fetched already, or expired")
    return web.FileResponse(path, headers={"Content-Type": "application/octet-stream"})


async def drop_kv(request: web.Request) -> web.StreamResponse:
    """DELETE /kv_transfer/{name}: nobody will fetch it (any more)."""
    from moe_opt.serving.api.state import state_of

    transfer = state_of(request).kv
    gone = transfer is None or not transfer.remove(request.match_info["name"])
    return web.Response(status=404 if gone else 204)
