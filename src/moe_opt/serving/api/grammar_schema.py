"""Reads a JSON schema as TGI's grammars do: an object has the properties that are listed and no others.

JSON Schema itself allows any further property, and a small model would go on inventing them until its tokens run out.
A schema that says `additionalProperties` keeps its own rule.
"""

from __future__ import annotations

from typing import Any

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SINGLE = ("items", "additionalProperties", "additionalItems", "contains")
_LISTS = ("anyOf", "oneOf", "prefixItems")  # not allOf: its parts describe one object together


def closed_schema(schema: Any) -> Any:
    """The schema with `type: object` and `additionalProperties: false` wherever it lists properties and is silent
    about them; the argument is not changed."""
    if not isinstance(schema, dict):
        return schema
    out: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            out[key] = {name: closed_schema(part) for name, part in value.items()}
        elif key in _SINGLE:
            out[key] = closed_schema(value)
        elif key in _LISTS and isinstance(value, list):
            out[key] = [closed_schema(part) for part in value]
        else:
            out[key] = value
    if isinstance(out.get("properties"), dict) and "allOf" not in out:
        out.setdefault("type", "object")
        out.setdefault("additionalProperties", False)
    return out
