"""The requests of clients are counted while they are answered, however that ends; and what a reconciler offers."""

from __future__ import annotations

import re

import pytest
from support.world import part, reconciler

from tierd.daemon.reconciler import Reconciler
from tierd.daemon.reconciling.client_requests import ClientRequests
from tierd.stores.memory_store import MemoryStore


def test_a_run_is_of_interest_while_a_request_about_it_is_answered():
    requests = ClientRequests()
    with pytest.raises(OSError), requests.request_context("run"):
        requests.lose_interest((), 0.0)
        assert requests.requested_runs == {"run"}
        raise OSError
    requests.lose_interest(["run"], 0.0)  # it is in the spool, so it is observed anyway
    assert requests.requested_runs == {"run"}
    requests.lose_interest((), 3600.0)
    assert requests.requested_runs == {"run"}
    requests.lose_interest((), 0.0)
    assert not requests.requested_runs
    with requests.request_context(None):
        assert not requests.requested_runs


def test_a_part_is_awaited_until_the_wait_ends_however_it_ends():
    requests, one = ClientRequests(), part(1)
    with requests.awaiting_flush(one, needed=False):
        with pytest.raises(TimeoutError), requests.awaiting_flush(one, needed=True):
            assert requests.awaited_parts[one] == 2 and requests.needed_checkpoints[one.checkpoint] == 1
            raise TimeoutError
        assert requests.awaited_parts[one] == 1 and not requests.needed_checkpoints
    assert not requests.awaited_parts


def test_a_run_is_trained_while_its_trainer_is_attached_or_will_write_again():
    requests = ClientRequests()
    requests.trainer_activity.trainer_attached("attached")
    requests.writers = lambda: frozenset({"handing.00000-of-00001"})
    assert [run for run in ("attached", "handing", "other") if requests.is_trained(run)] == ["attached", "handing"]
    requests.trainer_activity.trainer_detached("attached")
    assert not requests.is_trained("attached")


def test_a_reconciler_has_the_public_attributes_that_its_docstring_names_and_no_other(spool):
    described = str(Reconciler.__doc__).partition("Attributes:")[2].partition("Args:")[0]
    named = set(re.findall(r"^ {8}(\w+): ", described, re.MULTILINE))
    daemon = reconciler(spool, {"tier": MemoryStore()})
    assert named == {name for name in vars(daemon) if not name.startswith("_")}
