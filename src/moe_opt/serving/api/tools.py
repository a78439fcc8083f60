"""Tools: a JSON schema that makes the model name a function and its arguments, and what comes back as a tool call.

The generated text is `{"function": {"_name": NAME, ...arguments}}`, as in TGI. With `tool_choice` "auto" the schema has
one more function, `no_tool`; a model that picks it is asked again without tools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from moe_opt.serving.api.errors import tool_error
from moe_opt.serving.api.schemas import ChatRequest, NamedToolChoice, Tool

NO_TOOL = "no_tool"
DEFAULT_TOOL_PROMPT = (
    "Given the functions available, please respond with a JSON for a function call with its proper arguments that best "
    "answers the given prompt. Respond in the format {name: function name, parameters: dictionary of argument name and "
    "its value}.Do not use variables."
)
_NAME = re.compile(r'\s*\{\s*"function"\s*:\s*\{\s*"_name"\s*:\s*("(?:[^"\\]|\\.)*")\s*([,}])')


def chosen_tools(chat: ChatRequest) -> list[Tool]:
    """The tools that this request may call; empty if it calls none.

    Raises:
        ApiError: `tool_error` for a `tool_choice` that names no tool.
    """
    tools = list(chat.tools or [])
    choice = chat.tool_choice or "auto"
    if isinstance(choice, NamedToolChoice):
        named = [tool for tool in tools if tool.function.name == choice.function.name]
        if not named:
            raise tool_error(f"Tool with name {choice.function.name} not found")
        return named[:1]
    if not tools and choice == "required":
        raise tool_error("tool_choice is required, but there are no tools")
    return [] if choice == "none" else tools


def tool_schema(tools: Sequence[Tool], *, may_decline: bool) -> dict[str, Any]:
    """JSON schema of the generated text. Definitions inside a tool's schema move to the top, where `#/$defs` finds
    them, under names of their own."""
    definitions: dict[str, Any] = {}
    functions = []
    for index, tool in enumerate(tools):
        parameters = tool.function.parameters
        if parameters is None:
            parameters = {}
        if not isinstance(parameters, dict):
            raise tool_error(f"the parameters of {tool.function.name} must be a JSON schema, an object")
        local, prefix = dict(parameters), f"t{index}_"
        for key in ("$defs", "definitions"):
            own = local.pop(key, None)
            if isinstance(own, dict):
                definitions.update({prefix + name: _rebase(value, prefix) for name, value in own.items()})
        local = _rebase(local, prefix)
        properties, required = local.get("properties") or {}, local.get("required") or []
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise tool_error(f"the parameters of {tool.function.name} are not a valid JSON schema")
        functions.append(_function(tool.function.name, properties, required))
    if may_decline:
        functions.append(_function(NO_TOOL, {}, []))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"function": functions[0] if len(functions) == 1 else {"anyOf": functions}},
        "required": ["function"],
        "additionalProperties": False,
    }
    if definitions:
        schema["$defs"] = definitions
    return schema


def _function(name: str, properties: dict[str, Any], required: list[Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"_name": {"type": "string", "const": name}, **properties},
        "required": ["_name", *(key for key in required if key in properties)],
        "additionalProperties": False,
    }


def _rebase(value: Any, prefix: str) -> Any:
    if isinstance(value, dict):
        return {
            key: re.sub(r"^#/(?:\$defs|definitions)/", f"#/$defs/{prefix}", item)
            if key == "$ref" and isinstance(item, str)
            else _rebase(item, prefix)
            for key, item in value.items()
        }
    return [_rebase(item, prefix) for item in value] if isinstance(value, list) else value


def parse_call(text: str) -> tuple[str, str] | None:
    """(name, arguments as JSON text) of a complete generated text; None if the model picked no tool.

    Raises:
        ApiError: `tool_error` for text that is no call, for instance because it was cut at `max_tokens`.
    """
    try:
        function = json.loads(text)["function"]
        name = function.pop("_name")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise tool_error(f"Failed to parse generated text: {error} {text!r}") from error
    return None if name == NO_TOOL else (str(name), json.dumps(function, ensure_ascii=False))


class CallStream:
    """Turns the pieces of a generated call into the pieces of its arguments.

    After `push` has seen the name, `name` is set and `push` returns arguments, piece by piece, which together are a
    JSON object; what closes the outer object is left out.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._head = ""
        self._depth = 0
        self._in_string = False
        self._escaped = False

    @property
    def declined(self) -> bool:
        return self.name == NO_TOOL

    def push(self, piece: str) -> str:
        if self.name is not None:
            return self._arguments(piece)
        self._head += piece
        match = _NAME.match(self._head)
        if match is None:
            return ""
        self.name = json.loads(match[1])
        self._depth = 1
        rest = self._head[match.end() :]
        return "{" + self._arguments(rest if match[2] == "," else "}" + rest)

    def _arguments(self, piece: str) -> str:
        if self._depth == 0:
            return ""
        for index, char in enumerate(piece):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = char == "\\"
                self._in_string = char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return piece[: index + 1]
        return piece
