"""A conversation as OpenAI spells it, checked and made plain for the template."""

from __future__ import annotations

from typing import Any

from ortolan.runtime.serve.http_errors import ApiError, invalid, shown_name

# role -> what the template is told. `developer` is the newer word for the same thing.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_NO_TOOLS = ("tool", "function")
# Other keys of a message, and the values of them that say nothing.
_EMPTY: dict[str, list[Any]] = {
    "audio": [],
    "function_call": [],
    "refusal": [""],
    "tool_call_id": [],
    "tool_calls": [[]],
}


def checked_messages(value: Any) -> list[dict[str, Any]]:
    """Messages of role, content and perhaps name. Raises ApiError naming the place."""
    if value is None:
        raise invalid("messages", "is missing", "missing_required_parameter")
    if not isinstance(value, list) or not value:
        raise invalid("messages", "must be a list of at least one message")
    return [_checked(message, f"messages[{index}]") for index, message in enumerate(value)]


def _checked(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise invalid(where, "must be an object")
    role = message.get("role")
    if role in _NO_TOOLS:
        raise invalid(f"{where}.role", f"{role!r} is not supported: there are no tools yet")
    if not isinstance(role, str) or role not in _ROLES:
        raise invalid(f"{where}.role", "must be system, developer, user or assistant")
    for key, found in message.items():
        if key in ("role", "content", "name"):
            continue
        if key not in _EMPTY:
            raise invalid(f"{where}.{shown_name(key)}", "is no field of a message")
        if found is not None and found not in _EMPTY[key]:
            raise invalid(
                f"{where}.{key}", "is not supported; leave it out", "unsupported_parameter"
            )
    plain = {"role": _ROLES[role], "content": _content(message, role, f"{where}.content")}
    name = message.get("name")
    if name is not None:
        if not isinstance(name, str):
            raise invalid(f"{where}.name", "must be a string")
        plain["name"] = name
    return plain


def _content(message: dict[str, Any], role: str, where: str) -> str | list[dict[str, str]] | None:
    content = message.get("content")
    if isinstance(content, str) or (content is None and role == "assistant"):
        return content
    if isinstance(content, list):
        return [_part(part, f"{where}[{index}]") for index, part in enumerate(content)]
    if content is None:
        raise invalid(where, "is missing; only the assistant's may be null")
    raise invalid(where, "must be text or a list of text parts")


def _part(part: Any, where: str) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise invalid(where, 'must be {"type": "text", "text": ...}')
    if kind != "text":
        raise _unsupported_part(where, kind)
    text = part.get("text")
    if not isinstance(text, str) or len(part) != 2:
        raise invalid(where, 'must be {"type": "text", "text": ...}')
    return {"type": "text", "text": text}


def _unsupported_part(where: str, kind: str) -> ApiError:
    return invalid(
        where,
        f"is of type {shown_name(kind)}, which is not supported; only text is",
        "unsupported_parameter",
    )
