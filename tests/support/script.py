"""A program that trains and resumes by itself, without a line of tierd: `script OUT LOG` trains up to step 8, saves
every second step below OUT, resumes from what is there, and writes a line for each step's loss to LOG.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

APART = Path(sys.prefix) / "apart"

_BEGIN = """
import os, sys
os.environ["KERAS_BACKEND"] = "torch"
import torch
out, log = sys.argv[1], open(sys.argv[2], "a", buffering=1)
torch.set_num_threads(1)
torch.manual_seed(7)
WIDTH, STEPS, EVERY = 150_000, 8, 2
def tell(step, loss):
    print(step, repr(float(loss)), file=log)
def row(index):
    return torch.sin(torch.arange(4.0) * (index + 1))
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, WIDTH), torch.nn.Linear(WIDTH, 1)
    def forward(self, x):
        return self.last(torch.tanh(self.first(x))).square().mean()
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, index):
        return {"x": row(index)}
def batch(step):
    return torch.stack([row(2 * step), row(2 * step + 1)])
def train(net, optimizer, first, save):
    for step in range(first, STEPS):
        loss = net(batch(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tell(step + 1, loss)
        if (step + 1) % EVERY == 0:
            save(step + 1)
"""


@dataclass(frozen=True)
class Script:
    """A training script.

    Attributes:
        package: what it imports.
        text: what follows `_BEGIN`.
        third: a glob below OUT, which matches as soon as the third save has begun to write.
        newest: a glob of the second save, whose largest file gets a flipped bit.
        renamed: whether a save appears whole by a rename, so that a kill leaves nothing torn in its place.
        pointer: a glob of the link that its own resume follows, and that is not there for a moment in each save.
        apart: whether `make loaders/ready` installs the package in `APART`; constraints/deepspeed.txt says why.
        below: the first Python for which `constraints/loaders.txt` has no wheel of the package.
    """

    package: str
    text: str
    third: str
    newest: str
    renamed: bool = False
    pointer: str = ""
    apart: bool = False
    below: tuple[int, int] = (4, 0)

    @property
    def whole(self) -> str:
        return _BEGIN + self.text

    @property
    def environment(self) -> dict[str, str]:
        paths = [str(APART)] * self.apart + [one for one in [os.environ.get("PYTHONPATH")] if one]
        always = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "KERAS_BACKEND": "torch"}
        return os.environ | always | {"PYTHONPATH": os.pathsep.join(paths)}

    @property
    def is_installed(self) -> bool:
        top = self.package.partition(".")[0]
        return PathFinder.find_spec(top, [str(APART)] * self.apart + sys.path) is not None
