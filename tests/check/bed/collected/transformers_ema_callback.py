# HALF: first
# FRAMEWORK: transformers
# SOURCE: https://github.com/atomistic-machine-learning/schnetpack/pull/785, https://github.com/ai2cm/ace/issues/349
# EXPECTED: The callback's EMA weights are not in the checkpoint; they are made of the current weights when training begins again.
# KEYWORDS: \bema|shadow|average
# WRONG: sampler|position|scheduler|\(optimizer\)|\(generator\)|\(weights\)
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
        self.net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 6))

    def forward(self, x, ids):
        return {"loss": (self.net(x) - x.cumsum(1)).square().mean()}


class EMACallback(TrainerCallback):
    """Pulls the weights a little towards their average."""

    def __init__(self, decay):
        self.decay, self.shadow = decay, None

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def on_step_end(self, args, state, control, model=None, **kwargs):
        for name, p in model.named_parameters():
            self.shadow[name].lerp_(p, 1 - self.decay)
            p.lerp_(self.shadow[name], 0.05)


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
    trainer = report.trainer = MyTrainer(
        model=Model(), args=args, train_dataset=Rows(), callbacks=[EMACallback(0.9), report, saving]
    )
    trainer.train(resume_from_checkpoint=saving.resume(trainer))
    ckpt.close()
