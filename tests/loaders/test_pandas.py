"""pandas and pyarrow read tables that a checkpoint holds, where they lie on a tier."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pandas")
pytest.importorskip("fsspec")

import fsspec
import pandas
import pyarrow.dataset

import tierd

pytestmark = pytest.mark.loaders
TABLE = pandas.DataFrame({"sample": [1, 2, 3], "score": [0.5, 0.25, 1.0]})


@pytest.fixture
def options(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "tier").mkdir()
    with tierd.Checkpointer(tmp_path / "spool", "run", to=[f"file://{tmp_path}/tier"]) as ckpt:
        with ckpt.stage(1) as directory:
            TABLE.to_parquet(directory / "scores.parquet")
            TABLE.to_csv(directory / "scores.csv", index=False)
        ckpt.close(wait="file")
    return {"tiers": f"file://{tmp_path}/tier"}


@pytest.mark.parametrize("name", ["1", "latest"])
def test_pandas_reads_tables_of_a_checkpoint(options: dict[str, str], name: str) -> None:
    home = f"tierd://run/{name}/00000-of-00001"
    pandas.testing.assert_frame_equal(pandas.read_parquet(f"{home}/scores.parquet", storage_options=options), TABLE)
    pandas.testing.assert_frame_equal(pandas.read_csv(f"{home}/scores.csv", storage_options=options), TABLE)


def test_pyarrow_reads_a_table_of_a_checkpoint(options: dict[str, str]) -> None:
    fs, path = fsspec.url_to_fs("tierd://run/latest/00000-of-00001/scores.parquet", **options)
    table = pyarrow.dataset.dataset(path, filesystem=fs).to_table()
    pandas.testing.assert_frame_equal(table.to_pandas(), TABLE)
