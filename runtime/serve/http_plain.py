"""The endpoints that need no engine: models, tokens, health."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.datastructures import Headers

from ortolan.runtime.serve.http_endpoint import Exchange, send_object, send_whole
from ortolan.runtime.serve.http_errors import invalid
from ortolan.runtime.serve.http_fields import COMMON, Field, accepted
from ortolan.runtime.serve.http_messages import checked_messages
from ortolan.runtime.serve.http_requests import check_ids, check_model, no_model
from ortolan.runtime.serve.service import Service
from ortolan.runtime.text.no_tokenizer import NoTokenizer, no_text

TOKENIZE = {
    "model": COMMON["model"],
    "prompt": Field({"type": "string"}, "text, encoded as /v1/completions does"),
    "messages": Field(
        {"type": "array", "items": {"type": "object"}},
        "instead of prompt: a conversation, encoded as /v1/chat/completions does",
    ),
}
DETOKENIZE = {
    "model": COMMON["model"],
    "tokens": Field({"type": "array", "items": {"type": "integer"}}, "token ids"),
}


async def models(exchange: Exchange) -> None:
    """GET /v1/models."""
    served = {"object": "list", "data": [_model(exchange.service)]}
    await send_object(exchange.send, 200, served)


async def model(exchange: Exchange) -> None:
    """GET /v1/models/{id}."""
    if exchange.scope["path_params"]["id"] != exchange.service.name:
        raise no_model()
    await send_object(exchange.send, 200, _model(exchange.service))


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.name,
        "object": "model",
        "created": service.created_s,
        "owned_by": "ortolan",
        "max_model_len": service.context,
    }


async def tokenize(exchange: Exchange) -> None:
    """POST /tokenize: text or a conversation to token ids."""
    service = exchange.service
    values = accepted(await exchange.body(), TOKENIZE)
    check_model(service, values)
    prompt = values.get("prompt")
    if ("messages" in values) == (prompt is not None):
        raise invalid("prompt", "or messages must be given, and not both")
    if prompt is None:
        ids = await service.encode_chat(await exchange.aside(checked_messages, values["messages"]))
    elif isinstance(prompt, str):
        ids = await service.encode(prompt)
    else:
        raise invalid("prompt", "must be text")
    found = {"tokens": ids, "count": len(ids), "max_model_len": service.context}
    await send_object(exchange.send, 200, found)


async def detokenize(exchange: Exchange) -> None:
    """POST /detokenize: token ids to text, special tokens left out."""
    service = exchange.service
    values = accepted(await exchange.body(), DETOKENIZE)
    check_model(service, values)
    ids = values.get("tokens")
    if not isinstance(ids, list) or not all(type(index) is int for index in ids):
        raise invalid("tokens", "must be a list of token ids")
    if isinstance(service.tokenizer, NoTokenizer):
        raise no_text()
    check_ids(service, "tokens", ids)
    text = await asyncio.to_thread(service.tokenizer.decode, ids)
    await send_object(exchange.send, 200, {"prompt": text})


async def live(exchange: Exchange) -> None:
    """GET /health/live: the process answers."""
    await send_object(exchange.send, 200, {"status": "live"})


async def metrics(exchange: Exchange) -> None:
    """GET /metrics: for Prometheus, in the format that it prefers."""
    accept = Headers(scope=exchange.scope).get("accept", "")
    # On a thread: it takes some milliseconds, in which no stream may stall.
    body, kind = await asyncio.to_thread(exchange.service.metrics.exposition, accept)
    await send_whole(exchange.send, 200, body, kind)


async def ready(exchange: Exchange) -> None:
    """GET /health/ready: requests are welcome, or why they are not."""
    reason = exchange.service.not_ready
    if reason is None:
        await send_object(exchange.send, 200, {"status": "ready"})
    else:
        await send_object(exchange.send, 503, {"status": "not ready", "reason": reason})
