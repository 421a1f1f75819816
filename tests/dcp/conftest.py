"""Fixtures for the tests in this folder."""

from support.client_fixtures import daemon, fake, local, quick, spool  # noqa: F401
