# HALF: second
# FRAMEWORK: transformers
# SOURCE: https://github.com/X-GenGroup/Flow-Factory/pull/174 (reference snapshots start from the resumed weights)
# EXPECTED: The frozen reference model is copied from the model when training begins, so after a resume it has the resumed weights, not the first ones.
# KEYWORDS: reference|\bref\b|not in the checkpoint\): Sequential
# WRONG: sampler|position|scheduler|\(optimizer\)|\(generator\)|buffers
# CHECK: --steps 16 --kill-at 11

import copy

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

import tierd
import tierd.adapters.transformers


class Rows(torch.utils.data.Dataset):
    def __init__(self, n=40):
        self.x = torch.randn(n, 6, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "ids": i}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 6))

    def forward(self, x, ids):
        return {"loss": (self.net(x) - x.cumsum(1)).square().mean()}


class KeepClose(Trainer):
    """Trains with a penalty for leaving the reference model."""

    reference = None

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        out = model.net(inputs["x"])
        with torch.no_grad():
            ref = self.reference(inputs["x"])
        loss = model(**inputs)["loss"] + 0.5 * (out - ref).square().mean()
        self.seen = (inputs["ids"].tolist(), loss.detach())
        return loss


class MakeReference(TrainerCallback):
    trainer = None

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.trainer.reference = copy.deepcopy(model.net).eval()


class Report(TrainerCallback):
    trainer = None

    def on_step_end(self, args, state, control, **kwargs):
        tierd.observe(state.global_step, *self.trainer.seen)


def main(spool):
    torch.manual_seed(0)
    making = MakeReference()
    ckpt = tierd.Checkpointer(spool, run="hf", to=[])
    report, saving = Report(), tierd.adapters.transformers.TierdCallback(ckpt, every_steps=3)
    args = TrainingArguments(
        output_dir=f"{spool}-out",
        max_steps=16,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        warmup_steps=4,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
        logging_strategy="no",
    )
    trainer = report.trainer = KeepClose(
        model=Model(), args=args, train_dataset=Rows(), callbacks=[making, report, saving]
    )
    making.trainer = trainer
    trainer.train(resume_from_checkpoint=saving.resume(trainer))
    ckpt.close()
