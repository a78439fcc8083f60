"""From a request's parameters to what the engine takes, with TGI's rules and its very messages.

Prompts are tokenised here, off the event loop, and truncated from the left as in TGI.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from moe_opt.serving.api.errors import validation_error
from moe_opt.serving.api.grammar_schema import closed_schema
from moe_opt.serving.api.limits import Limits
from moe_opt.serving.api.prompts import PromptEncoder
from moe_opt.serving.api.schemas import (
    GenerateParameters,
    GrammarType,
    JsonGrammar,
    RegexGrammar,
)
from moe_opt.serving.engine.types import Grammar, SamplingParams

if TYPE_CHECKING:
    from moe_opt.serving.engine.kv_state import KVState

# TGI's grammars allow one blank between items. Free whitespace would let a small model write blanks for ever.
_COMPACT = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}


@dataclasses.dataclass(frozen=True, slots=True)
class ValidRequest:
    """A request that may be handed to the engine.

    Attributes:
        inputs: the prompt as text ("" where it came as token ids). prompt_ids: token ids, truncated.
        params: of each sequence; with `best_of` above 1 every sequence draws a seed of its own.
        generated_ids, kv, hand_off, expert_counts: see `GenerationRequest`.
    """

    inputs: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    best_of: int
    details: bool
    decoder_input_details: bool
    return_full_text: bool
    exact: bool
    generated_ids: tuple[int, ...] = ()
    kv: KVState | None = None
    hand_off: bool = False
    expert_counts: bool = False


class Validator:
    """Checks requests against `limits`, with the tokenizer of the served model."""

    def __init__(self, limits: Limits, encoder: PromptEncoder, model_names: frozenset[str] = frozenset()) -> None:
        self.limits = limits
        self.encoder = encoder
        self.model_names = model_names

    async def validate(
        self,
        inputs: str | tuple[int, ...],
        parameters: GenerateParameters,
        *,
        add_special_tokens: bool = True,
        stream: bool = False,
        exact: bool = False,
        presence_penalty: float | None = None,
    ) -> ValidRequest:
        """Raises ApiError 422 with TGI's message for the first rule that is broken."""
        p = parameters
        params, best_of = self._sampling(p, presence_penalty)
        if stream and best_of != 1:
            raise validation_error("`best_of` != 1 is not supported when streaming tokens")
        if stream and p.decoder_input_details:
            raise validation_error("`decoder_input_details` == true is not supported when streaming tokens")
        if p.adapter_id is not None and p.adapter_id not in self.model_names:
            raise validation_error(f"adapter_id `{p.adapter_id}` is not loaded; this server serves the base model only")
        if not inputs:
            raise validation_error("`inputs` cannot be empty")
        longest = self.limits.max_input_tokens
        if p.truncate is not None and not 0 < p.truncate <= longest:
            raise validation_error(f"`truncate` must be strictly positive and less than {longest}. Given: {p.truncate}")
        ids = await self._encode(inputs, add_special_tokens)
        if p.truncate is not None:
            ids = ids[-p.truncate :]
        if not ids:
            raise validation_error("`inputs` holds no token")
        total = self.limits.max_total_tokens
        wanted = p.max_new_tokens if p.max_new_tokens is not None else max(1, total - len(ids))
        if len(ids) + wanted > total and (p.max_new_tokens is not None or len(ids) < longest):
            raise validation_error(
                f"`inputs` tokens + `max_new_tokens` must be <= {total}. "
                f"Given: {len(ids)} `inputs` tokens and {wanted} `max_new_tokens`"
            )
        if len(ids) > longest:
            raise validation_error(f"`inputs` must have less than {longest} tokens. Given: {len(ids)}")
        return ValidRequest(
            inputs=inputs if isinstance(inputs, str) else "",
            prompt_ids=ids,
            params=dataclasses.replace(params, max_new_tokens=wanted),
            best_of=best_of,
            details=bool(p.details) or bool(p.decoder_input_details),
            decoder_input_details=bool(p.decoder_input_details),
            return_full_text=bool(p.return_full_text),
            exact=exact or bool(p.exact),
        )

    async def _encode(self, inputs: str | tuple[int, ...], add_special_tokens: bool) -> tuple[int, ...]:
        if isinstance(inputs, str):
            return await self.encoder.encode(inputs, add_special_tokens)
        if any(token >= self.encoder.vocab_size for token in inputs):
            raise validation_error(f"`prompt` holds a token id that is not below {self.encoder.vocab_size}")
        return inputs

    def _sampling(self, p: GenerateParameters, presence_penalty: float | None) -> tuple[SamplingParams, int]:
        """The parameters in TGI's order of checks."""
        limits = self.limits
        best_of = 1 if p.best_of is None else p.best_of
        if limits.max_best_of == 1 and best_of != 1:
            raise validation_error("`best_of` != 1 is not allowed for this endpoint")
        if not 0 < best_of <= limits.max_best_of:
            raise validation_error(f"`best_of` must be > 0 and <= {limits.max_best_of}. Given: {best_of}")
        asked = (p.temperature, p.top_k, p.top_p, p.typical_p)
        if best_of > 1 and not p.do_sample and all(value is None for value in asked):
            raise validation_error("you must use sampling when `best_of` is > 1")
        if p.temperature is not None and p.temperature <= 0.0:
            raise validation_error("`temperature` must be strictly positive")
        if p.repetition_penalty is not None and p.repetition_penalty <= 0.0:
            raise validation_error("`repetition_penalty` must be strictly positive")
        if p.frequency_penalty is not None and not -2.0 <= p.frequency_penalty <= 2.0:
            raise validation_error("`frequency_penalty` must be >= -2.0 and <= 2.0")
        if p.top_p is not None and not 0.0 < p.top_p < 1.0:
            raise validation_error("`top_p` must be > 0.0 and < 1.0")
        if p.typical_p is not None and not 0.0 < p.typical_p < 1.0:
            raise validation_error("`typical_p` must be > 0.0 and < 1.0")
        if p.top_k is not None and p.top_k <= 0:
            raise validation_error("`top_k` must be strictly positive")
        if p.max_new_tokens == 0:
            raise validation_error("`max_new_tokens` must be strictly positive")
        stop = tuple(p.stop or ())
        if len(stop) > limits.max_stop_sequences:
            raise validation_error(
                f"`stop` supports up to {limits.max_stop_sequences} stop sequences. Given: {len(stop)}"
            )
        if any(len(text.encode()) > limits.max_stop_bytes for text in stop):
            raise validation_error(f"a `stop` sequence may have up to {limits.max_stop_bytes} bytes")
        if p.seed is not None and best_of > 1:
            raise validation_error("`seed` must not be set when `best_of` > 1")
        top_n = p.top_n_tokens or 0
        if top_n > limits.max_top_n_tokens:
            raise validation_error(f"`top_n_tokens` must be >= 0 and <= {limits.max_top_n_tokens}. Given: {top_n}")
        params = SamplingParams(
            do_sample=_samples(p),
            temperature=p.temperature,
            top_k=p.top_k,
            top_p=p.top_p,
            typical_p=p.typical_p,
            repetition_penalty=p.repetition_penalty,
            frequency_penalty=p.frequency_penalty,
            presence_penalty=presence_penalty,
            seed=p.seed,
            stop=tuple(text for text in stop if text),  # TGI lets an empty one through, where it never matches
            ignore_eos=bool(p.ignore_eos),
            top_n_tokens=top_n,
            decoder_input_details=bool(p.decoder_input_details),
            watermark=bool(p.watermark),
            grammar=self.grammar(p.grammar) if p.grammar is not None else None,
        )
        return params, best_of

    def grammar(self, grammar: GrammarType) -> Grammar:
        """The engine's grammar; a JSON schema may come as an object or as a string that holds one."""
        if not self.limits.grammar_support:
            raise validation_error("grammar is not supported")
        if isinstance(grammar, RegexGrammar):
            if not grammar.value:
                raise validation_error("grammar is not valid: the regex is empty")
            self._check_size(grammar.value)
            return Grammar("regex", grammar.value)
        schema: Any = grammar.value if isinstance(grammar, JsonGrammar) else grammar.value.schema_
        if schema is None and isinstance(grammar, JsonGrammar) and grammar.type == "json_object":
            schema = {"type": "object"}  # OpenAI's "any JSON object"
        if isinstance(schema, str):
            self._check_size(schema)
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise validation_error(f"grammar is not valid: {error}") from error
        if not isinstance(schema, dict):
            raise validation_error("grammar is not valid: a JSON schema must be an object")
        self._check_size(json.dumps(schema))
        return Grammar("json", {"x-guidance": _COMPACT, **closed_schema(schema)})

    def _check_size(self, text: str) -> None:
        if len(text.encode("utf-8", "surrogatepass")) > self.limits.max_grammar_bytes:
            raise validation_error(f"grammar is not valid: it has more than {self.limits.max_grammar_bytes} bytes")


def _samples(p: GenerateParameters) -> bool:
    """TGI's rule: a warper that changes the distribution samples, even where `do_sample` is false; a temperature of
    exactly 1 changes nothing."""
    tempered = p.temperature is not None and p.temperature != 1.0
    return bool(p.do_sample) or tempered or p.top_k is not None or p.top_p is not None or p.typical_p is not None
