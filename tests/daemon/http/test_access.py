"""Who is answered over HTTP: the `Host` on loopback, the token, TLS, and what bounds a client."""

from __future__ import annotations

import asyncio
import base64
import ssl
from pathlib import Path

import pytest
from support.timed import timed
from support.tls import Authority
from support.web import get, sent, serving

from tierd.core.config import HttpConfig, from_toml
from tierd.core.errors import ConfigError
from tierd.daemon.http.http_server import Access, make_tls_context, read_access
from tierd.daemon.runs_report import SharedAnswer

CONNECTIONS = 32  # that the server has at a time
TOKEN = "0123456789abcdef" * 4
PLACES = 'spool = "/spool"\n[[tier]]\nname = "disk"\nurl = "file:///tier"\n[http]\n'


# -- configuration ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ('listen = "0.0.0.0:9464"', "http.listen: '0.0.0.0:9464' is open to other machines: give token_file"),
        ('listen = "[::]:9464"', "is open to other machines"),
        ('listen = "10.1.2.3:9464"', "is open to other machines"),
        ('listen = "9464"', "http.listen: '9464': ADDRESS:PORT with an IP address"),
        ('listen = "node:9464"', "ADDRESS:PORT"),
        ('listen = "127.0.0.1:70000"', "ADDRESS:PORT"),
        ('listen = "127.0.0.1:9464\\n"', "ADDRESS:PORT"),
        ('listen = "999.0.0.1:9464"', "http.listen"),
        ('listen = "127.0.0.1:9464"\ncert_file = "/c"', "http: give cert_file and key_file together"),
        ('listen = "127.0.0.1:9464"\ntoken_file = "c"', "http.token_file"),
        ('listen = "127.0.0.1:9464"\ntoken = "c"', "unknown field `token`"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused(table: str, why: str) -> None:
    with pytest.raises(ConfigError) as raised:
        from_toml(PLACES + table, "it")
    assert why in str(raised.value)


@pytest.mark.parametrize(
    "table",
    [
        'listen = "127.0.0.1:9464"',
        'listen = "127.8.8.8:0"',
        'listen = "[::1]:9464"',
        'listen = "0.0.0.0:9464"\ntoken_file = "/t"',
        'listen = "[::]:9464"\ncert_file = "/c"\nkey_file = "/k"',
    ],
)
def test_a_table_that_can_be_used_is_taken(table: str) -> None:
    assert from_toml(PLACES + table, "it").http is not None


def test_file_of_a_token_is_private_and_holds_a_single_token(tmp_path: Path) -> None:
    path = tmp_path / "token"
    http = HttpConfig(listen="127.0.0.1:0", token_file=str(path))
    with pytest.raises(ConfigError, match="openssl rand -hex 32"):
        read_access(http)
    path.write_text(TOKEN)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_access(http)
    path.chmod(0o600)
    for text in ("", "short", f"{TOKEN} {TOKEN}", "é" * 20, "x" * 1025):
        path.write_text(text)
        with pytest.raises(ConfigError, match="a token is 16 to 1024") as raised:
            read_access(http)
        assert not text or text not in str(raised.value)
    path.write_text(f"{TOKEN}\n")
    assert read_access(http).is_permitted(f"Bearer {TOKEN}")


def test_a_certificate_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert", tmp_path / "key"
    cert.write_text("no certificate")
    key.write_text("no key")
    http = HttpConfig(listen="127.0.0.1:0", cert_file=str(cert), key_file=str(key))
    with pytest.raises(ConfigError, match="chmod 600"):
        make_tls_context(http)
    key.chmod(0o600)
    with pytest.raises(ConfigError, match="cert"):
        make_tls_context(http)


# -- the rules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:9464", "127.0.0.1", "127.0.0.1:9464", "[::1]", "[::1]:80"])
def test_a_host_on_loopback_is_ours(host: str) -> None:
    assert Access(None, loopback=True).is_for_us(host)


@pytest.mark.parametrize(
    "host",
    [None, "", "evil.example", "evil.example:9464", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1",
     "localhost:9464:1", "localhost:9464@evil", "[::1", "::1", "[::2]", "localhost ", "2130706433"],
)  # fmt: skip
def test_any_other_host_is_not(host: str | None) -> None:
    assert not Access(None, loopback=True).is_for_us(host)
    assert Access(b"t", loopback=False).is_for_us(host)


def test_a_token_is_shown_as_bearer_or_as_a_password() -> None:
    access = Access(TOKEN.encode(), loopback=True)
    basic = lambda text: f"Basic {base64.b64encode(text.encode()).decode()}"  # noqa: E731
    for right in (f"Bearer {TOKEN}", f"bearer  {TOKEN}", basic(f"anyone:{TOKEN}"), basic(f":{TOKEN}")):
        assert access.is_permitted(right), right
    wrong = [None, "", TOKEN, "Bearer", "Bearer ", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Digest {TOKEN}"]
    wrong += [basic(TOKEN), basic(f"{TOKEN}:"), "Basic !!!", f"Basic {TOKEN}", "Bearer é", "Bearer \udcff"]
    for one in wrong:
        assert not access.is_permitted(one), one
    assert Access(None, loopback=True).is_permitted(None)


def test_the_token_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr("hmac.compare_digest", lambda a, b: bool(compared.append((a, b))))
    assert not Access(b"secret", loopback=True).is_permitted("Bearer secret")
    assert compared == [(b"secret", b"secret")]


# -- a daemon ---------------------------------------------------------------------------------------------------------


async def test_loopback_answers_nobody_who_was_sent_by_another_name(spool, tmp_path) -> None:
    async with serving(spool, tmp_path / "tier") as http:
        for path in ("/", "/metrics", "/status", "/runs", "/healthz", "/readyz", "/other"):
            found = await get(http.address, path, host="evil.example")
            assert found.status == 421 and spool.root.name.encode() not in found.body
        assert (await get(http.address, "/status", host=None)).status in (400, 421)
        two = b"GET /status HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n"
        assert (await sent(http.address, two)).status == 400  # aiohttp's answer
        assert (await get(http.address, "/status")).status == 200


def test_without_the_token_only_probes_are_answered(spool, tmp_path, caplog) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)

    async def work() -> None:
        table = f'listen = "127.0.0.1:0"\ntoken_file = "{path}"'
        async with serving(spool, tmp_path / "tier", http=table) as http:
            for page in ("/", "/metrics", "/status", "/runs", "/other"):
                found = await get(http.address, page)
                assert found.status == 401 and found.headers["www-authenticate"].startswith("Basic ")
                assert (await get(http.address, page, Authorization=f"Bearer {TOKEN}x")).status == 401
                assert (await get(http.address, f"{page}?token={TOKEN}")).status == 401
            assert (await get(http.address, "/healthz")).status == 200
            for page in ("/", "/metrics", "/status", "/runs"):
                found = await get(http.address, page, Authorization=f"Bearer {TOKEN}")
                assert found.status == 200 and TOKEN.encode() not in found.body
            bad = f"GET /\x01 HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
            assert (await sent(http.address, bad)).status in (0, 400)

    with caplog.at_level("DEBUG"):
        asyncio.run(work())
    assert TOKEN not in caplog.text


async def test_over_tls(spool, tmp_path) -> None:
    authority = Authority(tmp_path)
    chain = authority.chain("127.0.0.1")
    table = f'listen = "127.0.0.1:0"\ncert_file = "{chain}"\nkey_file = "{chain}"'
    async with serving(spool, tmp_path / "tier", http=table) as http:
        context = ssl.create_default_context(cafile=str(authority.bundle))
        assert (await get(http.address, "/healthz", tls=context)).body == b"ok\n"
        assert (await get(http.address, "/healthz")).status == 0  # no TLS


def test_nothing_of_a_request_is_logged(spool, tmp_path, caplog) -> None:
    async def work() -> None:
        async with serving(spool, tmp_path / "tier") as http:
            for path in ("/healthz?kept-quiet", "/kept-quiet"):
                await get(http.address, path, Referer="kept-quiet", User_Agent="kept-quiet")

    with caplog.at_level("DEBUG"):
        asyncio.run(work())
    assert "kept-quiet" not in caplog.text


# -- clients that cost much -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"GET /" + b"x" * 3000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 9000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"".join(b"X%d: y\r\n" % n for n in range(300)) + b"\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET / HTTP/1.1 HTTP/1.1\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"\r\n\r\n\x00",
    ],
    ids=range(8),
)
async def test_malformed_request_is_refused_without_an_echo_of_it(spool, tmp_path, data, caplog, monkeypatch) -> None:
    timed(monkeypatch, http_lifetime_s=1.0)
    async with serving(spool, tmp_path / "tier") as http:
        found = await sent(http.address, data)
        assert found.status in (0, 400, 505) and found.body in (b"", b"not understood\n")
        assert not found.status or found.headers["x-content-type-options"] == "nosniff"
        assert (await get(http.address, "/healthz")).status == 200
    assert "xxxx" not in caplog.text and "Traceback" not in caplog.text


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "CONNECT", "TRACE"])
async def test_only_reading_is_allowed(spool, tmp_path, method) -> None:
    async with serving(spool, tmp_path / "tier") as http:
        target = "localhost:80" if method == "CONNECT" else "/status"
        found = await get(http.address, target, method=method)
        assert found.status in (400, 405) and b"spool" not in found.body


