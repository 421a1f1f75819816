"""The daemon's configuration: a `tierd.toml`, or nothing but a spool and URLs.

Law: an unknown key, a wrong type or an unusable value is refused with the key's path; nothing is guessed.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tierd.core.errors import ConfigError
from tierd.core.events import CHOICES
from tierd.core.rate import Rate, rate
from tierd.core.retention import Duration, RetentionPolicy, seconds
from tierd.core.urls import parse_url
from tierd.core.webhook import check_webhook, is_reference, shown

LONGEST = 64 << 10  # characters of a file
_DEEP = re.compile(r"^(?:[^.#\n]*\.){65}", re.MULTILINE)  # a dotted key costs tomllib its length squared, or more
_RESERVED = frozenset({"local"})  # the spool's own name among the tiers


class TierConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tier: where it is and what it keeps. The order in the file is the order of preference when reading."""

    name: Annotated[str, Meta(pattern=r"^[a-z][a-z0-9-]{0,31}\Z")]
    url: str
    retention: RetentionPolicy | None = None  # None: the run's own policy holds
    verify: Literal["checksum", "read"] = "checksum"
    limit_up: Rate | None = None  # of what the daemon sends there
    limit_down: Rate | None = None  # and reads there, but for restores
    key_file: Annotated[str, Meta(pattern="^/")] | None = None  # what lies there is encrypted with the key in it


class TellConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whom events are told: exactly one of `url` and `command`.

    Attributes:
        url: what each event is posted to, as `core/webhook.py` reads it.
        command: an absolute path and its arguments; it gets each event on its standard input.
        headers: more headers of a post, by name; what each says is read from where it points.
        events: which; None are those that are `usual`.
        per_minute: more than these are held back, counted, and told as one.
        timeout_s: a try that takes longer has failed.
    """

    url: Annotated[str, Meta(min_length=1)] | None = None
    command: Annotated[tuple[str, ...], Meta(min_length=1)] | None = None
    headers: dict[str, str] = {}
    events: Annotated[tuple[str, ...], Meta(min_length=1)] | None = None
    per_minute: Annotated[int, Meta(ge=1, le=10_000)] = 30
    timeout_s: Annotated[float, Meta(gt=0, le=600)] = 10.0


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything the daemon is told.

    Attributes:
        spool: absolute path of the spool's directory.
        tier: the tiers, in order of preference.
        retention: what stays in the spool, of what a tier has verified; None: what the trainer says, or the default.
        rescan: at least this often everything is looked at again, whatever events say.
        drain: how long SIGTERM lets flushes in flight go on.
        hold_for: a tier that has not answered for longer is no reason any more to keep what it wants on other tiers.
        min_free_percent: with less of the spool's disk free, local copies that a tier has verified go early.
        finished: a run without a trainer for so long, of which a tier has verified everything, leaves the spool.
        scrub: every copy is read again, and compared, within this; "0s": none is.
        scrub_rate: how fast, in each place.
        tell: whom events are told.
    """

    spool: Annotated[str, Meta(pattern=r"^/[^\x00]*\Z")]
    tier: Annotated[tuple[TierConfig, ...], Meta(min_length=1)]
    retention: RetentionPolicy | None = None
    rescan: Duration = "30s"
    drain: Duration = "60s"
    hold_for: Duration = "7d"
    min_free_percent: Annotated[float, Meta(ge=0, le=90)] = 5.0
    finished: Duration = "1d"
    scrub: Duration = "30d"
    scrub_rate: Rate = "20MB/s"
    tell: tuple[TellConfig, ...] = ()

    def named(self, name: str) -> TierConfig:
        """The tier called `name`."""
        return next(tier for tier in self.tier if tier.name == name)


def without_addresses(config: Config) -> Config:
    """The same, with no more of each webhook's address, and of each command's arguments, than may be shown."""
    tells = []
    for tell in config.tell:
        url = tell.url if tell.url is None or is_reference(tell.url) else shown(tell.url)
        words = tell.command and tuple(word if not number else "…" for number, word in enumerate(tell.command))
        tells.append(msgspec.structs.replace(tell, url=url, command=words))
    return msgspec.structs.replace(config, tell=tuple(tells))


