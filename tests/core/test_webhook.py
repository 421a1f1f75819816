"""`[[notify]]`: what it may say; that each mistake is named by its key, and that nothing of an address is repeated."""

from __future__ import annotations

import pytest

from tierd.core.config import NotifyConfig, from_toml, without_addresses
from tierd.core.errors import ConfigError
from tierd.core.event_kinds import SELECTABLE_KINDS

SECRET = "c4nary"
TIER = 'spool = "/spool"\n[[tier]]\nname = "nfs"\nurl = "/mnt/tier"\n'


def reported(text: str) -> tuple[NotifyConfig, ...]:
    return from_toml(f"{TIER}[[notify]]\n{text}\n", "tierd.toml").notify


def test_everything_that_can_be_said() -> None:
    assert reported(
        f'url = "https://hooks.example:8443/{SECRET}?a=b"\n'
        'headers = { Authorization = "env:TOKEN", X-Key = "file:/k" }\n'
        'events = ["failing", "works again"]\nper_minute = 5\ntimeout_s = 2.5\n'
        '[[notify]]\ncommand = ["/usr/local/bin/page", "--fast"]'
    ) == (
        NotifyConfig(
            url=f"https://hooks.example:8443/{SECRET}?a=b",
            headers={"Authorization": "env:TOKEN", "X-Key": "file:/k"},
            events=("failing", "works again"),
            per_minute=5,
            timeout_s=2.5,
        ),
        NotifyConfig(command=("/usr/local/bin/page", "--fast")),
    )


@pytest.mark.parametrize(
    "url",
    ["env:HOOK", "file:/etc/tierd/hook", "http://localhost:80/x", "http://[::1]:80", "http://127.9.9.9/", "https://h"],
)
def test_an_address_that_can_be_posted_to(url: str) -> None:
    assert reported(f'url = "{url}"')[0].url == url


@pytest.mark.parametrize(
    ("text", "key", "why"),
    [
        ("", "notify[0]", "either url or command"),
        ('url = "https://h"\ncommand = ["/x"]', "notify[0]", "either url or command"),
        ("command = []", "notify[0].command", "length >= 1"),
        ('command = ["page"]', "notify[0].command", "absolute path"),
        ('command = "/bin/page"', "notify[0].command", "Expected `array | null`"),
        ('command = ["/x", "a\\u0000b"]', "notify[0].command", "NUL"),
        ('command = ["/x"]\nheaders = { A = "env:B" }', "notify[0].headers", "a command has none"),
        (f'url = "http://hooks.example/{SECRET}"', "notify[0].url", "this machine alone"),
        (f'url = "http://127.0.0.1.{SECRET}.example/"', "notify[0].url", "this machine alone"),
        (f'url = "https://user:{SECRET}@hooks.example/"', "notify[0].url", "headers.Authorization"),
        (f'url = "ftp://hooks.example/{SECRET}"', "notify[0].url", "begins with https://"),
        (f'url = "https://hooks.example/{SECRET} x"', "notify[0].url", "a space"),
        (f'url = "https://hooks.example:99999/{SECRET}"', "notify[0].url", "not well formed"),
        (f'url = "https:///{SECRET}"', "notify[0].url", "a host's name"),
        (f'url = "env:{SECRET}-"', "notify[0].url", "write env:NAME or file:/path"),
        (
            f'url = "https://h"\nheaders = {{ Authorization = "{SECRET}" }}',
            "notify[0].headers.Authorization",
            "env:NAME",
        ),
        ('url = "https://h"\nheaders = { Host = "env:A" }', "notify[0].headers", "one that tierd sets"),
        ('url = "https://h"\nheaders = { "a b" = "env:A" }', "notify[0].headers", "no header's name"),
        (
            'url = "https://h"\nevents = ["saved"]',
            "notify[0].events",
            f"'saved': there are {', '.join(SELECTABLE_KINDS)}",
        ),
        ('url = "https://h"\nevents = []', "notify[0].events", "length >= 1"),
        ('url = "https://h"\nper_minute = 0', "notify[0].per_minute", ">= 1"),
        ('url = "https://h"\ntimeout_s = 0', "notify[0].timeout_s", "> 0"),
        ('url = "https://h"\nretries = 3', "notify[0]", "retries"),
    ],
)
def test_a_mistake_is_named_by_its_key(text: str, key: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        reported(text)
    said = str(caught.value)
    assert said.startswith(f"tierd.toml: {key}") and why in said and SECRET not in said


def test_shown_configuration_hides_secrets() -> None:
    config = from_toml(
        f'{TIER}[[notify]]\nurl = "https://H.example/{SECRET}"\n[[notify]]\ncommand = ["/x", "{SECRET}"]\n'
        '[[notify]]\nurl = "file:/etc/hook"\n',
        "x",
    )
    shown = without_addresses(config)
    assert [(one.url, one.command) for one in shown.notify] == [
        ("https://h.example/…", None),
        (None, ("/x", "…")),
        ("file:/etc/hook", None),
    ]
    assert SECRET not in repr(shown)
