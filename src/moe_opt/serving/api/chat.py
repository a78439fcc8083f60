"""A conversation becomes a prompt and TGI parameters."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from moe_opt.serving.api.errors import tool_error, validation_error
from moe_opt.serving.api.prompts import PromptEncoder
from moe_opt.serving.api.schemas import (
    ChatRequest,
    GenerateParameters,
    ImageChunk,
    JsonGrammar,
    JsonSchemaGrammar,
    Message,
    RegexGrammar,
    TextFormat,
)
from moe_opt.serving.api.tools import DEFAULT_TOOL_PROMPT, chosen_tools, tool_schema


@dataclasses.dataclass(frozen=True, slots=True)
class ChatPrompt:
    """What a chat request asks the engine. `presence_penalty` stays None: TGI folds it into the repetition penalty."""

    text: str
    parameters: GenerateParameters
    using_tools: bool


async def chat_prompt(chat: ChatRequest, encoder: PromptEncoder, *, allow_tools: bool = True) -> ChatPrompt:
    """Apply the chat template and TGI's rules for chat.

    Args:
        allow_tools: False leaves tools out, for the second try after the model declined them.

    Raises:
        ApiError: template_error, tool_error or validation.
    """
    format_ = chat.response_format
    if format_ is not None and chat.tools and not isinstance(format_, TextFormat):
        raise tool_error("Grammar and tools are mutually exclusive")
    messages = [_template_message(message) for message in chat.messages]
    tools = chosen_tools(chat) if allow_tools else []
    grammar: JsonGrammar | RegexGrammar | JsonSchemaGrammar | None = None
    rendered_tools = None
    if tools:
        may_decline = chat.tool_choice in (None, "auto")
        grammar = JsonGrammar(type="json", value=tool_schema(tools, may_decline=may_decline))
        rendered_tools = [tool.model_dump(exclude_none=True) for tool in tools]
        prompt = chat.tool_prompt or DEFAULT_TOOL_PROMPT
        listing = "" if encoder.template_knows_tools else json.dumps(rendered_tools, ensure_ascii=False) + "\n"
        if messages and isinstance(messages[-1].get("content"), str):
            messages[-1]["content"] += f"\n---\n{listing}{prompt}"
    elif not isinstance(format_, TextFormat):
        grammar = format_
    text = await encoder.render(messages, rendered_tools)
    return ChatPrompt(text, _parameters(chat, grammar), bool(tools))


def _template_message(message: Message) -> dict[str, Any]:
    """A message as chat templates expect it: `content` is text."""
    out = message.model_dump(exclude_none=True, exclude={"content"})
    if isinstance(message.content, str):
        out["content"] = message.content
    elif message.content is not None:
        if any(isinstance(chunk, ImageChunk) for chunk in message.content):
            raise validation_error("image modality is not supported by this model")
        out["content"] = "".join(chunk.text for chunk in message.content if not isinstance(chunk, ImageChunk))
    else:
        out["content"] = json.dumps(message.tool_calls, ensure_ascii=False)  # templates without tool calls read text
    return out


def _parameters(
    chat: ChatRequest, grammar: JsonGrammar | RegexGrammar | JsonSchemaGrammar | None
) -> GenerateParameters:
    greedy = chat.temperature == 0.0
    penalty = chat.presence_penalty
    if penalty is not None and not -2.0 <= penalty <= 2.0:
        raise validation_error("`presence_penalty` must be >= -2.0 and <= 2.0")
    top_logprobs = chat.top_logprobs
    if top_logprobs and not chat.logprobs:
        raise validation_error("`logprobs` must be true to use `top_logprobs`")
    return GenerateParameters(
        do_sample=not greedy,
        temperature=None if greedy else chat.temperature,
        # TGI's own mapping of [-2, 2] to a divisor; -2 would divide by zero there and is refused as it is.
        repetition_penalty=None if penalty is None else penalty + 2.0,
        frequency_penalty=chat.frequency_penalty,
        top_p=chat.top_p,
        seed=chat.seed,
        stop=chat.stop_list,
        max_new_tokens=chat.max_tokens if chat.max_tokens is not None else chat.max_completion_tokens,
        top_n_tokens=top_logprobs,
        details=True,
        grammar=grammar,
        exact=chat.exact,
        ignore_eos=chat.ignore_eos,
    )
