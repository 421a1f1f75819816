"""Fixtures for the tests in this folder."""

from support.daemon_fixtures import quick, spool  # noqa: F401
from support.node_states import home  # noqa: F401
