"""The OpenAPI document, made from the tables that requests are checked by, and a page of it."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

import ortolan
from ortolan.runtime.serve.http_endpoint import Exchange, send_object, send_whole
from ortolan.runtime.serve.http_fields import CHAT, COMPLETION, IGNORED, REFUSED, Field
from ortolan.runtime.serve.http_plain import DETOKENIZE, TOKENIZE

_Fields = tuple[Mapping[str, Field], tuple[str, ...]]

# path -> method, what it does, fields and which of them must be there, statuses besides 200
_PATHS: dict[str, tuple[str, str, _Fields | None, tuple[int, ...]]] = {
    "/v1/models": ("get", "The model that is served", None, ()),
    "/v1/models/{id}": ("get", "The same by its name", None, (404,)),
    "/v1/chat/completions": ("post", "Answer a conversation", (CHAT, ("messages",)), ()),
    "/v1/completions": ("post", "Go on from a prompt, or score it", (COMPLETION, ("prompt",)), ()),
    "/tokenize": ("post", "Token ids of a text or a conversation", (TOKENIZE, ()), ()),
    "/detokenize": ("post", "The text of token ids", (DETOKENIZE, ("tokens",)), ()),
    "/health/live": ("get", "Whether the process answers", None, ()),
    "/health/ready": ("get", "Whether requests are welcome", None, (503,)),
    "/openapi.json": ("get", "This document", None, ()),
    "/docs": ("get", "This document, to read", None, ()),
}
_GENERATE = (400, 404, 413, 415, 429, 500, 503, 504)
_READ = (400, 404, 413, 415)
STATUSES = {
    400: "the request is invalid; error.param names the field",
    404: "no such path or model",
    405: "the path takes another method; see Allow",
    408: "the request did not arrive in time",
    413: "the body is too large",
    415: "the body is not application/json",
    429: "too much is waiting; see Retry-After",
    500: "a fault of the server or the engine",
    503: "the model is loading, the server is shutting down, or the engine stopped working",
    504: "the request's own timeout_s was over",
}
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                name: {"type": "string", "nullable": True}
                for name in ("message", "type", "param", "code")
            },
        }
    },
}


def document() -> dict[str, Any]:
    """The interface in OpenAPI 3.0."""
    return {
        "openapi": "3.0.3",
        "info": {
            "title": "Ortolan",
            "version": ortolan.__version__,
            "description": "OpenAI's interface to one model. Fields that ask for what does not "
            f"exist are refused: {', '.join(REFUSED)}. Ignored, since they change nothing here: "
            f"{', '.join(IGNORED)}. All others are errors.",
        },
        "paths": {path: {entry[0]: _operation(path, *entry)} for path, entry in _PATHS.items()},
        "components": {"schemas": {"Error": _ERROR}},
    }


def _operation(
    path: str, method: str, about: str, fields: _Fields | None, statuses: tuple[int, ...]
) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": about, "responses": {"200": _success(path)}}
    if fields is not None:
        statuses = _GENERATE if path.startswith("/v1") else _READ
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _schema(*fields)}},
        }
    if "{id}" in path:
        where = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [where]
    for status in statuses:
        kind = {"schema": {"$ref": "#/components/schemas/Error"}}
        operation["responses"][str(status)] = {
            "description": STATUSES[status],
            "content": {"application/json": kind},
        }
    return operation


def _success(path: str) -> dict[str, Any]:
    kinds = ["text/html"] if path == "/docs" else ["application/json"]
    if path.endswith("completions"):
        kinds.append("text/event-stream")
    return {"description": "success", "content": {kind: {} for kind in kinds}}


def _schema(fields: Mapping[str, Field], required: tuple[str, ...]) -> dict[str, Any]:
    schema: dict[str, Any] = {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            name: {**field.schema, "description": field.about} for name, field in fields.items()
        },
    }
    return {**schema, "required": list(required)} if required else schema


async def openapi(exchange: Exchange) -> None:
    """GET /openapi.json."""
    await send_object(exchange.send, 200, document())


async def docs(exchange: Exchange) -> None:
    """GET /docs: a page that loads nothing from anywhere."""
    policy = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
    await send_whole(exchange.send, 200, page().encode(), "text/html; charset=utf-8", policy)


def page() -> str:
    """The document as HTML."""
    found = document()
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width'><title>Ortolan: HTTP</title>",
        "<style>body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;",
        "padding:0 1rem}td{padding:.1rem 1rem .1rem 0;vertical-align:top}",
        "code{font-size:.95em}</style>",
        f"<h1>Ortolan {html.escape(found['info']['version'])}</h1>",
        f"<p>{html.escape(found['info']['description'])}</p>",
        "<p>The same for programs: <a href='openapi.json'>openapi.json</a></p>",
    ]
    for path, methods in found["paths"].items():
        for method, operation in methods.items():
            parts += [
                f"<h2><code>{method.upper()} {html.escape(path)}</code></h2>",
                f"<p>{html.escape(operation['summary'])}</p>",
                _table(operation),
            ]
    parts.append("<h2>Errors</h2><table>")
    parts += [f"<tr><td>{s}<td>{html.escape(about)}" for s, about in STATUSES.items()]
    return "".join([*parts, "</table></html>"])


def _table(operation: Mapping[str, Any]) -> str:
    if "requestBody" not in operation:
        return ""
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    rows = [
        f"<tr><td><code>{name}</code><td>{_type(field)}<td>{html.escape(field['description'])}"
        for name, field in schema["properties"].items()
    ]
    return f"<table>{''.join(rows)}</table>"


def _type(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(map(_type, schema["anyOf"]))
    if "items" in schema:
        return f"list of {_type(schema['items'])}"
    low, high = schema.get("minimum"), schema.get("maximum")
    bounds = "" if low is None else f", from {low}" if high is None else f", {low} to {high}"
    return f"{schema['type']}{bounds}"