async def test_silent_clients_take_all_connections_for_a_moment_only(spool, tmp_path, monkeypatch) -> None:
    """Neither those that send nothing, nor those that send ever more, nor those that read nothing."""
    timed(monkeypatch, http_lifetime_s=0.5)
    async with serving(spool, tmp_path / "tier") as http:
        idle = [await asyncio.open_connection(*http.address) for _ in range(2 * CONNECTIONS)]
        for _, writer in idle[CONNECTIONS // 2 :]:
            writer.write(b"GET / HTTP/1.1\r\nHost: local")
        found = await get(http.address, "/healthz")  # served after those before it were cut off
        assert found.status == 200
        for reader, writer in idle:
            async with asyncio.timeout(60):
                assert await _end(reader) in (b"", b"not understood\n")
            writer.close()


async def _end(reader: asyncio.StreamReader) -> bytes:
    try:
        return (await reader.read()).partition(b"\r\n\r\n")[2]
    except ConnectionError:
        return b""


async def test_no_more_connections_are_served_than_there_are_slots(spool, tmp_path, monkeypatch) -> None:
    answering, most = 0, 0
    real = SharedAnswer.get

    async def counted(self) -> bytes:
        nonlocal answering, most
        answering += 1
        most = max(most, answering)
        try:
            await asyncio.sleep(0.2)  # the others connect meanwhile
            return await real(self)
        finally:
            answering -= 1

    monkeypatch.setattr(SharedAnswer, "get", counted)

    async with serving(spool, tmp_path / "tier") as http:
        found = await asyncio.gather(*(get(http.address, "/status") for _ in range(3 * CONNECTIONS)))
        assert {one.status for one in found} == {200}
    assert 1 < most <= CONNECTIONS


async def test_silent_clients_give_way_to_a_probe(spool, tmp_path, monkeypatch) -> None:
    """Those with half a request, and those that announce a body; each would hold its connection for its lifetime."""
    timed(monkeypatch, http_lifetime_s=600.0)
    async with serving(spool, tmp_path / "tier") as http:
        body = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
        held = [await asyncio.open_connection(*http.address) for _ in range(2 * CONNECTIONS)]  # no more fit
        try:
            for number, (_, writer) in enumerate(held):
                writer.write(body if number % 3 == 2 else b"GET /h")
            async with asyncio.timeout(60):
                assert (await get(http.address, "/healthz")).body == b"ok\n"
        finally:
            for _, writer in held:
                writer.transport.abort()


async def test_a_slow_answer_does_not_give_way(spool, tmp_path, monkeypatch) -> None:
    """The client has sent its request; that others wait is no reason to leave it without an answer."""
    timed(monkeypatch, http_grace_s=0.05)
    real = SharedAnswer.get

    async def slow(self) -> bytes:
        await asyncio.sleep(0.5)
        return await real(self)

    monkeypatch.setattr(SharedAnswer, "get", slow)

    async with serving(spool, tmp_path / "tier") as http:
        found = await asyncio.gather(*(get(http.address, "/status") for _ in range(2 * CONNECTIONS)))
        assert {one.status for one in found} == {200}
