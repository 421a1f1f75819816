# HALF: second
# FRAMEWORK: transformers
# SOURCE: https://github.com/huggingface/transformers/issues/34053 (the learning rate is discontinuous after resume)
# EXPECTED: The linear schedule is made for the steps that remain, not for all, so the learning rate after a resume is another one.
# KEYWORDS: schedul|learning rate|\blr\b
# WRONG: sampler|position|\(generator\)|\(weights\)|buffers
# CHECK: --steps 18 --kill-at 8

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


class MyTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        loss = super().compute_loss(model, inputs, return_outputs, **kwargs)
        self.seen = (inputs["ids"].tolist(), loss.detach())
        return loss


class Report(TrainerCallback):
    trainer = None

    def on_step_end(self, args, state, control, **kwargs):
        tierd.observe(state.global_step, *self.trainer.seen)


def main(spool):
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ckpt = tierd.Checkpointer(spool, run="hf", to=[])
    report, saving = Report(), tierd.adapters.transformers.TierdCallback(ckpt, every_steps=3)
    args = TrainingArguments(
        output_dir=f"{spool}-out",
        max_steps=18,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
        logging_strategy="no",
    )
    trainer = report.trainer = MyTrainer(
        model=model, args=args, train_dataset=Rows(), callbacks=[report, saving], optimizers=(optimizer, None)
    )
    checkpoint = saving.resume(trainer)
    remaining = 18
    if checkpoint is not None:
        remaining -= ckpt.restore().step
    trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / remaining))
    trainer.train(resume_from_checkpoint=checkpoint)
    ckpt.close()
