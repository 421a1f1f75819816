"""Fixtures for the tests in this folder."""

from support.attached import job, pace  # noqa: F401
