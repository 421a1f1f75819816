"""tierd.toml: what it may say; and that each mistake is answered with the path of the key that holds it."""

from __future__ import annotations

import typing
from typing import Literal

import msgspec
import pytest

from tierd.core.config import Config, HttpConfig, NotifyConfig, TierConfig, WatchConfig, from_toml, from_urls
from tierd.core.conversion_messages import with_allowed_values
from tierd.core.errors import ConfigError
from tierd.core.retention.policy import Best, RetentionPolicy

TIER = '[[tier]]\nname = "nfs"\nurl = "/mnt/tier"\n'
WHOLE = """
spool = "/nvme/tierd"
rescan = "10s"
drain = "2m"
min_free_percent = 7.5

[retention]
keep_last = 2

[[tier]]
name = "nfs"
url = "file:///mnt/tier"

[[tier]]
name = "s3"
url = "s3://bucket/prefix?region=eu-central-1"
limit_up = "200MB/s"
limit_down = "1.5GiB/s"
[tier.retention]
keep_last = 5
keep_every_steps = 1000
keep_within = "7d"
keep_best = {metric = "loss", mode = "max", count = 3}
"""
SEVERAL = """
spool = "/s"
retention = { keep_every_steps = [100, 7], keep_every = ["12h", "7d"], keep_best = [{metric = "a"}, {metric = "b"}] }
"""


def test_a_rule_takes_several_values():
    assert from_toml(SEVERAL + TIER, "tierd.toml").retention == RetentionPolicy(
        keep_every_steps=(7, 100), keep_every=("12h", "7d"), keep_best=(Best(metric="a"), Best(metric="b"))
    )


def test_everything_that_can_be_said():
    assert from_toml(WHOLE, "tierd.toml") == Config(
        spool="/nvme/tierd",
        rescan="10s",
        drain="2m",
        min_free_percent=7.5,
        retention=RetentionPolicy(keep_last=2),
        tier=(
            TierConfig(name="nfs", url="file:///mnt/tier"),
            TierConfig(
                name="s3",
                url="s3://bucket/prefix?region=eu-central-1",
                limit_up="200MB/s",
                limit_down="1.5GiB/s",
                retention=RetentionPolicy(
                    keep_last=5,
                    keep_every_steps=1000,
                    keep_within="7d",
                    keep_best=Best(metric="loss", mode="max", count=3),
                ),
            ),
        ),
    )


def test_little_needs_to_be_said():
    config = from_toml(f'spool = "/s"\n{TIER}', "tierd.toml")
    assert config.retention is config.tier[0].retention is None  # each run's own
    assert config.tier_named("nfs") is config.tier[0]


def text(top: str = "", tier: str = "", *, spool: str = 'spool = "/s"') -> str:
    return f"{spool}\n{top}\n{TIER}{tier}\n"


