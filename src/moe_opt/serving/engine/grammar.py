"""Constrained output: JSON schemas and regular expressions, through llguidance (an optional dependency).

llguidance computes, in Rust and without tables per grammar, which tokens may come next. A grammar that cannot be met is
that request's error alone.
"""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
import torch

from moe_opt.serving.engine.types import GenerationError, Grammar, InvalidRequestError


class GrammarState:
    """Where one sequence is in its grammar."""

    def __init__(self, matcher: Any, eos_token_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids

    def mask(self, scores: torch.Tensor) -> None:
        """Put -inf, in place, on what may not come next. scores: [V]."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = torch.from_numpy(np.unpackbits(bits, bitorder="little", count=min(bits.size * 8, scores.shape[0])))
        known = allowed.shape[0]
        scores[:known].masked_fill_(allowed.to(scores.device) == 0, float("-inf"))
        scores[known:] = float("-inf")  # ids that the model has and the tokenizer has not

    def advance(self, token: int) -> None:
        """The token was chosen.

        Raises:
            GenerationError: the grammar does not allow it, or ran into one of llguidance's limits.
        """
        if token in self._eos_token_ids and not self._matcher.is_accepting():
            raise GenerationError("the grammar cannot be met: no token of this vocabulary goes on from here")
        if not self._matcher.consume_token(token):
            raise GenerationError(f"the grammar went wrong at token {token}: {_first_line(self._matcher.get_error())}")

    @property
    def finished(self) -> bool:
        """Nothing but the end may follow."""
        return bool(self._matcher.is_stopped())


class GrammarCompiler:
    """Makes grammar states for one tokenizer. Thread-safe; the tokenizer's trie is built on first use (about 1 s for
    100,000 tokens)."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: list[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()
        self._trie: Any = None

    def compile(self, grammar: Grammar) -> GrammarState:
        """
        Raises:
            InvalidRequestError: llguidance is not installed, the schema or pattern is wrong or unsupported, or the
                tokenizer has no fast version.
        """
        try:
            import llguidance
        except ImportError as error:
            raise InvalidRequestError(
                "`grammar` needs the package llguidance on the server: pip install llguidance"
            ) from error
        matcher_class = llguidance.LLMatcher
        try:
            if grammar.type == "json":
                schema = json.loads(grammar.value) if isinstance(grammar.value, str) else grammar.value
                if not isinstance(schema, (dict, bool)):
                    raise ValueError(f"a JSON schema is an object, got {type(schema).__name__}")
                source = matcher_class.grammar_from_json_schema(json.dumps(schema))
            elif grammar.type == "regex":
                source = matcher_class.grammar_from_regex(str(grammar.value))
            else:
                raise ValueError(f"unknown type {grammar.type!r}; choose 'json' or 'regex'")
            matcher = matcher_class(self._tokenizer_trie(), source)
        except ValueError as error:
            raise InvalidRequestError(f"`grammar` does not compile: {_first_line(error)}") from error
        if matcher.is_error():
            raise InvalidRequestError(f"`grammar` does not compile: {_first_line(matcher.get_error())}")
        return GrammarState(matcher, frozenset(self._eos_token_ids))

    def _tokenizer_trie(self) -> Any:
        from llguidance import hf

        with self._lock:
            if self._trie is None:
                size = max(self._vocab_size, len(self._tokenizer))
                self._trie = hf.from_tokenizer(self._tokenizer, n_vocab=size, eos_token=self._eos_token_ids or None)
            return self._trie


def _first_line(error: Any) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