def from_toml(text: str, where: str) -> Config:
    """Read a configuration file's text.

    Raises:
        ConfigError: naming `where`, the key's path and what is wrong with it.
    """
    if len(text) > LONGEST:
        raise ConfigError(f"{where}: it has more than {LONGEST} characters; is it the right file?")
    if _DEEP.search(text):
        raise ConfigError(f"{where}: a line with more than 64 dots; is it the right file?")
    try:
        config = msgspec.convert(tomllib.loads(text), Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {_readable(str(error))}") from error
    except (ValueError, RecursionError) as error:  # not only TOMLDecodeError: a number of 5,000 digits, say
        raise ConfigError(f"{where}: not TOML: {error}") from error
    return _checked(config, where)


def from_urls(
    spool: str,
    urls: Sequence[str],
    retention: RetentionPolicy | None = None,
    key_file: str | None = None,
    where: str = "--to",
) -> Config:
    """The configuration that ``tierd run --spool DIR --to URL`` means; tiers are named after their URL's scheme.
    `where` begins an error's message.

    Args:
        retention: the policy in every place; None: each run's own.

    Raises:
        ConfigError: no URL, or one that cannot be used.
    """
    if not urls:
        raise ConfigError("no tier: name at least one with --to URL, or give --config FILE")
    tiers: list[TierConfig] = []
    for url in urls:
        scheme = parse_url(url).scheme
        taken = sum(tier.name.split("-")[0] == scheme for tier in tiers)
        name = scheme if not taken else f"{scheme}-{taken + 1}"
        tiers.append(TierConfig(name=name, url=url, retention=retention, key_file=key_file))
    return _checked(Config(spool=spool, tier=tuple(tiers), retention=retention), where)


def _checked(config: Config, where: str) -> Config:
    if not seconds(config.rescan):
        raise ConfigError(f"{where}: rescan: {config.rescan!r} would look without a pause")
    _check_rate(config.scrub_rate, f"{where}: scrub_rate")
    names: set[str] = set()
    urls: dict[str, str] = {}
    for index, tier in enumerate(config.tier):
        try:
            url = str(parse_url(tier.url))
        except ConfigError as error:
            raise ConfigError(f"{where}: tier[{index}].url: {error}") from error
        if tier.name in names or tier.name in _RESERVED:
            raise ConfigError(f"{where}: tier[{index}].name: {tier.name!r} is taken")
        if url in urls:
            raise ConfigError(f"{where}: tier[{index}].url: the same place as tier {urls[url]!r}")
        _check_rate(tier.limit_up, f"{where}: tier[{index}].limit_up")
        _check_rate(tier.limit_down, f"{where}: tier[{index}].limit_down")
        names.add(tier.name)
        urls[url] = tier.name
    for index, tell in enumerate(config.tell):
        _check_tell(tell, f"{where}: tell[{index}]")
    return config


def _check_tell(tell: TellConfig, where: str) -> None:
    if (tell.url is None) == (tell.command is None):
        raise ConfigError(f"{where}: give either url or command")
    try:
        if tell.url is not None:
            check_webhook(tell.url, tell.headers)
        elif tell.headers:
            raise ConfigError("headers: a command has none")
    except ConfigError as error:
        raise ConfigError(f"{where}.{error}") from error
    if tell.command is not None and not tell.command[0].startswith("/"):
        raise ConfigError(f"{where}.command: it begins with an absolute path; no shell looks for it")
    if any("\0" in word for word in tell.command or ()):
        raise ConfigError(f"{where}.command: it holds a NUL")
    for name in tell.events or ():
        if name not in CHOICES:
            raise ConfigError(f"{where}.events: unknown event {name!r}: there are {', '.join(CHOICES)}")


def _check_rate(text: str | None, where: str) -> None:
    try:
        if text is not None:
            rate(text)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error


def _readable(message: str) -> str:
    # msgspec says "... - at `$.tier[0].url`": the path first reads better, and `$.` means nothing to a user.
    match = re.fullmatch(r"(.*) - at `\$\.?(.*)`", message)
    return f"{match[2]}: {match[1]}" if match else message
