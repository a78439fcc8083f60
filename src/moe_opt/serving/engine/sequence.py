"""A request while it is in the engine."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from moe_opt.serving.engine.pages import chain_hash, root_hash
from moe_opt.serving.engine.types import FinishReason, GenerationRequest, Token

if TYPE_CHECKING:
    from moe_opt.serving.engine.detokenize import Detokenizer
    from moe_opt.serving.engine.grammar import GrammarState
    from moe_opt.serving.engine.sampling import PenaltyState


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    """Prompt and output of one request, and how far its KV is computed.

    Attributes:
        serial: order of arrival, unique. tokens: prompt and generated ids; the last generated one has no KV yet.
        computed: tokens whose KV lies in `pages`. pages: page of tokens i * page_size and following.
        runs: [first page, number of pages] of neighbouring pages, in order; together they are `pages`.
        browned_from: first token whose KV was computed under brownout, None while all is exact.
        max_new_tokens: resolved against the engine's `max_total_tokens`.
    """

    request: GenerationRequest
    serial: int
    max_new_tokens: int
    seed: int
    arrival: float
    tokens: list[int] = dataclasses.field(default_factory=list)
    computed: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)
    runs: list[list[int]] = dataclasses.field(default_factory=list)
    browned_from: int | None = None

    # prefix chain: hash per full page, for the exact and the browned chain
    hashes: dict[bool, list[bytes]] = dataclasses.field(default_factory=dict)
    published: int = 0  # pages offered to the prefix cache
    publishable: bool = True
    cached_tokens: int = 0
    preemptions: int = 0
    counted: int = 0  # tokens whose expert counts came with their KV and are not counted again
    imported_tokens: int = 0

    # output
    penalties: PenaltyState | None = None
    detokenizer: Detokenizer | None = None
    grammar: GrammarState | None = None
    text_tail: str = ""  # the end of the text, as long as a stop string may still start in it
    text: list[str] = dataclasses.field(default_factory=list)
    prefill_logprobs: list[Token] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None

    # times (time.monotonic) and brownout seen
    started: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    lowest_threshold: float = 1.0
    browned_share_sum: float = 0.0
    prefill_counts: np.ndarray | None = None

    def __post_init__(self) -> None:
        if not self.tokens:
            self.tokens = list(self.request.prompt_ids)

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def remaining_compute(self) -> int:
        """Tokens without KV; 1 for a sequence that decodes."""
        return len(self.tokens) - self.computed

    @property
    def decoding(self) -> bool:
        """Only its newest token, a generated one, has no KV yet."""
        return self.remaining_compute == 1 and self.generated > 0

    def append_page(self, page: int) -> None:
        self.pages.append(page)
        if self.runs and self.runs[-1][0] + self.runs[-1][1] == page:
            self.runs[-1][1] += 1
        else:
            self.runs.append([page, 1])

    def drop_pages(self) -> list[int]:
        """Forget all KV; returns the pages to release."""
        pages, self.pages, self.runs = self.pages, [], []
        self.computed = self.published = self.counted = 0
        self.publishable = True
        self.browned_from = None
        return pages

    def page_hash(self, index: int, page_size: int, browned: bool) -> bytes:
        """Chain hash of the full page `index`; computed once."""
        chain = self.hashes.setdefault(browned, [])
        while len(chain) <= index:
            previous = chain[-1] if chain else root_hash(self.request.adapter, browned)
            start = len(chain) * page_size
            chain.append(chain_hash(previous, self.tokens[start : start + page_size]))
        return chain[index]
