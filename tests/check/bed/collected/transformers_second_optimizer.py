# HALF: first
# FRAMEWORK: transformers
# SOURCE: https://github.com/huggingface/accelerate/issues/1563 (objects that are not registered), center loss with an optimizer of its own
# EXPECTED: The trainer's centers and their own optimizer are not in the checkpoint and start anew.
# KEYWORDS: cent(er|re)|\bSGD\b
# WRONG: sampler|position|scheduler|\(generator\)|buffers|state\[.model|state\[.optimizer
# CHECK: --steps 16 --kill-at 11

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
        self.net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))

    def forward(self, x, ids):
        return {"features": self.net(x)}


class CenterLossTrainer(Trainer):
    """The centers have an optimizer of their own."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.centers = torch.nn.Parameter(torch.randn(2, 4))
        self.center_optimizer = torch.optim.SGD([self.centers], lr=0.2, momentum=0.9)

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        features = model(**inputs)["features"]
        centers = self.centers[inputs["ids"] % 2]
        loss = (features - centers).square().mean() - 0.1 * torch.log(1e-2 + features.var(0).mean())
        self.seen = (inputs["ids"].tolist(), loss.detach())
        return loss

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.center_optimizer.step()
        self.center_optimizer.zero_grad()
        return loss


class Report(TrainerCallback):
    trainer = None

    def on_step_end(self, args, state, control, **kwargs):
        tierd.observe(state.global_step, *self.trainer.seen)


def main(spool):
    torch.manual_seed(0)
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
    trainer = report.trainer = CenterLossTrainer(
        model=Model(), args=args, train_dataset=Rows(), callbacks=[report, saving]
    )
    trainer.train(resume_from_checkpoint=saving.resume(trainer))
    ckpt.close()
