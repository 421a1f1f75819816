# HALF: second
# FRAMEWORK: torch
# SOURCE: https://github.com/meta-pytorch/data/issues/1520 (batches that were read ahead; done right: the position is what training used)
# EXPECTED: Nothing: a thread reads ahead by a changing number of batches, but the saved position is that of the batches that were used.
# CHECK: --steps 16 --kill-at 11

import queue
import random
import threading

import torch

import tierd


class ReadAhead:
    def __init__(self, rows, batch):
        self.rows, self.batch, self.used = rows, batch, 0
        self.queue = None

    def _read(self, number):
        per_epoch = len(self.rows) // self.batch
        while True:
            epoch, at = divmod(number, per_epoch)
            order = list(range(len(self.rows)))
            random.Random(epoch).shuffle(order)
            ids = order[at * self.batch :][: self.batch]
            self.queue.put((ids, self.rows[ids]))
            number += 1

    def __next__(self):
        if self.queue is None:
            self.queue = queue.Queue(maxsize=4)
            threading.Thread(target=self._read, args=(self.used,), daemon=True).start()
        found = self.queue.get()
        self.used += 1
        return found

    def state_dict(self):
        return {"used": self.used}

    def load_state_dict(self, state):
        self.used, self.queue = state["used"], None


def main(spool):
    torch.manual_seed(12)
    data = ReadAhead(torch.randn(40, 5), 4)
    model = torch.nn.Sequential(torch.nn.Linear(5, 11), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(11, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True)
    state = {"model": model, "optimizer": optimizer, "data": data, "rng": tierd.RngState(), "step": 0}
    ckpt = tierd.Checkpointer(spool, run="ahead", to=[])
    ckpt.restore(state)
    while state["step"] < 16:
        ids, x = next(data)
        loss = (model(x) - x.cumsum(1)).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state["step"] += 1
        tierd.observe(state["step"], ids, loss)
        if state["step"] % 3 == 0:
            ckpt.save(state["step"], state)
    ckpt.close()
