# HALF: first
# FRAMEWORK: transformers
# SOURCE: https://github.com/atomistic-machine-learning/schnetpack/pull/785 (done right), unfreezing by a condition on the step
# EXPECTED: Nothing: the average is part of the model, and the frozen layer follows from the step.
# CHECK: --steps 16 --kill-at 11

import copy

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

import tierd
import tierd.adapters.transformers


class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return 40

    def __getitem__(self, i):
        return {"x": self.x[i], "ids": i}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 6)
        )
        self.slow = copy.deepcopy(self.net).requires_grad_(False)

    def forward(self, x, ids):
        out = self.net(x)
        return {"loss": (out - x.cumsum(1)).square().mean() + 0.1 * (out - self.slow(x)).square().mean()}


class MyTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        loss = super().compute_loss(model, inputs, return_outputs, **kwargs)
        self.seen = (inputs["ids"].tolist(), loss.detach())
        return loss


class Report(TrainerCallback):
    trainer = None

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        model.net[0].requires_grad_(state.global_step >= 6)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        with torch.no_grad():
            for slow, fast in zip(model.slow.parameters(), model.net.parameters()):
                slow.lerp_(fast, 0.1)
        tierd.observe(state.global_step, *self.trainer.seen)


def main(spool):
    torch.manual_seed(0)
    ckpt = tierd.Checkpointer(spool, run="hf", to=[])
    report, saving = Report(), tierd.adapters.transformers.TierdCallback(ckpt, every_steps=4)
    args = TrainingArguments(
        output_dir=f"{spool}-out",
        max_steps=16,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
        logging_strategy="no",
    )
    trainer = report.trainer = MyTrainer(model=Model(), args=args, train_dataset=Rows(), callbacks=[report, saving])
    trainer.train(resume_from_checkpoint=saving.resume(trainer))
    ckpt.close()
