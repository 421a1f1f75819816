"""The daemon's configuration: a `tierd.toml`, or only a spool and URLs.

Invariant: an unknown key, a wrong type or an unusable value is refused with the key's path; nothing is guessed.

The module is longer than 300 lines because the docstrings of the tables are the reference that docs/ shows.
"""

from __future__ import annotations

import ipaddress
import itertools
import re
import tomllib
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tierd.core.conversion_messages import line_of_member, with_allowed_values, with_similar_member
from tierd.core.errors import ConfigError
from tierd.core.event_kinds import SELECTABLE_KINDS, check_webhook, is_reference, redacted_url
from tierd.core.ids import check_run
from tierd.core.retention.policy import (
    DURATION_PATTERN,
    RATE_PATTERN,
    Duration,
    Rate,
    RetentionPolicy,
    parse_duration,
    parse_rate,
)
from tierd.core.urls import StoreUrl, parse_url

MAX_CONFIG_CHARS = 64 << 10  # characters in a file
_DEEP = re.compile(r"^(?:[^.#\n]*\.){65}", re.MULTILINE)  # tomllib takes quadratic time or more for a dotted key
TIER_NAME, _ABSOLUTE, _DIRECTORY = r"^[a-z][a-z0-9-]{0,31}\Z", "^/", r"^/[^\x00]*\Z"
_FORMS = {  # what to write where a pattern does not match, for messages
    RATE_PATTERN: "a rate, such as 800kB/s, 200MB/s or 1GiB/s",
    DURATION_PATTERN: "a time, such as 90s, 10m, 12h or 7d",
    TIER_NAME: "at most 32 lower case letters, digits and hyphens, a letter first",
    _ABSOLUTE: "an absolute path",
    _DIRECTORY: "an absolute path",
}
_RESERVED = frozenset({"local"})  # the spool's own name among the tiers


class TierConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tier: its place and its retention policy. Reads prefer tiers in the order of the file.

    Attributes:
        name: how commands, events and logs call the tier: lower case letters, digits and `-`; `local` is the spool.
        url: where its objects are: a URL of one of the [places](places.md).
        retention: which checkpoints the daemon keeps on this tier; None: the policy that the run has recorded there.
        verify: `checksum`: bytes that the server compared with a checksum count as verified, if the server was
            observed to refuse a wrong checksum, and everything else is read back; `read`: everything is read back.
        limit_up: the most bytes per second that the daemon sends to this tier, on average.
        limit_down: the most bytes per second that the daemon reads from it, on average; restores are not limited.
        key_file: the absolute path of the key that encrypts everything on this tier; None: no encryption.
        backfill: whether the daemon also copies runs to this tier that no trainer saves on this node, from the other
            tiers; `retention` says which of their checkpoints.
    """

    name: Annotated[str, Meta(pattern=TIER_NAME)]
    url: str
    retention: RetentionPolicy | None = None
    verify: Literal["checksum", "read"] = "checksum"
    limit_up: Rate | None = None
    limit_down: Rate | None = None
    key_file: Annotated[str, Meta(pattern=_ABSOLUTE)] | None = None
    backfill: bool = False


class NotifyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A receiver of events, with exactly one of `url` and `command`.

    Attributes:
        url: an HTTPS address to which each event is posted as JSON; or `env:NAME` or `file:/path`, from which the
            daemon reads the address.
        command: an absolute path and its arguments; the command gets each event as JSON on its standard input.
        headers: additional headers of a post, by name; each value is `env:NAME` or `file:/path`.
        events: the kinds of events that are sent; None: those that are sent by default.
        per_minute: events beyond this number in a minute are held back, counted, and reported as one `more`.
        timeout_s: the time after which a try counts as failed, in seconds.
    """

    url: Annotated[str, Meta(min_length=1)] | None = None
    command: Annotated[tuple[str, ...], Meta(min_length=1)] | None = None
    headers: dict[str, str] = {}
    events: Annotated[tuple[str, ...], Meta(min_length=1)] | None = None
    per_minute: Annotated[int, Meta(ge=1, le=10_000)] = 30
    timeout_s: Annotated[float, Meta(gt=0, le=600)] = 10.0


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The daemon's HTTP server for metrics, probes and the page. Without a `[http]` table there is none.

    Attributes:
        listen: `ADDRESS:PORT` with an IP address, as in `127.0.0.1:9464` or `[::1]:9464`; port 0 is any free port,
            which the log names. Any address but loopback needs `token_file` or `cert_file`.
        token_file: the absolute path of a file with the token that a client sends, as `Authorization: Bearer TOKEN` or
            as the password of HTTP Basic; `/healthz` and `/readyz` need none. None: no token.
        cert_file: the absolute path of the certificate chain for TLS, PEM; None: no TLS.
        key_file: the absolute path of the certificate's private key, PEM.
    """

    listen: str
    token_file: Annotated[str, Meta(pattern=_ABSOLUTE)] | None = None
    cert_file: Annotated[str, Meta(pattern=_ABSOLUTE)] | None = None
    key_file: Annotated[str, Meta(pattern=_ABSOLUTE)] | None = None

    @property
    def address(self) -> tuple[str, int]:
        """The IP address and the port of `listen`. Raises `ValueError`."""
        match = re.fullmatch(r"(?:([0-9.]{1,15})|\[([0-9a-fA-F:.]{2,45})\]):([0-9]{1,5})", self.listen, re.ASCII)
        if match is None or int(match[3]) > 65535:
            raise ValueError("ADDRESS:PORT with an IP address, as in 127.0.0.1:9464 or [::1]:9464")
        return str(ipaddress.ip_address(match[1] or match[2])), int(match[3])

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of this machine can connect. Raises `ValueError`."""
        return ipaddress.ip_address(self.address[0]).is_loopback


class WatchConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A directory of another program, whose checkpoints the daemon takes.

    Attributes:
        directory: the absolute path of the directory below which the program writes; it is never written to.
        run: the name of the run that they become; no trainer and no other `[[watch]]` saves to it.
        unit: globs of paths below the directory; each path that matches is one checkpoint, and nothing else is one;
            empty: the layouts that tierd knows.
        step: with `unit`, a regular expression with one group: its last match in a checkpoint's path is the step;
            None: the number in its name.
        complete_when: with `unit`, a file within a checkpoint, or beside it, with `{name}` for the checkpoint's
            name: without it, the checkpoint is not complete; None: nothing says that.
        series: of how many series, those that were saved last, the two newest checkpoints are pinned; None: of 100,
            and the daemon warns when ten newer series have begun since the last save of one.
    """

    directory: Annotated[str, Meta(pattern=_DIRECTORY)]
    run: str
    unit: tuple[str, ...] = ()
    step: str | None = None
    complete_when: str | None = None
    series: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole configuration of a daemon.

    Attributes:
        spool: the absolute path of the spool's directory.
        tier: the tiers, each a `[[tier]]`, in order of preference.
        retention: which checkpoints the daemon keeps in the spool after a tier has verified them; None: the
            trainer's policy, else `keep_last = 3`.
        rescan: while a trainer is attached or work is pending, the daemon lists the spool and the tiers at least
            this often.
        drain: how long flushes go on after SIGTERM.
        hold_for: the daemon stops keeping checkpoints in other places for a tier that has not answered for longer
            than this.
        min_free_percent: if less of the spool's disk is free, the daemon deletes local copies that a tier has
            verified before retention would; it keeps a run's newest copy while the run has a trainer.
        finished: how long a run has no trainer and no new part before the daemon deletes it from the spool. The
            daemon waits until the tiers hold all checkpoints of the run that they want.
        scrub: the daemon verifies every copy again within this time, though never more often than each minute; `0s`:
            it verifies only copies in which an error was found.
        scrub_rate: how fast the scrub reads, in each place.
        notify: the receivers of events, each a `[[notify]]`.
        http: the HTTP server, a `[http]`; None: there is none.
        watch: the directories of other programs, each a `[[watch]]`.
    """

    spool: Annotated[str, Meta(pattern=_DIRECTORY)]
    tier: Annotated[tuple[TierConfig, ...], Meta(min_length=1)]
    retention: RetentionPolicy | None = None
    rescan: Duration = "30s"
    drain: Duration = "60s"
    hold_for: Duration = "7d"
    min_free_percent: Annotated[float, Meta(ge=0, le=90)] = 5.0
    finished: Duration = "1d"
    scrub: Duration = "30d"
    scrub_rate: Rate = "20MB/s"
    notify: tuple[NotifyConfig, ...] = ()
    http: HttpConfig | None = None
    watch: tuple[WatchConfig, ...] = ()

    def urls(self) -> dict[str, StoreUrl]:
        """Return the URL of each tier by its name."""
        return {tier.name: parse_url(tier.url) for tier in self.tier}

    def tier_named(self, name: str) -> TierConfig:
        """The tier called `name`."""
        return next(tier for tier in self.tier if tier.name == name)


