"""The training script with one thing left out of its resume. It exists so that a test can prove that the demo fails.

python -m examples.demo.sabotage rng --spool ...     # the rest as for examples.demo.train
"""

from __future__ import annotations

import sys
from typing import Any

from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torchdata.stateful_dataloader import StatefulDataLoader

import tierd
from examples.demo import train

PARTS: dict[str, Any] = {
    "rng": tierd.RngState,
    "data": StatefulDataLoader,
    "optimizer": AdamW,
    "scheduler": LambdaLR,
}

if __name__ == "__main__":
    PARTS[sys.argv.pop(1)].load_state_dict = lambda self, state: None
    train.main()
