"""Every bound that the API enforces, in one place."""

from __future__ import annotations

import dataclasses

from moe_opt.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the API; names and defaults are those of TGI's launcher where it has them.

    Attributes:
        max_input_tokens, max_total_tokens: prompt, and prompt plus output, of one request.
        max_concurrent_requests: sequences waiting or running; one more is answered with 429.
        max_best_of, max_stop_sequences, max_top_n_tokens: highest values of these parameters.
        max_client_batch_size: prompts of one `/v1/completions` or `/vertex` request.
        max_score_items: prompts and choices of one request of the scoring routes.
        payload_limit: bytes of a request body. max_stop_bytes: bytes of one stop sequence.
        max_grammar_bytes: bytes of a grammar or of all tools together, as JSON.
        body_timeout: seconds to receive a body. write_timeout: seconds that a client may leave a stream unread.
        request_timeout: seconds for the whole answer, None for no bound.
        keep_alive: seconds between the comments that keep a silent stream open.
        grammar_support: False refuses grammars, tools and response formats.
    """

    max_input_tokens: int
    max_total_tokens: int
    max_concurrent_requests: int = 128
    max_best_of: int = 2
    max_stop_sequences: int = 4
    max_top_n_tokens: int = 5
    max_client_batch_size: int = 4
    max_score_items: int = 1024
    payload_limit: int = 2_000_000
    max_stop_bytes: int = 4096
    max_grammar_bytes: int = 100_000
    body_timeout: float = 60.0
    write_timeout: float = 60.0
    request_timeout: float | None = None
    keep_alive: float = 15.0
    grammar_support: bool = True

    def __post_init__(self) -> None:
        for name in ("max_input_tokens", "max_concurrent_requests", "max_best_of", "max_client_batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_input_tokens >= self.max_total_tokens:
            raise ConfigError(
                f"max_input_tokens ({self.max_input_tokens}) must be below max_total_tokens ({self.max_total_tokens}): "
                "a request generates at least one token"
            )
        for name in ("body_timeout", "write_timeout", "request_timeout", "keep_alive"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{name} must be a positive number of seconds, got {value}")
