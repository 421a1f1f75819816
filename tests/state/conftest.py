"""Fixtures for the tests in this folder."""

import pytest
import torch
from support.client_fixtures import daemon, fake, local, quick, spool  # noqa: F401

from tierd.state import capturer


@pytest.fixture(params=["guarded", "compared one by one"])
def forms(request, monkeypatch):
    """Both ways in which a structure is compared with the one before."""
    if request.param != "guarded":
        monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")


@pytest.fixture
def walks(monkeypatch):
    """How many full walks there were."""
    counted = []

    class Counted(capturer.Encoder):
        def __init__(self, answers):
            counted.append(1)
            super().__init__(answers)

    monkeypatch.setattr(capturer, "Encoder", Counted)
    return counted
