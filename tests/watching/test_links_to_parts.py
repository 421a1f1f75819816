"""A link to one of several directories of a checkpoint is its pointer, as docs/explanation/watching.md says."""

from __future__ import annotations

import shutil

import pytest
from support.watched_run import Home, files
from support.whole_layouts import pt, write


@pytest.mark.parametrize("where", ["", "run/"])
def test_link_to_a_directory_of_a_checkpoint_is_restored(home: Home, where: str, capsys) -> None:
    """OLMo, checkpoint.py: `latest` and `latest-unsharded`."""
    for step in (1000, 2000):
        names = (f"step{step}/model/rank0.pt", f"step{step}-unsharded/model.pt")
        write(home.root, {where + name: pt(step) for name in names}, 1_000_000 + step)
        for link, ending in (("latest", ""), ("latest-unsharded", "-unsharded")):
            (home.root / where / link).unlink(missing_ok=True)
            (home.root / where / link).symlink_to(f"step{step}{ending}")
    (home.root / "newest_run").symlink_to(where or ".")
    home.taken()
    before = {name: data for name, data in files(home.root).items() if "step2000" in name}
    shutil.rmtree(home.root)
    home.prepare(capsys)
    assert files(home.root) == before
    links = {path.name: str(path.readlink()) for path in home.root.rglob("*") if path.is_symlink()}
    assert links == {"latest": "step2000", "latest-unsharded": "step2000-unsharded"}
