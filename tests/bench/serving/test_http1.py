"""Responses taken apart, however the network cut them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortolan.bench.serving.http1 import MalformedError, Response
from ortolan.bench.serving.sse import events

CHUNKED = (
    b"HTTP/1.1 100 Continue\r\n\r\n"
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\nX: y\r\n\r\n"
    b"5\r\nhello\r\n1;ext=1\r\n \r\n08\r\nwor\r\nld,\r\n\r\n0\r\nTrailer: t\r\n\r\n"
)
SIZED = b"HTTP/1.1 503 Busy\r\nContent-Length: 5\r\nConnection: close\r\n\r\nlater"
EMPTY = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


def fed(whole: bytes, cuts: list[int]) -> tuple[Response, bytes]:
    response, body = Response(), b""
    for a, b in pairwise([0, *sorted(cut % (len(whole) + 1) for cut in cuts), len(whole)]):
        assert not response.done or a == len(whole)
        body += response.feed(whole[a:b])
    return response, body


@given(st.lists(st.integers(min_value=0)))
def test_body_is_the_same_however_it_is_cut(cuts: list[int]) -> None:
    """TCP keeps no boundaries: a chunk's size may arrive in two packets."""
    response, body = fed(CHUNKED, cuts)
    assert (response.status, body, response.done) == (200, b"hello wor\r\nld,", True)
    assert response.keeps_open
    response, body = fed(SIZED, cuts)
    assert (response.status, body, response.done) == (503, b"later", True)
    assert not response.keeps_open


@pytest.mark.parametrize("whole", [CHUNKED, SIZED])
def test_response_that_was_cut_off_is_not_done(whole: bytes) -> None:
    """A dropped connection must not pass for the end of an answer."""
    for end in range(len(whole)):
        response, _ = fed(whole[:end], [])
        response.feed_end()
        assert not response.done


def test_body_without_a_length_ends_with_the_connection() -> None:
    """HTTP/1.0's way, which small servers still use to stream."""
    response, body = fed(b"HTTP/1.1 200 OK\r\n\r\nall there is", [])
    assert not response.done
    response.feed_end()
    assert response.done
    assert body == b"all there is"
    assert not response.keeps_open


def test_empty_body_is_done_with_its_head() -> None:
    """There is nothing more to wait for."""
    assert fed(EMPTY, [])[0].done


@pytest.mark.parametrize(
    "whole",
    [
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 ok\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + bytes(1 << 17),
    ],
)
def test_what_is_no_response_is_refused(whole: bytes) -> None:
    """A port where something else listens must be said, not waited for."""
    with pytest.raises(MalformedError):
        fed(whole, [])


def test_event_has_the_time_at_which_it_was_complete() -> None:
    """The first token counts when it can be shown, not when its packet began."""
    pieces = [
        (1.0, b"data: a\n"),
        (2.0, b"\ndata:b"),
        (3.0, b"b\r\n\r\n: a comment\n\nevent: x\ndata: c\ndata: d\n"),
        (4.0, b"\ndata: never ended\n"),
    ]
    assert list(events(pieces)) == [(2.0, b"a"), (3.0, b"bb"), (4.0, b"c\nd")]
