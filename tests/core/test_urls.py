"""parse_url: what it takes, what it refuses and says, and that no secret comes out again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.core.errors import ConfigError
from tierd.core.store_schemes import PLACES, SCHEMES
from tierd.core.urls import StoreUrl, parse_url

SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"


@pytest.mark.parametrize(
    ("text", "expected", "canonical"),
    [
        ("/mnt/tier", StoreUrl("file", path="/mnt/tier"), "file:///mnt/tier"),
        ("//mnt//tier/./x/", StoreUrl("file", path="/mnt/tier/x"), "file:///mnt/tier/x"),
        ("/mnt/a b?c#d%41@e", StoreUrl("file", path="/mnt/a b?c#d%41@e"), "file:///mnt/a%20b%3Fc%23d%2541%40e"),
        ("file:///mnt/a%20b", StoreUrl("file", path="/mnt/a b"), "file:///mnt/a%20b"),
        ("file://localhost/mnt/ü", StoreUrl("file", path="/mnt/ü"), "file:///mnt/%C3%BC"),
        ("FILE:///mnt", StoreUrl("file", path="/mnt"), "file:///mnt"),
        ("s3://bucket", StoreUrl("s3", bucket="bucket"), "s3://bucket"),
        ("s3://my.bucket-1/", StoreUrl("s3", bucket="my.bucket-1"), "s3://my.bucket-1"),
        ("S3://bucket/a//b=c/", StoreUrl("s3", bucket="bucket", prefix="a/b=c"), "s3://bucket/a/b=c"),
        ("s3://bucket/a/%62", StoreUrl("s3", bucket="bucket", prefix="a/b"), "s3://bucket/a/b"),
        (
            "s3://bucket/prefix?endpoint=http://127.0.0.1:7480&addressing=path&region=us-east-1",
            StoreUrl(
                "s3",
                bucket="bucket",
                prefix="prefix",
                endpoint="http://127.0.0.1:7480",
                addressing="path",
                region="us-east-1",
            ),
            "s3://bucket/prefix?addressing=path&endpoint=http://127.0.0.1:7480&region=us-east-1",
        ),
        (
            "s3://bucket?endpoint=https%3A%2F%2FS3.Example.com%2Fstorage%2F&addressing=auto",
            StoreUrl("s3", bucket="bucket", endpoint="https://s3.example.com/storage"),
            "s3://bucket?endpoint=https://s3.example.com/storage",
        ),
        ("gs://my_bucket/a/b/", StoreUrl("gs", bucket="my_bucket", prefix="a/b"), "gs://my_bucket/a/b"),
        (
            "az://container/a?endpoint=http://127.0.0.1:10000/acct&account=acct",
            StoreUrl("az", bucket="container", prefix="a", account="acct", endpoint="http://127.0.0.1:10000/acct"),
            "az://container/a?account=acct&endpoint=http://127.0.0.1:10000/acct",
        ),
        (
            "s3://bucket?endpoint=http://[::1]:9000",
            StoreUrl("s3", bucket="bucket", endpoint="http://[::1]:9000"),
            "s3://bucket?endpoint=http://[::1]:9000",
        ),
        (
            "s3://bucket?storage_class=STANDARD_IA&sse_kms_key_id=arn:aws:kms:eu-west-1:111122223333:key/1-2-3",
            StoreUrl(
                "s3",
                bucket="bucket",
                storage_class="STANDARD_IA",
                sse_kms_key_id="arn:aws:kms:eu-west-1:111122223333:key/1-2-3",
            ),
            "s3://bucket?sse_kms_key_id=arn:aws:kms:eu-west-1:111122223333:key/1-2-3&storage_class=STANDARD_IA",
        ),
    ],
)
def test_url_is_parsed_to_its_canonical_form(text: str, expected: StoreUrl, canonical: str) -> None:
    assert parse_url(text) == expected
    assert str(expected) == canonical
    assert parse_url(canonical) == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "relative"),
        ("mnt/tier", "relative"),
        ("./tier", "relative"),
        ("C:\\tier", "unknown scheme 'c'"),
        ("s3a://bucket/x", "unknown scheme 's3a' (is 's3' meant?)"),
        ("gcs://bucket", f"unknown scheme 'gcs' (is 'gs' meant?): a store is {PLACES}"),
        ("gs://", "the bucket is missing: write gs://bucket/prefix"),
        ("gs://Bucket", "is no bucket name"),
        ("gs://bucket?region=x", "unknown parameter 'region': there are endpoint"),
        ("az://container", "parameter account is missing: write az://container/prefix?account=NAME"),
        ("az://", "the container is missing"),
        ("az://my.container?account=name", "is no container name"),
        ("az://my--container?account=name", "is no container name"),
        (
            "az://container?account=Name",
            "parameter account is a storage account: 3 to 24 lower-case letters and digits",
        ),
        ("az://container?account=name&sas_token=x", "AZURE_STORAGE_ACCOUNT_KEY"),
        ("gs://key:secret@bucket", "GOOGLE_APPLICATION_CREDENTIALS"),
        ("az:container", "followed by '//', as in az://container/prefix?account=NAME"),
        ("s3:bucket", "followed by '//'"),
        ("file:/mnt", "followed by '//'"),
        (" s3://bucket", "white space"),
        ("s3://buc\nket", "control character"),
        ("file://mnt/tier", "here is 'mnt': write file:///path"),
        ("file://localhost", "root of the file system"),
        ("/", "root of the file system"),
        ("/mnt/../etc", "'..'"),
        ("file:///mnt/%2e%2e/etc", "'..'"),
        ("file:///mnt/%00", "control character"),
        ("file:///mnt/%ff", "UTF-8"),
        ("file:///mnt?region=x", "no parameters"),
        ("file:///mnt#x", "'#'"),
        ("s3://bucket/x#", "'#'"),
        ("s3://", "bucket is missing"),
        ("s3:///prefix", "bucket is missing"),
        ("s3://?region=x", "bucket is missing"),
        ("s3://Bucket", "'Bucket' is no bucket name"),
        ("s3://ab", "'ab' is no bucket name"),
        ("s3://a..b", "'a..b' is no bucket name"),
        ("s3://127.0.0.1/x", "'127.0.0.1' is no bucket name"),
        ("s3://under_score", "is no bucket name"),
        ("s3://127.0.0.1:9000/bucket", "?endpoint="),
        ("s3://[::1/bucket", "not well formed"),
        ("s3://bucket/a/../b", "'..' in the prefix"),
        ("s3://bucket/a/%2e%2E/b", "'..' in the prefix"),
        ("s3://bucket/a/./b", "'.' in the prefix"),
        ("s3://bucket/a b", "'a b' in the prefix"),
        (f"s3://bucket/{'x' * 200}/{'y' * 200}", "401 characters"),
        ("s3://bucket?endpiont=http://x", "unknown parameter 'endpiont' (is 'endpoint' meant?)"),
        ("s3://bucket?Region=x", "(is 'region' meant?)"),
        ("s3://bucket?colour=red", "unknown parameter 'colour': there are addressing, endpoint, region,"),
        ("s3://bucket?region=a&region=a", "region stands twice"),
        (
            "s3://bucket?region=",
            "region is lower-case letters, digits and '-', as in eu-central-1; here it has no value",
        ),
        ("s3://bucket?region", "no value"),
        ("s3://bucket?region=a&", "unknown parameter"),
        ("s3://bucket?region=US", "region is"),
        ("s3://bucket?addressing=paths", "addressing is auto, path or virtual"),
        ("s3://bucket?storage_class=glacier", "storage_class is capital letters"),
        ("s3://bucket?sse_kms_key_id=a+b", "sse_kms_key_id is"),
        ("s3://bucket?endpoint=127.0.0.1:9000", "begins with http:// or https://"),
        ("s3://bucket?endpoint=ftp://host", "begins with http:// or https://"),
        ("s3://bucket?endpoint=http://", "a host name or address"),
        ("s3://bucket?endpoint=http://host:x", "not well formed"),
        ("s3://bucket?endpoint=http://host:99999", "not well formed"),
        ("s3://bucket?endpoint=http://ho st", "a host name or address"),
        ("s3://bucket?endpoint=http://host/%3Fa=b", "nothing but a path"),
    ],
)
def test_invalid_url_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_url(text)
    assert says in str(caught.value)


@pytest.mark.parametrize("name", [name for name, scheme in SCHEMES.items() if scheme.is_directory])
def test_directory_url_is_refused_with_the_example_of_its_own_scheme(name: str) -> None:
    example = SCHEMES[name].example
    with pytest.raises(ConfigError, match=f"a {name} URL has no host, but here is 'mnt': write {example}, with"):
        parse_url(f"{name}://mnt/tier")


@pytest.mark.parametrize(
    "text",
    [
        f"s3://AKIDEXAMPLE:{SECRET}@bucket/prefix",
        f"s3://AKIDEXAMPLE:{SECRET.replace('/', '%2F')}@bucket/prefix",
        f"s3://{SECRET.replace('/', '')}@bucket",
        "s3://user:hunter2-hunter2@bucket",
        f"s3://bucket?secret_access_key={SECRET}",
        f"s3://bucket?aws_session_token={SECRET}",
        f"s3://bucket?{SECRET}",
        f"s3://bucket?region={SECRET}",
        f"s3://bucket?endpoint=http://key:{SECRET.replace('/', '')}@host",
        f"s3://bucket?endpoint=http://key:{SECRET}@host",
        f"s3://bucket#{SECRET}",
        f"file://user:{SECRET}@host/mnt",
        f"gs://key:{SECRET}@bucket",
    ],
)
def test_a_secret_is_refused_and_never_repeated(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_url(text)
    for piece in ("wJalr", "MDENG", "EXAMPLEKEY", "hunter2"):
        assert piece not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_credentials_are_shown_the_door() -> None:
    for text in ("s3://a:b@bucket", "s3://bucket?access_key=a", "s3://bucket?endpoint=http://a:b@host"):
        with pytest.raises(ConfigError, match="standard AWS chain: AWS_ACCESS_KEY_ID"):
            parse_url(text)


segment = st.from_regex(r"[A-Za-z0-9._=-]{1,20}", fullmatch=True).filter(lambda part: part not in (".", ".."))
s3_urls = st.builds(
    StoreUrl,
    st.just("s3"),
    bucket=st.from_regex(r"[a-z][a-z0-9-]{1,61}[a-z0-9]", fullmatch=True),
    prefix=st.lists(segment, max_size=5).map("/".join),
    endpoint=st.none() | st.from_regex(r"https?://[a-z0-9]{1,9}(\.[a-z]{1,5})?(:[1-9][0-9]{1,3})?", fullmatch=True),
    region=st.none() | st.from_regex(r"[a-z0-9-]{1,20}", fullmatch=True),
    addressing=st.sampled_from(["auto", "path", "virtual"]),
    sse_kms_key_id=st.none() | st.from_regex(r"[A-Za-z0-9:/_-]{1,50}", fullmatch=True),
    storage_class=st.none() | st.from_regex(r"[A-Z_]{1,20}", fullmatch=True),
)
names = st.text(min_size=1, max_size=20).filter(lambda s: s.isprintable() and "/" not in s and s not in (".", ".."))
file_urls = st.builds(
    StoreUrl, st.just("file"), path=st.lists(names, min_size=1, max_size=5).map("/".join).map("/".__add__)
)


@given(s3_urls | file_urls)
def test_the_canonical_url_parses_to_the_same(url: StoreUrl) -> None:
    assert parse_url(str(url)) == url


@given(st.text() | st.from_regex(r"(s3|file)://[ -~]*", fullmatch=True))
def test_any_text_is_parsed_to_a_stable_url_or_refused(text: str) -> None:
    try:
        url = parse_url(text)
    except ConfigError:
        return
    assert parse_url(str(url)) == url
    assert ".." not in f"{url.path}/{url.prefix}".split("/")
    assert "@" not in str(url)


@pytest.mark.parametrize(
    ("url", "place", "relation"),
    [
        ("s3://bucket/p", "s3://bucket/p?storage_class=STANDARD_IA", "is"),
        ("s3://bucket/p?region=eu-central-1", "s3://bucket/p?region=us-east-1", "is"),
        ("s3://bucket/p?addressing=path", "s3://bucket/p?addressing=virtual&sse_kms_key_id=k", "is"),
        ("s3://bucket/p", "s3://bucket/p?endpoint=https://s3.eu-central-1.amazonaws.com", "is"),
        ("s3://bucket/p?endpoint=http://h", "s3://bucket/p?endpoint=http://H.:80", "is"),
        ("s3://bucket/p?endpoint=http://h", "s3://bucket/p?endpoint=https://h:443", "is"),
        ("s3://bucket/n/r", "s3://bucket/n", "lies in"),
        ("s3://bucket", "s3://bucket/n", "contains"),
        ("gs://bucket/n", "gs://bucket/n/r", "contains"),
        ("s3://bucket/n", "s3://bucket/nr", ""),
        ("s3://bucket/p", "gs://bucket/p", ""),
        ("s3://bucket/p", "s3://bucket-2/p", ""),
        ("s3://bucket/p?endpoint=http://h:1", "s3://bucket/p?endpoint=http://h:2", ""),
        ("s3://bucket/p?endpoint=http://h/a", "s3://bucket/p?endpoint=http://h/b", ""),
        ("az://container/p?account=one", "az://container/p?account=two", ""),
    ],
)
def test_relation_of_places_ignores_how_they_are_reached(url, place, relation):
    back = {"is": "is", "lies in": "contains", "contains": "lies in", "": ""}
    assert parse_url(url).relation(parse_url(place)) == relation
    assert parse_url(place).relation(parse_url(url)) == back[relation]
