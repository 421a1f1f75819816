"""Fixtures for the tests in this folder."""

from support.daemon_fixtures import quick, spool  # noqa: F401
