"""From chosen tokens to what a client sees: text pieces, stop sequences, events."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np

from moe_opt.serving.engine.detokenize import Detokenizer, make_decoder, piece_of
from moe_opt.serving.engine.kv_state import KVState
from moe_opt.serving.engine.sampling import Sampled
from moe_opt.serving.engine.sequence import Sequence
from moe_opt.serving.engine.types import FinishEvent, Phase, Timings, Token, TokenEvent


def end_of_sequence_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """The ids that end `generate` too: of the generation config, else of the config, else of the tokenizer."""
    for source in (getattr(model, "generation_config", None), model.config.get_text_config(), tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return frozenset(ids) if isinstance(ids, (list, tuple)) else frozenset((ids,))
    return frozenset()


class OutputProcessor:
    """Makes events of one tokenizer's tokens; a sequence's own state is in the sequence."""

    def __init__(self, tokenizer: Any, eos_ids: frozenset[int]) -> None:
        self._decode = make_decoder(tokenizer)
        self._eos_ids = eos_ids
        self._special_ids = frozenset(tokenizer.all_special_ids)
        self._alone: dict[int, str] = {}  # text of a token on its own, for top_tokens

    def detokenizer(self, prompt_ids: SequenceOf[int]) -> Detokenizer:
        return Detokenizer(self._decode, prompt_ids)

    def prompt_token(self, prompt: SequenceOf[int], index: int, logprob: float | None) -> Token:
        token = prompt[index]
        return Token(token, piece_of(self._decode, prompt, index), logprob, token in self._special_ids)

    def token_event(
        self,
        sequence: Sequence,
        token: int,
        sampled: Sampled,
        position: int,
        phase: Phase,
        threshold: float,
        share: float,
        now: float,
    ) -> TokenEvent:
        """Take the newest token of a sequence into its text, and see whether it was the last (`finish_reason`)."""
        piece, special = self.take(sequence, token)
        ids, logprobs = sampled.top[position]
        return TokenEvent(
            sequence.request.request_id,
            sequence.generated - 1,
            Token(token, piece, sampled.logprobs[position], special),
            tuple(
                Token(other, self._text_alone(other), value, other in self._special_ids)
                for other, value in zip(ids, logprobs, strict=True)
            ),
            phase,
            threshold,
            share,
            now,
        )

    def take(self, sequence: Sequence, token: int) -> tuple[str, bool]:
        """Take the newest token of a sequence into its text; sets `finish_reason` if it is the last. Returns its piece
        of text, and whether it is a special token."""
        params = sequence.request.params
        assert sequence.detokenizer is not None
        special = token in self._special_ids
        if sequence.grammar is not None:
            sequence.grammar.advance(token)
        piece = sequence.detokenizer.push(token)
        if token in self._eos_ids and not params.ignore_eos:
            sequence.finish_reason = "eos_token"
        elif not special and params.stop and self._stops(sequence, piece):
            sequence.finish_reason = "stop_sequence"
        elif sequence.grammar is not None and sequence.grammar.finished:
            sequence.finish_reason = "eos_token"
        elif sequence.generated >= sequence.max_new_tokens:
            sequence.finish_reason = "length"
            rest = sequence.detokenizer.flush()
            piece += rest
        if not special and sequence.finish_reason != "stop_sequence":
            sequence.text.append(piece)
        return piece, special

    def finish_event(self, sequence: Sequence, counts: np.ndarray | None, kv: KVState | None = None) -> FinishEvent:
        """The last event. counts: int64 [L, E] of all its pages, None if nobody asked; kv likewise."""
        assert sequence.finish_reason is not None
        assert sequence.started is not None
        assert sequence.first_token is not None
        assert sequence.last_token is not None
        decode_counts = None
        if counts is not None and sequence.prefill_counts is not None:
            decode_counts = counts - sequence.prefill_counts
        return FinishEvent(
            request_id=sequence.request.request_id,
            finish_reason=sequence.finish_reason,
            generated_text="".join(sequence.text),
            prompt_tokens=sequence.prompt_tokens,
            generated_tokens=sequence.generated,
            cached_tokens=sequence.cached_tokens,
            timings=Timings(
                queue=sequence.started - sequence.arrival,
                prefill=sequence.first_token - sequence.started,
                decode=sequence.last_token - sequence.first_token,
            ),
            seed=sequence.seed if sequence.request.params.do_sample else None,
            prefill=tuple(sequence.prefill_logprobs),
            browned=sequence.lowest_threshold < 1.0,
            browned_share=sequence.browned_share_sum / sequence.generated,
            lowest_threshold=sequence.lowest_threshold,
            expert_counts=sequence.prefill_counts,
            decode_expert_counts=decode_counts,
            preemptions=sequence.preemptions,
            kv=kv,
            imported_tokens=sequence.imported_tokens,
        )

    def _stops(self, sequence: Sequence, piece: str) -> bool:
        """Whether a stop string ends in the new piece; it may have begun pieces ago. Cuts the text behind it."""
        stop = sequence.request.params.stop
        text = sequence.text_tail + piece
        ends = [(at + len(string), string) for string in stop if (at := text.find(string)) >= 0]
        if ends:
            sequence.text.append(text[len(sequence.text_tail) : min(ends)[0]])
            return True
        longest = max(map(len, stop)) - 1
        sequence.text_tail = text[-longest:] if longest else ""
        return False

    def _text_alone(self, token: int) -> str:
        text = self._alone.get(token)
        if text is None:
            text = self._alone[token] = self._decode([token])
        return text