@pytest.mark.parametrize(
    ("toml", "path"),
    [
        (text("color = 1"), "color"),
        (text(spool=""), "spool"),
        (text(spool="spool = 7"), "spool"),
        (text(spool='spool = "relative"'), "spool"),
        (text('rescan = "soon"'), "rescan"),
        (text('rescan = "0s"'), "rescan"),
        (text('rescan = "30s\\n"'), "rescan"),
        (text("rescan = 30"), "rescan"),
        (text('drain = "1w"'), "drain"),
        (text("min_free_percent = -1"), "min_free_percent"),
        (text("min_free_percent = 91"), "min_free_percent"),
        (text("min_free_percent = nan"), "min_free_percent"),
        (text("min_free_percent = true"), "min_free_percent"),
        (text("[retention]\nkeep_last = 0"), "retention.keep_last"),
        (text("[retention]\nkeep_last = true"), "retention.keep_last"),
        (text("[retention]\nkeep_last = 1.5"), "retention.keep_last"),
        (text("[retention]\nkeep_no_such = 1"), "retention"),
        (text("[retention]\nkeep_every_steps = 0"), "retention.keep_every_steps"),
        (text('[retention]\nkeep_within = "forever"'), "retention.keep_within"),
        (text("[retention.keep_best]\ncount = 2"), "retention.keep_best"),
        (text('[retention.keep_best]\nmetric = ""'), "retention.keep_best.metric"),
        (text('[retention.keep_best]\nmetric = "loss"\nmode = "low"'), "retention.keep_best.mode"),
        (text('[retention.keep_best]\nmetric = "loss"\ncount = 0'), "retention.keep_best.count"),
        (text(tier="bucket = 1"), "tier[0]"),
        (text(tier="limit_up = 200"), "tier[0].limit_up"),
        (text(tier='limit_up = "200MB"'), "tier[0].limit_up"),
        (text(tier='limit_down = "0MB/s"'), "tier[0].limit_down"),
        (text(tier="[tier.retention]\nkeep_last = 0"), "tier[0].retention.keep_last"),
        (text(tier='[[tier]]\nname = "b"'), "tier[1]"),
        (text(tier='[[tier]]\nname = "B"\nurl = "/b"'), "tier[1].name"),
        (text(tier='[[tier]]\nname = "b\\n"\nurl = "/b"'), "tier[1].name"),
        (text(tier='[[tier]]\nname = "nfs"\nurl = "/b"'), "tier[1].name"),
        (text(tier='[[tier]]\nname = "local"\nurl = "/b"'), "tier[1].name"),
        (text(tier='[[tier]]\nname = "b"\nurl = "relative"'), "tier[1].url"),
        (text(tier='[[tier]]\nname = "b"\nurl = "s3://key:secret@bucket"'), "tier[1].url"),
        (text(tier='[[tier]]\nname = "b"\nurl = "file:///mnt//tier/"'), "tier[1].url"),
        ('spool = "/s"\n', "tier"),
        ('spool = "/s"\ntier = []\n', "tier"),
        ('spool = "/s"\ntier = "/mnt"\n', "tier"),
    ],
)
def test_a_mistake_is_named_by_its_path(toml, path):
    with pytest.raises(ConfigError) as caught:
        from_toml(toml, "tierd.toml")
    message = str(caught.value)
    named = message.startswith(f"tierd.toml: {path}: ")
    # A key at the top level has no path above it: its own name is in the message.
    assert named or f"`{path}`" in message
    assert "$" not in message and "regex" not in message
    assert "secret" not in message or "://" not in message


