# HALF: second
# FRAMEWORK: accelerate
# SOURCE: https://github.com/huggingface/transformers/issues/11504 (random states are not saved), https://github.com/The-School-of-AI/LLM/pull/564
# EXPECTED: The global random generators are not in the state, so dropout draws other masks after the resume.
# KEYWORDS: torch.*generator|global|\brng\b|random|dropout|generator\): torch
# WRONG: sampler|position|scheduler|\(optimizer\)|\(weights\)|\(buffers\)|order
# CHECK: --steps 15 --kill-at 7

import torch
from accelerate import Accelerator
from torchdata.stateful_dataloader import StatefulDataLoader

import tierd


def main(spool):
    torch.manual_seed(10)
    accelerator = Accelerator(cpu=True)
    x = torch.randn(32, 6)
    model = torch.nn.Sequential(torch.nn.Linear(6, 24), torch.nn.ReLU(), torch.nn.Dropout(0.4), torch.nn.Linear(24, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    order = torch.Generator()
    loader = StatefulDataLoader(range(32), batch_size=4, shuffle=True, generator=order)
    state = {"model": accelerator.unwrap_model(model), "optimizer": optimizer, "data": loader, "step": 0, "epoch": 0}
    ckpt = tierd.Checkpointer(spool, run="noise", to=[])
    ckpt.restore(state)
    while state["step"] < 15:
        order.manual_seed(state["epoch"])
        for ids in loader:
            loss = (model(x[ids]) - x[ids].amin(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            state["step"] += 1
            tierd.observe(state["step"], ids, loss)
            if state["step"] % 3 == 0:
                ckpt.save(state["step"], state)
            if state["step"] == 15:
                break
        else:
            state["epoch"] += 1
    ckpt.close()
