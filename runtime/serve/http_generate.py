"""The two endpoints that make the model write: from a call to the bytes of its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.types import Send

from ortolan.runtime.serve.http_answers import Answer, Answers, Total
from ortolan.runtime.serve.http_endpoint import Exchange, send_json
from ortolan.runtime.serve.http_forms import DONE
from ortolan.runtime.serve.http_requests import Call

MakeCall = Callable[[Exchange], Awaitable[Call]]

_EVENTS_BEGIN = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),  # a proxy must not collect events
    ],
}


def generating(make_call: MakeCall) -> Callable[[Exchange], Awaitable[None]]:
    """An endpoint's handler, which differs in how a body becomes a call."""

    async def handle(exchange: Exchange) -> None:
        exchange.service.check_ready()
        call = await make_call(exchange)
        answers = await Answers.start(exchange.service, call.requests)
        try:
            if call.stream:
                await _stream(exchange, call, answers)
            else:
                await _collect(exchange.send, call, answers)
        finally:
            # After the end this is harmless; before, nobody is left to read the rest.
            answers.cancel()

    return handle


async def _collect(send: Send, call: Call, answers: Answers) -> None:
    params = call.requests[0].params
    whole = [Answer() for _ in range(params.n * len(call.requests))]
    total = Total(params.n)
    while (grown := await answers.next()) is not None:
        number, event = grown
        whole[number].add(event)
        total.add(number, event.usage)
    if params.logprobs is None:
        body = call.form.whole(whole, total)
    else:  # thousands of tokens with twenty likeliest each take a while to write down
        body = await asyncio.to_thread(call.form.whole, whole, total)
    await send_json(send, 200, body)


async def _stream(exchange: Exchange, call: Call, answers: Answers) -> None:
    send, form = exchange.send, call.form
    total = Total(call.requests[0].params.n)
    # What fails before the first token still gets a status of its own.
    grown = await answers.next()
    await send(_EVENTS_BEGIN)
    exchange.streaming = True
    while grown is not None:
        number, event = grown
        total.add(number, event.usage)
        if data := form.event(number, event):
            await send({"type": "http.response.body", "body": data, "more_body": True})
        grown = await answers.next()
    end = (form.usage_event(total) if call.usage else b"") + DONE
    await send({"type": "http.response.body", "body": end})