def without_addresses(config: Config) -> Config:
    """The configuration with each webhook's address shortened to its origin and each command's arguments hidden."""
    receivers = []
    for receiver in config.notify:
        url = receiver.url if receiver.url is None or is_reference(receiver.url) else redacted_url(receiver.url)
        words = receiver.command and tuple(word if not number else "…" for number, word in enumerate(receiver.command))
        receivers.append(msgspec.structs.replace(receiver, url=url, command=words))
    return msgspec.structs.replace(config, notify=tuple(receivers))


def from_toml(text: str, where: str) -> Config:
    """Parse the text of a configuration file.

    Args:
        text: the text.
        where: the file's name, for error messages.

    Raises:
        ConfigError: the text cannot be used; the message names `where`, the key's path and the reason.
    """
    if len(text) > MAX_CONFIG_CHARS:
        raise ConfigError(f"{where}: it has more than {MAX_CONFIG_CHARS} characters; is it the right file?")
    if _DEEP.search(text):
        raise ConfigError(f"{where}: a line with more than 64 dots; is it the right file?")
    try:
        config = msgspec.convert(tomllib.loads(text), Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {_readable(str(error), text)}") from error
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, for example, raises no TOMLDecodeError
        raise ConfigError(f"{where}: not TOML: {error}") from error
    try:
        return _checked(config, where)
    except ConfigError as error:
        message = str(error)
        path = re.match(r"[a-z_]+(?:\[\d+\])?(?:\.[a-z_]+(?:\[\d+\])?)*(?=: )", message.removeprefix(f"{where}: "))
        raise ConfigError(f"{message}{_line_text(text, path[0] if path else '')}") from error


def from_urls(
    spool: str,
    urls: Sequence[str],
    retention: RetentionPolicy | None = None,
    key_file: str | None = None,
    where: str = "--to",
    watch: Sequence[WatchConfig] = (),
) -> Config:
    """Make the configuration of ``tierd run --spool DIR --to URL``. Tiers are named after their URL's scheme.

    Args:
        spool: the absolute path of the spool's directory.
        urls: the URL of each tier.
        retention: the policy in every place; None: each run's own.
        key_file: the absolute path of the key that encrypts every tier; None: no encryption.
        where: the beginning of error messages.
        watch: the directories of other programs.

    Raises:
        ConfigError: there is no URL, or one cannot be used.
    """
    if not urls:
        raise ConfigError("no tier: name at least one with --to URL")
    tiers: list[TierConfig] = []
    for url in urls:
        scheme = parse_url(url).scheme
        same_scheme = sum(tier.name.split("-")[0] == scheme for tier in tiers)
        name = scheme if not same_scheme else f"{scheme}-{same_scheme + 1}"
        tiers.append(TierConfig(name=name, url=url, retention=retention, key_file=key_file))
    return _checked(Config(spool=spool, tier=tuple(tiers), retention=retention, watch=tuple(watch)), where)


def with_urls(config: Config, urls: Sequence[str], *, first: bool) -> Config:
    """Return a configuration that also has the tiers of `urls`; `config` itself if nothing changes.

    A tier that is there keeps its name, because what a daemon knows of a tier is kept under its name.

    Args:
        config: the configuration.
        urls: the URL of each tier.
        first: put the tiers of `urls` before the others, in their order.

    Raises:
        ConfigError: a URL cannot be used.
    """
    tiers = {str(parse_url(tier.url)): tier for tier in config.tier}
    requested = {str(parse_url(url)): url for url in urls}
    for place, url in requested.items():
        if place not in tiers:
            scheme, used_names = parse_url(url).scheme, {tier.name for tier in tiers.values()}
            names = (scheme if number == 1 else f"{scheme}-{number}" for number in itertools.count(1))
            tiers[place] = TierConfig(name=next(name for name in names if name not in used_names), url=url)
    if first:
        tiers = {place: tiers[place] for place in [*requested, *tiers]}
    if tuple(tiers.values()) == config.tier:
        return config
    return _checked(msgspec.structs.replace(config, tier=tuple(tiers.values())), "to")


def _checked(config: Config, where: str) -> Config:
    if not parse_duration(config.rescan):
        raise ConfigError(f"{where}: rescan: {config.rescan!r} would look without a pause")
    _check_rate(config.scrub_rate, f"{where}: scrub_rate")
    names: set[str] = set()
    urls: dict[str, StoreUrl] = {}
    for index, tier in enumerate(config.tier):
        try:
            url = parse_url(tier.url)
        except ConfigError as error:
            raise ConfigError(f"{where}: tier[{index}].url: {error}") from error
        if tier.name in names or tier.name in _RESERVED:
            raise ConfigError(f"{where}: tier[{index}].name: {tier.name!r} is taken")
        for name, place in urls.items():
            _check_apart(f"{where}: tier[{index}].url", url, name, place)
        if tier.backfill and tier.retention is None:
            raise ConfigError(f"{where}: tier[{index}].backfill: give this tier a retention, which says what it gets")
        _check_rate(tier.limit_up, f"{where}: tier[{index}].limit_up")
        _check_rate(tier.limit_down, f"{where}: tier[{index}].limit_down")
        names.add(tier.name)
        urls[tier.name] = url
    for index, receiver in enumerate(config.notify):
        _check_receiver(receiver, f"{where}: notify[{index}]")
    if config.http is not None:
        _check_http(config.http, f"{where}: http")
    watched: dict[str, str] = {}
    for index, watch in enumerate(config.watch):
        try:
            check_run(watch.run)
        except ConfigError as error:
            raise ConfigError(f"{where}: watch[{index}].run: {error}") from error
        check_user_layout(watch, f"{where}: watch[{index}]")
        if watch.run in watched:
            raise ConfigError(
                f"{where}: watch[{index}].run: {watch.run!r} is the run of {watched[watch.run]}; "
                f"each [[watch]] is a run of its own, so give {watch.directory} another one, or leave it out"
            )
        watched[watch.run] = watch.directory
    return config


def check_user_layout(watch: WatchConfig, where: str) -> None:
    """Check the rules of a watch about which paths are checkpoints.

    Raises:
        ConfigError: one cannot be used; the message begins with `where` and the key.
    """
    if not watch.unit and (watch.step is not None or watch.complete_when is not None):
        raise ConfigError(f"{where}.unit: give it with step and complete_when, because these are about its paths")
    for glob in watch.unit:
        if not _is_below(glob):
            raise ConfigError(f"{where}.unit: {glob!r}: write a path from the directory, as in 'checkpoints/*'")
    if watch.complete_when is not None and not _is_below(watch.complete_when):
        raise ConfigError(
            f"{where}.complete_when: {watch.complete_when!r}: write a file's name within the checkpoint, or beside it "
            "with {name}, as in '{name}.done'"
        )
    try:
        groups = re.compile(watch.step or "()").groups
    except re.error as error:
        raise ConfigError(f"{where}.step: {watch.step!r}: not a regular expression: {error}") from error
    if groups != 1:
        raise ConfigError(f"{where}.step: {watch.step!r}: write one group around the step, as in 'step_([0-9]+)'")


def _is_below(path: str) -> bool:
    """Whether a path leads from a directory to something below it."""
    return all(name not in ("", ".", "..") for name in path.split("/")) and "\0" not in path


def _check_apart(where: str, url: StoreUrl, name: str, place: StoreUrl) -> None:
    """Refuse a tier that is the place of tier `name`, or overlaps with it."""
    how = url.relation(place)
    if how == "is":
        raise ConfigError(
            f"{where}: the same place as tier {name!r}, and each would delete what only the other keeps: "
            "leave one of them out, or give this one a prefix of its own"
        )
    if how and not url.is_directory:  # those are compared on this machine, through links and mounts
        raise ConfigError(
            f"{where}: it {how} the place of tier {name!r}, so the one could delete what is the other's: "
            "give it a prefix of its own, beside that one"
        )


def _check_http(http: HttpConfig, where: str) -> None:
    try:
        open_to_all = not http.is_loopback
    except ValueError as error:
        raise ConfigError(f"{where}.listen: {http.listen!r}: {error}") from error
    if (http.cert_file is None) != (http.key_file is None):
        raise ConfigError(f"{where}: give cert_file and key_file together")
    if open_to_all and http.token_file is None and http.cert_file is None:
        raise ConfigError(
            f"{where}.listen: {http.listen!r} is open to other machines: give token_file, or cert_file and key_file; "
            "or listen on 127.0.0.1"
        )


def _check_receiver(receiver: NotifyConfig, where: str) -> None:
    if (receiver.url is None) == (receiver.command is None):
        raise ConfigError(f"{where}: give either url or command")
    try:
        if receiver.url is not None:
            check_webhook(receiver.url, receiver.headers)
        elif receiver.headers:
            raise ConfigError("headers: a command has none")
    except ConfigError as error:
        raise ConfigError(f"{where}.{error}") from error
    if receiver.command is not None and not receiver.command[0].startswith("/"):
        raise ConfigError(f"{where}.command: it begins with an absolute path; no shell looks for it")
    if any("\0" in word for word in receiver.command or ()):
        raise ConfigError(f"{where}.command: it holds a NUL")
    for name in receiver.events or ():
        if name not in SELECTABLE_KINDS:
            raise ConfigError(f"{where}.events: unknown event {name!r}: there are {', '.join(SELECTABLE_KINDS)}")


def _check_rate(text: str | None, where: str) -> None:
    try:
        if text is not None:
            parse_rate(text)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error


def _line_text(text: str, path: str) -> str:
    line = line_of_member(text, path) if path else None
    return f" (line {line})" if line else ""


def _readable(message: str, text: str) -> str:
    # msgspec writes "... - at `$.tier[0].url`". The path is moved to the front, and `$.`, which users do not know, is
    # removed.
    for pattern, form in _FORMS.items():  # a pattern says nothing to a person
        message = message.replace(f"Expected `str` matching regex {pattern!r}", f"write {form}")
    message, unknown = with_similar_member(with_allowed_values(message, Config), Config)
    match = re.fullmatch(r"(.*) - at `\$\.?(.*)`", message)
    line = _line_text(text, unknown or (match[2] if match else ""))
    return f"{match[2]}: {match[1]}{line}" if match else f"{message}{line}"
