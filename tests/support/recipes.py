"""The recipes of docs/howto as programs: a block's two sides, executed with the paths of a test."""

from __future__ import annotations

import logging
import os
import pathlib
import re
import types
from collections import deque
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

import tierd

PAGES = sorted((Path(__file__).parents[2] / "docs" / "howto").glob("*.md"))
IMPORTS = (
    *(DataLoader, DistributedSampler, IterableDataset, StatefulDataLoader, deque, get_worker_info),
    *(dist, logging, os, pathlib, tierd, torch),
)


def recipes() -> dict[str, list[tuple[str, str]]]:
    """The blocks below each heading of the pages, as the code before and the code after."""
    found: dict[str, list[tuple[str, str]]] = {}
    for page in PAGES:
        sections = re.split(r"^## (.+)\n", page.read_text(), flags=re.M)[1:]
        for heading, text in zip(sections[::2], sections[1::2], strict=True):
            if blocks := re.findall(r"^```diff\n(.*?)^```", text, re.M | re.S):
                assert heading not in found, f"{page.name}: {heading}"
                found[heading] = [(_side(block, "-"), _side(block, "+")) for block in blocks]
    return found


def _side(block: str, sign: str) -> str:
    return "".join(f"{line[1:]}\n" for line in block.splitlines() if line[:1] in (sign, " ", ""))


def execute(code: str, home: Path, tier: Path | None = None, **names: Any) -> types.SimpleNamespace:
    """What a side defines, with `home`'s spool. The tier is a directory, or there is none; other files are where the
    process is."""
    urls = [] if tier is None else [tier.as_uri()]
    code = code.replace('"/nvme/tierd"', repr(os.fspath(home / "spool")))
    code = code.replace('["s3://bucket/checkpoints"]', repr(urls)).replace(
        '"s3://bucket/checkpoints"', repr(*urls or [""])
    )
    namespace: dict[str, Any] = {getattr(one, "__name__", "").split(".")[-1]: one for one in IMPORTS} | {"dist": dist}
    namespace |= names
    exec(compile(code, "recipe", "exec"), namespace)
    return types.SimpleNamespace(**namespace)