@pytest.mark.parametrize(
    ("toml", "form"),
    [
        (text(tier='limit_up = "100KB/s"'), "write a rate, such as 800kB/s"),
        (text('scrub = "5 minutes"'), "write a time, such as 90s"),
        (text('[retention]\nkeep_within = "a week"'), "write a time, such as 90s"),
        (text(tier='[[tier]]\nname = "B"\nurl = "/b"'), "write at most 32 lower case letters"),
        (text(tier='key_file = "key"'), "write an absolute path"),
        ('spool = "spool"\n', "write an absolute path"),
    ],
)
def test_a_mistake_in_a_text_is_answered_by_its_form(toml: str, form: str) -> None:
    """A regular expression, as msgspec has it, says nothing to a person on call."""
    with pytest.raises(ConfigError, match=form):
        from_toml(toml, "tierd.toml")


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        (text(tier='verify = "never"'), "tier[0].verify: Invalid enum value 'never': write checksum or read"),
        (
            text('retention = {keep_best = {metric = "loss", mode = "maximum"}}'),
            "retention.keep_best.mode: Invalid enum value 'maximum': write min or max",
        ),
        (
            text(tier='retention = {keep_best = [{metric = "a"}, {metric = "b", mode = "`$.no`"}]}'),
            "tier[0].retention.keep_best[1].mode: Invalid enum value '`$.no`': write min or max",
        ),
    ],
)
def test_invalid_value_of_enumeration_is_answered_with_the_valid_values(toml: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_toml(toml, "tierd.toml")
    assert str(caught.value).startswith(f"tierd.toml: {message} (line ")


@pytest.mark.parametrize("table", [Config, TierConfig, NotifyConfig, HttpConfig, WatchConfig, RetentionPolicy, Best])
def test_every_enumeration_of_the_configuration_is_answered_with_its_values(table: type) -> None:
    for field in msgspec.structs.fields(table):
        if typing.get_origin(field.type) is Literal:
            told = with_allowed_values(f"Invalid enum value 'x' - at `$.{field.name}`", table)
            assert all(value in told for value in typing.get_args(field.type)), field.name


def test_invalid_enum_value_of_a_program_is_answered_with_the_valid_values() -> None:
    with pytest.raises(ConfigError, match="Invalid enum value 'maximum': write min or max"):
        RetentionPolicy(keep_best={"metric": "loss", "mode": "maximum"})  # type: ignore[arg-type]


def test_invalid_toml_is_reported_as_such():
    with pytest.raises(ConfigError, match=r"^tierd.toml: not TOML: .*line 2"):
        from_toml('spool = "/s"\nrescan = \n[x]', "tierd.toml")


def test_urls_alone_are_a_configuration_and_name_their_tiers():
    config = from_urls("/s", ["/a", "s3://bucket", "file:///b"], RetentionPolicy(keep_last=9))
    assert [(tier.name, tier.url) for tier in config.tier] == [
        ("file", "/a"),
        ("s3", "s3://bucket"),
        ("file-2", "file:///b"),
    ]
    assert {config.retention.keep_last, *(tier.retention.keep_last for tier in config.tier)} == {9}
    assert from_urls("/s", ["/a"]).retention is from_urls("/s", ["/a"]).tier[0].retention is None


@pytest.mark.parametrize(
    ("urls", "said"),
    [([], "--to URL"), (["relative"], "store URL"), (["/a", "ftp://x"], "ftp"), (["/a", "file:///a/"], "tier 'file'")],
)
def test_urls_that_are_no_configuration(urls, said):
    with pytest.raises(ConfigError, match=said):
        from_urls("/s", urls)


@pytest.mark.parametrize(
    "line",
    [
        "x = " + "[" * 2000 + "]" * 2000,
        "min_free_percent = " + "9" * 5000,
        'rescan = "' + "9" * 400 + 'd"',
        "#" * 70_000,
        "a." * 30_000 + "a = 1",
        "x = {" + "a." * 30_000 + "a = 1}",
    ],
    ids=["deep", "long number", "endless", "long", "dotted", "dotted within"],
)
def test_random_configuration_line_is_refused_and_nothing_else_raised(line):
    with pytest.raises(ConfigError):
        from_toml(f'spool = "/s"\n{line}\n[[tier]]\nname = "a"\nurl = "/t"\n', "x.toml")


def test_a_spool_with_a_nul_is_no_path():
    with pytest.raises(ConfigError, match="spool"):
        from_toml('spool = "/s\\u0000"\n[[tier]]\nname = "a"\nurl = "/t"\n', "x.toml")


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        (["s3://bucket/p", "s3://bucket/p?region=eu-central-1"], "the same place as tier 's3'"),
        (["s3://bucket/p?storage_class=STANDARD_IA", "s3://bucket/p"], "a prefix of its own"),
        (["s3://bucket/n", "s3://bucket/n/r"], "lies in the place of tier 's3'"),
        (["gs://bucket/n/r", "gs://bucket"], "contains the place of tier 'gs'"),
    ],
)
def test_two_tiers_in_one_place_of_a_bucket_are_refused(urls, message):
    """The poorer of two policies deleted what the richer one wants, and `rm` of a run deleted another tier's run."""
    with pytest.raises(ConfigError, match=message):
        from_urls("/s", urls)


def test_tiers_beside_each_other_in_a_bucket_are_a_configuration():
    assert len(from_urls("/s", ["s3://bucket/n", "s3://bucket/nr", "gs://bucket/n"]).tier) == 3


PLACES = "spool = '/s'\n[[tier]]\nname = 'a'\nurl = '/a'\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"rescann = '3s'\n{PLACES}", "unknown field `rescann`; did you mean `rescan`? (line 1)"),
        (f"{PLACES}[[tier]]\nname = 'b'\nulr = '/b'\n", "tier[1]: Object contains unknown field `ulr`; did you mean"),
        (f"{PLACES}[[tier]]\nname = 'b'\nulr = '/b'\n", "`url`? (line 7)"),
        (f"{PLACES}[tier.retention]\nkeep_lst = 3\n", "unknown field `keep_lst`; did you mean `keep_last`? (line 6)"),
        (f"{PLACES}retention = {{keep_last = 'x'}}\n", "tier[0].retention.keep_last: Expected `int`, got `str`"),
        (f"{PLACES}retention = {{keep_last = 'x'}}\n", "(line 5)"),
        (f"{PLACES}[[tier]]\nname = 'b'\nurl = 'gopher://x'\n", "(line 7)"),
    ],
)
def test_message_names_the_line_and_a_similar_key(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        from_toml(text, "tierd.toml")
    assert message in str(raised.value)
