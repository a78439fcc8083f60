"""Request bodies of the TGI and OpenAI routes, with TGI's names, types and defaults.

Types are strict as in TGI (no numbers in strings, no floats for integers). Ranges are checked in `validation`, so
that their messages are TGI's. Unknown keys are ignored, as TGI and the OpenAI clients expect. Keys of ours: `exact`
(exact output whatever the brownout setting) and `ignore_eos` (for load tests).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

U32 = Annotated[int, Field(ge=0, lt=2**32)]
I32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
U64 = Annotated[int, Field(ge=0, lt=2**64)]


class RequestModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())


# ------------------------------------------------------------------ TGI


class JsonGrammar(RequestModel):
    type: Literal["json", "json_object"]
    value: JsonValue = None


class RegexGrammar(RequestModel):
    type: Literal["regex"]
    value: str


class JsonSchemaValue(RequestModel):
    model_config = ConfigDict(strict=True, extra="ignore", populate_by_name=True)
    name: str | None = None
    schema_: JsonValue = Field(alias="schema")


class JsonSchemaGrammar(RequestModel):
    """TGI puts the schema under `value`, OpenAI under `json_schema`."""

    type: Literal["json_schema"]
    value: JsonSchemaValue

    @model_validator(mode="before")
    @classmethod
    def _openai_spelling(cls, data: Any) -> Any:
        if isinstance(data, dict) and "value" not in data and "json_schema" in data:
            return {**data, "value": data["json_schema"]}
        return data


class TextFormat(RequestModel):
    type: Literal["text"]


GrammarType = Annotated[JsonGrammar | RegexGrammar | JsonSchemaGrammar, Field(discriminator="type")]
ResponseFormat = Annotated[JsonGrammar | RegexGrammar | JsonSchemaGrammar | TextFormat, Field(discriminator="type")]


class GenerateParameters(RequestModel):
    """`parameters` of a TGI request. None stands for "not given" throughout."""

    adapter_id: str | None = None
    best_of: U32 | None = None
    decoder_input_details: bool | None = None
    details: bool | None = None
    do_sample: bool | None = None
    frequency_penalty: float | None = None
    grammar: GrammarType | None = None
    max_new_tokens: U32 | None = None
    repetition_penalty: float | None = None
    return_full_text: bool | None = None
    seed: U64 | None = None
    stop: list[str] | None = None
    temperature: float | None = None
    top_k: I32 | None = None
    top_n_tokens: U32 | None = None
    top_p: float | None = None
    truncate: U64 | None = None
    typical_p: float | None = None
    watermark: bool | None = None
    exact: bool | None = None
    ignore_eos: bool | None = None


class HandOffFields(RequestModel):
    """What vLLM's prefill/decode protocol adds to a request; see `hand_off`."""

    kv_transfer_params: dict[str, JsonValue] | None = None
    return_token_ids: bool | None = None
    return_expert_counts: bool | None = None


class GenerateRequest(HandOffFields):
    inputs: str
    parameters: GenerateParameters | None = None

    @property
    def resolved(self) -> GenerateParameters:
        """Without `parameters` TGI samples; with them it does so only when told to."""
        return GenerateParameters(do_sample=True) if self.parameters is None else self.parameters


class TokenizeRequest(GenerateRequest):
    add_special_tokens: bool | None = None


class CompatGenerateRequest(GenerateRequest):
    stream: bool | None = None


class VertexRequest(RequestModel):
    instances: list[GenerateRequest]


# ------------------------------------------------------------------ OpenAI


class Url(RequestModel):
    url: str


class TextChunk(RequestModel):
    type: Literal["text"]
    text: str


class ImageChunk(RequestModel):
    type: Literal["image_url"]
    image_url: Url


MessageChunk = Annotated[TextChunk | ImageChunk, Field(discriminator="type")]


class Message(RequestModel):
    role: str
    content: str | list[MessageChunk] | None = None
    name: str | None = None
    tool_calls: list[dict[str, JsonValue]] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise ValueError("a message needs `content` or `tool_calls`")
        return self


class FunctionDefinition(RequestModel):
    """`parameters` is OpenAI's name, `arguments` that of TGI's file."""

    name: str
    description: str | None = None
    parameters: JsonValue = None

    @model_validator(mode="before")
    @classmethod
    def _tgi_spelling(cls, data: Any) -> Any:
        if isinstance(data, dict) and "parameters" not in data and "arguments" in data:
            return {**data, "parameters": data["arguments"]}
        return data


class Tool(RequestModel):
    type: str = "function"
    function: FunctionDefinition


class FunctionName(RequestModel):
    name: str


class NamedToolChoice(RequestModel):
    type: str = "function"
    function: FunctionName


class StreamOptions(RequestModel):
    include_usage: bool | None = None


class ChatRequest(HandOffFields):
    messages: list[Message]
    model: str | None = None
    frequency_penalty: float | None = None
    logit_bias: JsonValue = None  # unused, as in TGI
    logprobs: bool | None = None
    max_tokens: U32 | None = None
    max_completion_tokens: U32 | None = None  # OpenAI's newer name
    n: U32 | None = None  # unused, as in TGI
    presence_penalty: float | None = None
    response_format: ResponseFormat | None = None
    seed: U64 | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedToolChoice | None = None
    tool_prompt: str | None = None
    tools: list[Tool] | None = None
    top_logprobs: U32 | None = None
    top_p: float | None = None
    exact: bool | None = None
    ignore_eos: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _tool_by_name(cls, data: Any) -> Any:
        """TGI also takes the bare name of a function as `tool_choice`."""
        choice = data.get("tool_choice") if isinstance(data, dict) else None
        if isinstance(choice, str) and choice not in ("auto", "none", "required"):
            return {**data, "tool_choice": {"function": {"name": choice}}}
        return data

    @property
    def stop_list(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])


class CompletionRequest(HandOffFields):
    prompt: str | list[str] | list[U32] | list[list[U32]]
    model: str | None = None
    frequency_penalty: float | None = None
    max_tokens: U32 | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: U64 | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    suffix: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    exact: bool | None = None
    ignore_eos: bool | None = None

    @property
    def prompts(self) -> list[str | tuple[int, ...]]:
        """One entry per choice: a text, or token ids as OpenAI also allows them."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [tuple(int(token) for token in self.prompt)]  # type: ignore[arg-type]
        return [p if isinstance(p, str) else tuple(p) for p in self.prompt]  # type: ignore[arg-type]

    @property
    def stop_list(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])


# ------------------------------------------------------------------ ours


class BrownoutUpdate(RequestModel):
    """`POST /brownout`. What is left out stays as it is.

    Attributes:
        phase: "prefill", "decode" or absent for both. threshold: in [0, 1], held until told otherwise; "slo" gives the
            phase back to its latency controller. ways: united experts to serve with, 0 takes them off.
        floor: below which no threshold goes, whoever decides it; 1 switches brownout off.
        slo_ttft, slo_tpot: other latency objectives, seconds; 0 takes one away.
    """

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    phase: Literal["prefill", "decode"] | None = None
    threshold: Annotated[float, Field(ge=0, le=1)] | Literal["slo"] | None = None
    strategy: str | None = None
    keep: str | None = None
    layers: list[U32] | None = None
    ways: U32 | None = None
    floor: Annotated[float, Field(ge=0, le=1)] | None = None
    slo_ttft: Annotated[float, Field(ge=0)] | None = None
    slo_tpot: Annotated[float, Field(ge=0)] | None = None
