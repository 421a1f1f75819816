"""What `make lint` says of private names that tests patch."""

from __future__ import annotations

import pytest

from tools import patches


def test_every_private_name_that_a_test_patches_is_allowed_with_a_reason() -> None:
    assert patches.findings() == []
    assert all(patches.ALLOWED.values())


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ('monkeypatch.setattr(module, "_WAIT_S", 1)', "_WAIT_S"),
        ('monkeypatch.setattr("tierd.daemon.module._WAIT_S", 1)', "_WAIT_S"),
        ('monkeypatch.delattr(Reader, "_read")', "_read"),
        ('mock.patch.object(Reader, "_read")', "_read"),
        ('mock.patch("tierd.module._read")', "_read"),
        ('setattr(module, "_read", double)', "_read"),
        ("module._WAIT_S = 1", "_WAIT_S"),
        ("reader._left += 1", "_left"),
        ('slow = Hold(monkeypatch, "_read")', "_read"),
        ('for name in ("tierd.module._read",): monkeypatch.setattr(name, double)', "_read"),
        ('monkeypatch.setattr(module, "__version__", "1")', ""),
        ('monkeypatch.setattr(os, "fsync", refuse)', ""),
        ('monkeypatch.setattr("os.path.realpath", refuse)', ""),
        ("self._left = 1", ""),
        ("state._metadata = {}", ""),
        ("value = module._WAIT_S", ""),
    ],
)
def test_each_way_to_patch_a_private_name_is_detected(line: str, name: str) -> None:
    assert [found for _, found in patches.patched(f"import x\n{line}\n")] == ([name] if name else [])


def test_finding_names_the_line() -> None:
    assert patches.patched("import x\n\nx._a = 1\nx.b = 1\n") == [(3, "_a")]
