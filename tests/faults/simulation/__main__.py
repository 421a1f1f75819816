"""A worker: seeds come in, a line each, and what became of their trials goes out."""

from __future__ import annotations

import json
import logging
import os
import sys

from faults.simulation.trial import play

logging.disable(logging.CRITICAL)
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
for line in sys.stdin:
    answers.write(json.dumps(play(int(line))) + "\n")
    answers.flush()
