"""What a trainer does shows in the daemon's metrics: its saves with their times, and its restores."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from support.waiting import wait_until
from support.web import get, serving

import tierd
from tierd.core.manifest import Manifest
from tierd.core.planning.place import Place
from tierd.daemon import handoff_socket
from tierd.events.save_events import SaveEvents
from tierd.spool.commit import CommittedPart
from tierd.spool.spool import Spool


def sample(text: str, name: str) -> float | None:
    """The value of the sample with this name and these labels, as they stand in the exposition."""
    return next((float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name} ")), None)


def train(spool: Spool) -> None:
    state = {"weights": torch.arange(100_000.0)}
    with tierd.Checkpointer(spool.root, "run") as ckpt:
        for step in (1, 2):
            ckpt.save(step, state).wait()
        assert ckpt.stats.handed_over == 2
    with tierd.Checkpointer(spool.root, "run") as ckpt:
        found = ckpt.restore(state)
        assert found is not None and found.step == 2


@pytest.fixture
def observed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the daemon observe each part before its hand-off is reported, which happens seldom and only under load."""
    came, write_part, last = SaveEvents.report_new_parts, handoff_socket.write_part, [Place()]

    def noted(self: SaveEvents, spool: Place) -> None:
        came(self, spool)
        last[0] = spool

    def written(spool: Spool, manifest: Manifest, files: dict[str, memoryview]) -> CommittedPart:
        outcome = write_part(spool, manifest, files)
        wait_until(lambda: last[0].lists(manifest.part))
        return outcome

    monkeypatch.setattr(SaveEvents, "report_new_parts", noted)
    monkeypatch.setattr(handoff_socket, "write_part", written)


@pytest.mark.usefixtures("observed_first")
async def test_saves_and_restores_of_a_trainer_are_measured(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    async with serving(spool, tmp_path / "tier") as http:
        await asyncio.to_thread(train, spool)
        async with asyncio.timeout(60):
            while True:
                text = (await get(http.address, "/metrics")).body.decode()
                if (
                    sample(text, 'tierd_restores_total{run="run"}') == 1
                    and sample(text, 'tierd_last_durable_step{run="run",tier="disk"}') == 2
                ):
                    break
                await asyncio.sleep(0.2)
        assert sample(text, 'tierd_saves_total{run="run"}') == 2
        assert sample(text, 'tierd_save_blocked_seconds_count{run="run"}') == 2
        blocked = sample(text, 'tierd_save_blocked_seconds_sum{run="run"}')
        durable = sample(text, 'tierd_save_durable_seconds_sum{run="run",tier="local"}')
        assert blocked is not None and durable is not None and 0 < blocked < durable
        assert sample(text, 'tierd_save_durable_seconds_count{run="run",tier="local"}') == 2
