"""The places that a command line names, and those that it means if it names none.

Invariant: commands that only read accept a place by its URL and need neither a daemon nor a configuration. A place on
the command line replaces all defaults; only a key's file has one of its own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tierd.core.config import MAX_CONFIG_CHARS, TIER_NAME, Config, TierConfig, WatchConfig, from_toml, from_urls
from tierd.core.errors import ConfigError
from tierd.core.ids import check_run
from tierd.core.retention.policy import RetentionPolicy
from tierd.spool.spool import Spool
from tierd.spool.spool_access import command_as_account, describe_owner

CONFIG, SPOOL, KEY_FILE = "TIERD_CONFIG", "TIERD_SPOOL", "TIERD_KEY_FILE"  # environment variables
DEFAULTS = f"set {CONFIG} or {SPOOL}, or write ~/.config/tierd/tierd.toml or /etc/tierd/tierd.toml"


@dataclass(frozen=True, slots=True)
class DefaultSource:
    """A source of the places that a command line means if it names none.

    Attributes:
        name: an environment variable, or the path of a configuration file.
        value: the variable's value, or `there` of a file; None: it is not set, or there is no file.
        used: whether commands use it. They use the first that has a value, and the key's file with tiers' URLs.
    """

    name: str
    value: str | None
    used: bool


@dataclass(frozen=True, slots=True)
class Places:
    """The places of a command. `has_policy` says whether retention was configured, not defaulted; `config_file` is that
    of the configuration if a file has it."""

    spool: Spool | None
    config: Config | None
    has_policy: bool
    config_file: Path | None = None

    @property
    def node_spool(self) -> Spool:
        """The spool; raises `ConfigError` if there is none, as before the first daemon of a configuration."""
        if self.spool is None:
            raise ConfigError(f"the spool that {self.config_file} names is not there yet: no daemon has run")
        return self.spool


def config_files() -> tuple[Path, ...]:
    """Return the paths at which a configuration is looked for: the account's, then the machine's."""
    return Path("~/.config/tierd/tierd.toml").expanduser(), Path("/etc/tierd/tierd.toml")


def default_config_file() -> Path | None:
    """Return the path of the configuration that is used where the command line names none."""
    named = os.environ.get(CONFIG)
    return Path(named) if named else next((file for file in config_files() if os.access(file, os.F_OK)), None)


def default_spool() -> Path | None:
    """Return the spool of a command line that names tiers and needs a spool as well."""
    return Path(spool) if (spool := os.environ.get(SPOOL)) else None


def default_places() -> tuple[Path | None, Path | None]:
    """Return the spool or the configuration of a command line that names no place: one of the two, or none."""
    spool = None if os.environ.get(CONFIG) else default_spool()
    return spool, None if spool else default_config_file()


def default_sources() -> Iterator[DefaultSource]:
    """Yield each source in the order in which it is asked, then the key's file."""
    spool, config_file = default_places()
    yield DefaultSource(CONFIG, os.environ.get(CONFIG) or None, bool(os.environ.get(CONFIG)))
    yield DefaultSource(SPOOL, os.environ.get(SPOOL) or None, spool is not None)
    for file in config_files():
        value = "there" if os.access(file, os.F_OK) else None
        yield DefaultSource(str(file), value, file == config_file and not os.environ.get(CONFIG))
    key = os.environ.get(KEY_FILE) or None
    yield DefaultSource(KEY_FILE, key, key is not None)


def resolve_places(
    spool: Path | None,
    urls: Sequence[str] | None,
    config: Path | None,
    keep_last: int | None = None,
    key_file: Path | None = None,
    *,
    run_option: bool = False,
    tiers: bool = False,
) -> Places:
    """Resolve the options.

    Args:
        spool: of `--spool`.
        urls: tiers, each by its URL or by its name in the configuration.
        config: of `--config`.
        keep_last: of `--keep-last`.
        key_file: of `--key-file`.
        run_option: whether the command takes a run by `--run`, for a hint.
        tiers: whether the command works on tiers, so that a spool alone is no place for it.

    Raises:
        ConfigError: no place is named or meant, options exclude each other, or a place cannot be used.
    """
    if not (spool or urls or config):
        spool, config = (None, default_config_file()) if tiers else default_places()
    if not (spool or urls or config):
        raise ConfigError(f"nothing to look at: give --spool DIR, a tier's URL, or --config FILE; or {DEFAULTS}")
    if config is not None and not urls:
        return _configured_places(spool, config, keep_last, key_file)
    if config is not None and (spool or key_file or not all(map(_is_tier_name, urls or ()))):
        raise ConfigError("--config names the tiers and their keys itself: of the URLs, give only tiers' names")
    if key_file and not urls:
        raise ConfigError("--key-file is for tiers that are named by their URLs; name one")
    retention = RetentionPolicy(keep_last=keep_last) if keep_last else None
    root = str(spool.absolute()) if spool else "/"
    try:
        named = make_config(root, urls, retention, key_file, config_file=config) if urls else None
    except ConfigError as error:
        raise ConfigError(f"{error}{_run_meant(urls or ()) if run_option else ''}") from None
    return Places(_open_spool(spool) if spool else None, named, has_policy=keep_last is not None)


