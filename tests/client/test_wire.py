"""HTTP as it comes over a wire: framing in any cut, connections kept and dropped, and every way of not being whole."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import ssl
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.client.scripted import Play, answer, chunked, head, serving

from hostcache.client.stream import WholeAnswer
from hostcache.client.wire import Broken, Connections, Head, Wire
from hostcache.clock import VirtualClock, WallClock
from hostcache.errors import ConfigError


def fetched(*plays: Play, times: int = 1, timeout_s: float = 5.0, idle_s: float = 2.0) -> tuple[list[WholeAnswer], int]:
    """The answers to `times` requests, one after another, and how many connections they took."""

    async def go() -> tuple[list[WholeAnswer], int]:
        async with serving(*plays) as server:
            wires = Connections(server.url, clock=WallClock(), idle_s=idle_s)
            answers = []
            try:
                for _ in range(times):
                    heard = WholeAnswer()
                    await wires.exchange("GET", "/x", heard, timeout_s=timeout_s)
                    answers.append(heard)
            finally:
                await wires.close()
            return answers, server.connections

    return asyncio.run(go())


@pytest.mark.parametrize(("pieces", "end"), [
    ((head(200, "Content-Length: 5") + b"hello",), "keep"),
    ((head(200, "Transfer-Encoding: chunked") + chunked(b"hel") + b"2;name=value\r\nlo\r\n0\r\nTrailer: x\r\n\r\n",),
     "keep"),
    ((head(200) + b"hello",), "close"),
    ((b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello",), "close"),
    ((head(100), head(103, "Link: x"), head(200, "content-length:5"), b"hel", b"lo"), "keep"),
])
def test_a_body_is_the_same_however_it_is_framed(pieces: Sequence[bytes], end: str) -> None:
    (heard,), _ = fetched(Play(pieces=pieces, end=end))  # type: ignore[arg-type]
    assert (heard.status, heard.text) == (200, "hello")


def test_an_answer_without_a_body_ends_with_its_head() -> None:
    heard, connections = fetched(Play(pieces=(head(204),)), Play(pieces=(head(200, "Content-Length: 0"),)), times=2)
    assert [each.text for each in heard] == ["", ""]
    assert connections == 1


def test_a_connection_is_used_again_and_not_after_the_server_said_close() -> None:
    plays = (answer(200, b"a"), answer(200, b"b", "Connection: close"), answer(200, b"c"))
    heard, connections = fetched(*plays, times=3)
    assert [each.text for each in heard] == ["a", "b", "c"]
    assert connections == 2


def test_a_connection_that_was_idle_too_long_is_not_used_again() -> None:
    assert fetched(answer(200, b"a"), answer(200, b"b"), times=2, idle_s=-1.0)[1] == 2


def test_requests_at_the_same_time_have_a_connection_each() -> None:
    async def go() -> int:
        async with serving(*[answer(200, b"a")] * 5) as server:
            wires = Connections(server.url, clock=WallClock())
            await asyncio.gather(*(wires.exchange("GET", "/", WholeAnswer(), timeout_s=5.0) for _ in range(5)))
            await wires.close()
            return server.connections

    assert asyncio.run(go()) == 5


@pytest.mark.parametrize(("play", "kind"), [
    (Play(pieces=(), end="close"), "reset"),
    (Play(pieces=(), end="reset"), "reset"),
    (Play(pieces=(head(200, "Content-Length: 5") + b"hel",), end="reset"), "reset"),
    (Play(pieces=(head(200, "Content-Length: 5") + b"hel",), end="close"), "cut-short"),
    (Play(pieces=(head(200, "Transfer-Encoding: chunked") + chunked(b"hel"),), end="close"), "cut-short"),
    (Play(pieces=(b"HTTP/1.1 200",), end="close"), "cut-short"),
    (Play(pieces=(b"SSH-2.0-OpenSSH\r\n\r\n",)), "malformed-http"),
    (Play(pieces=(b"HTTP/2 200\r\n\r\n",)), "malformed-http"),
    (Play(pieces=(head(101),)), "malformed-http"),
    (Play(pieces=(head(200, "no colon"),)), "malformed-http"),
    (Play(pieces=(head(200, "Content-Length: -1"),)), "malformed-http"),
    (Play(pieces=(head(200, "Content-Encoding: gzip", "Content-Length: 1"),)), "malformed-http"),
    (Play(pieces=(head(200, "Transfer-Encoding: gzip, chunked"),)), "malformed-http"),
    (Play(pieces=(head(200, "Transfer-Encoding: chunked") + b"xyz\r\n",)), "malformed-http"),
    (Play(pieces=(head(200, "Transfer-Encoding: chunked") + b"1\r\nab\r\n",)), "malformed-http"),
    (Play(pieces=(b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000,)), "malformed-http"),
])
def test_whatever_is_no_whole_answer_is_broken_with_its_kind(play: Play, kind: str) -> None:
    with pytest.raises(Broken) as broken:
        fetched(play)
    assert broken.value.kind == kind
    assert str(broken.value).startswith(f"{kind}: ")
    assert "\n" not in str(broken.value)


@pytest.mark.parametrize("pieces", [(), (head(200, "Content-Length: 5") + b"hel",)])
def test_silence_is_given_up(pieces: Sequence[bytes]) -> None:
    with pytest.raises(Broken, match=r"stalled: no byte for 0\.05 s"):
        fetched(Play(pieces=pieces, end="silence"), timeout_s=0.05)


def test_a_server_that_is_not_there_is_unreachable() -> None:
    async def go() -> None:
        async with serving() as server:
            url = server.url
        wires = Connections(url, clock=WallClock())
        await wires.exchange("GET", "/", WholeAnswer(), timeout_s=1.0)

    with pytest.raises(Broken, match=r"unreachable: 127\.0\.0\.1:"):
        asyncio.run(go())


def test_bytes_that_nobody_asked_for_end_the_connection() -> None:
    late = Play(pieces=(head(200, "Content-Length: 1") + b"a" + b"HTTP/1.1 500 Late\r\n\r\n",))
    heard, connections = fetched(late, answer(200, b"b"), times=2)
    assert [each.text for each in heard] == ["a", "b"]
    assert connections == 2


def test_a_request_that_is_cancelled_takes_its_connection_along() -> None:
    async def go() -> int:
        async with serving(Play(pieces=(), end="silence"), answer(200, b"b")) as server:
            wires = Connections(server.url, clock=WallClock())
            first = asyncio.create_task(wires.exchange("GET", "/", WholeAnswer(), timeout_s=5.0))
            await server.asked.wait()
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            await wires.exchange("GET", "/", WholeAnswer(), timeout_s=5.0)
            await wires.close()
            return server.connections

    assert asyncio.run(go()) == 2


class Enough(WholeAnswer):
    """Has heard enough with the first byte."""

    def body(self, data: bytes, now_s: float) -> bool:
        super().body(data, now_s)
        return True


def test_a_listener_that_heard_enough_does_not_wait_for_the_end_and_the_connection_lives_on() -> None:
    async def go() -> int:
        ended = asyncio.Event()
        body = (head(200, "Transfer-Encoding: chunked") + chunked(b"a"), b"0\r\n\r\n", ended.set)
        async with serving(Play(pieces=body), answer(200, b"b")) as server:
            wires = Connections(server.url, clock=WallClock())
            await wires.exchange("GET", "/", Enough(), timeout_s=5.0)
            await ended.wait()
            await wires.exchange("GET", "/", WholeAnswer(), timeout_s=5.0)
            await wires.close()
            return server.connections

    assert asyncio.run(go()) == 1


class Quiet(asyncio.Transport):
    """Takes what is written; the test speaks for the server."""

    closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    abort = close


@given(st.binary(min_size=1, max_size=60), st.lists(st.integers(1, 40), max_size=12), st.lists(st.integers(0, 300)))
def test_chunks_are_put_together_wherever_the_bytes_were_cut(body: bytes, sizes: list[int], cuts: list[int]) -> None:
    raw, rest = head(200, "Transfer-Encoding: chunked"), body
    for size in sizes:
        raw += chunked(rest[:size]) if rest[:size] else b""
        rest = rest[size:]
    raw += (chunked(rest) if rest else b"") + b"0\r\n\r\n"
    edges = sorted({0, len(raw), *(cut for cut in cuts if cut < len(raw))})

    async def go() -> WholeAnswer:
        clock = VirtualClock()
        wire = Wire(Connections("http://x", clock=clock), asyncio.get_running_loop(), clock)
        wire.connection_made(Quiet())
        heard = WholeAnswer()
        over = wire.begin(b"", heard, 5.0)
        for start, stop in itertools.pairwise(edges):
            wire.data_received(raw[start:stop])
        assert over.done()
        over.result()
        return heard

    assert bytes(asyncio.run(go()).content) == body


class Stamped(WholeAnswer):
    """Remembers when each piece came."""

    def __init__(self) -> None:
        super().__init__()
        self.times_s: list[float] = []

    def head(self, head: Head, now_s: float) -> None:
        super().head(head, now_s)
        self.times_s.append(now_s)

    def body(self, data: bytes, now_s: float) -> bool:
        self.times_s.append(now_s)
        return super().body(data, now_s)


def test_every_piece_has_the_time_at_which_it_came() -> None:
    async def go() -> list[float]:
        clock = VirtualClock(100.0)
        wire = Wire(Connections("http://x", clock=clock), asyncio.get_running_loop(), clock)
        wire.connection_made(Quiet())
        heard = Stamped()
        over = wire.begin(b"", heard, 5.0)
        for piece in (head(200, "Content-Length: 4"), b"ab", b"cd"):
            clock.advance(1.5)
            wire.data_received(piece)
        assert over.done()
        return heard.times_s

    assert asyncio.run(go()) == [101.5, 103.0, 104.5]


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://x:port", "http://x/?a=b", "http://u@x"])
def test_what_is_no_address_is_refused_with_the_way_out(url: str) -> None:
    with pytest.raises(ConfigError, match="give http"):
        Connections(url, clock=WallClock())


def test_a_last_v1_in_the_address_is_not_said_twice() -> None:
    async def go() -> list[str]:
        async with serving(answer(200, b"a"), answer(200, b"b")) as server:
            for ending in ("/v1/", "/proxy/v1"):
                wires = Connections(server.url + ending, clock=WallClock())
                await wires.exchange("GET", "/v1/models", WholeAnswer(), timeout_s=5.0)
                await wires.close()
            return [request.path for request in server.requests]

    assert asyncio.run(go()) == ["/v1/models", "/proxy/v1/models"]


def test_a_header_cannot_be_smuggled_in_through_a_key() -> None:
    with pytest.raises(ConfigError, match="header"):
        Connections("http://x", clock=WallClock(), headers={"Authorization": "a\r\nX: b"})


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_https_is_spoken_and_a_stranger_is_not_trusted(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                    "-keyout", key, "-out", certificate, "-days", "2", "-subj", "/CN=127.0.0.1",
                    "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.load_cert_chain(certificate, key)

    async def go(trusted: ssl.SSLContext | None) -> str:
        async with serving(answer(200, b"secret"), tls=ours) as server:
            wires = Connections(server.url, clock=WallClock(), tls=trusted)
            heard = WholeAnswer()
            try:
                await wires.exchange("GET", "/", heard, timeout_s=5.0)
            finally:
                await wires.close()
            return heard.text

    assert asyncio.run(go(ssl.create_default_context(cafile=str(certificate)))) == "secret"
    with pytest.raises(Broken, match=r"unreachable: .*certificate"):
        asyncio.run(go(None))
