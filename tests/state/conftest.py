"""Fixtures for the tests in this folder."""

import pytest
from support.client_fixtures import daemon, fake, local, quick, spool  # noqa: F401

from tierd.state import capture, structure


@pytest.fixture(params=["guarded", "compared one by one"])
def forms(request, monkeypatch):
    """Both ways in which a structure is compared with the one before."""
    if request.param != "guarded":
        monkeypatch.setattr(structure, "_guard", lambda tensors: None)


@pytest.fixture
def walks(monkeypatch):
    """How many full walks there were."""
    counted = []

    class Counted(capture.Encoder):
        def __init__(self, answers):
            counted.append(1)
            super().__init__(answers)

    monkeypatch.setattr(capture, "Encoder", Counted)
    return counted