def _configured_places(spool: Path | None, file: Path, keep_last: int | None, key_file: Path | None) -> Places:
    if spool or keep_last or key_file:
        raise ConfigError(
            f"the configuration {file} names the spool, the tiers, their keys and their retention itself: "
            "leave --spool, --keep-last and --key-file out, or name tiers by their URLs"
        )
    config = load_config(file)
    home = Path(config.spool)
    check_account_access(home)
    return Places(_open_spool(home) if home.exists() else None, config, has_policy=True, config_file=file)


def make_config(
    spool: str,
    urls: Sequence[str],
    retention: RetentionPolicy | None = None,
    key_file: Path | None = None,
    *,
    where: str = "--to",
    watch: Sequence[WatchConfig] = (),
    config_file: Path | None = None,
    default_key: bool = True,
) -> Config:
    """Make a configuration of tiers on the command line, of which each is a URL or a tier's name.

    A relative path that begins with `./` or `../` is taken from the working directory. A name stands for the URL and
    the key of that tier in `config_file`, or where that is None, in the default configuration. URLs have the key of
    `key_file`, else with `default_key` that of the environment. The other arguments are those of `from_urls`.

    Raises:
        ConfigError: there is no URL, one cannot be used, or no configuration has a tier of a name.
    """
    urls = [str(Path(url).absolute()) if url.startswith(("./", "../")) else url for url in urls]
    named = _named_tiers(urls, config_file)
    key = str(key_file.absolute()) if key_file else None
    environment_key = os.environ.get(KEY_FILE) if default_key else None
    if key is None and environment_key:
        key = str(Path(environment_key).absolute())
    config = from_urls(spool, [named[url].url if url in named else url for url in urls], retention, key, where, watch)
    if not named:
        return config
    tiers = []
    for url, tier in zip(urls, config.tier, strict=True):
        if known := named.get(url):
            key = str(key_file.absolute()) if key_file else known.key_file
            tier = TierConfig(name=known.name, url=tier.url, retention=retention, key_file=key)
        tiers.append(tier)
    if len({tier.name for tier in tiers}) < len(tiers):  # a name of the configuration is that of a scheme
        raise ConfigError(
            f"{where}: name all tiers by their URLs, or all by their names in {config_file or 'the configuration'}"
        )
    return Config(spool=spool, tier=tuple(tiers), retention=retention, watch=tuple(watch))


def _named_tiers(urls: Sequence[str], config_file: Path | None) -> dict[str, TierConfig]:
    """Return the tiers that are named in `urls` by their names; without a configuration, nothing is a name."""
    file = config_file or default_config_file()
    names = [url for url in urls if _is_tier_name(url)]
    if not names or file is None:
        return {}
    tiers = {tier.name: tier for tier in load_config(file).tier}
    for name in names:
        if name not in tiers:
            raise ConfigError(f"{name!r}: no URL, and no tier of {file} has this name; it has {', '.join(tiers)}")
    return {name: tiers[name] for name in names}


def _is_tier_name(text: str) -> bool:
    return re.match(TIER_NAME, text) is not None


def _run_meant(urls: Sequence[str]) -> str:
    """Return the hint for a run's name or a directory's in place of a URL, or nothing."""
    name = next((url for url in urls if _is_run(url)), None)
    if name and Path(name).is_dir():
        return f"; the directory {name} is ./{name}"
    return f"; if {name!r} is a run's name, write --run {name}" if name else ""


def _is_run(text: str) -> bool:
    with suppress(ConfigError):
        return bool(check_run(text))
    return False


def check_account_access(path: Path) -> None:
    """Raise `ConfigError`, which says whose it is, if a directory on a spool's path is closed to this account."""
    for directory in (*reversed(path.absolute().parents), path):
        if directory.is_dir() and not os.access(directory, os.X_OK):
            owner = directory.stat().st_uid
            raise ConfigError(
                f"{directory}: {describe_owner(owner)}; run as its owner: {command_as_account(owner)} tierd ..."
            )


def _open_spool(path: Path) -> Spool:
    check_account_access(path)
    if not (path / ".tierd").is_dir():  # because opening any directory would make it a spool
        raise ConfigError(f"{path}: not a spool; a Checkpointer or `tierd run` makes one")
    return Spool(path, write=False)


def load_config(path: Path) -> Config:
    """Read a configuration file; raises `ConfigError`."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return from_toml(file.read(MAX_CONFIG_CHARS + 1), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration {path}: {error}") from error
