# HALF: second
# FRAMEWORK: transformers
# SOURCE: https://github.com/mosaicml/composer/issues/1002 (layer freezing does not support resuming)
# EXPECTED: The first layer is unfrozen at one step only; after a resume beyond it, it stays frozen.
# KEYWORDS: fr[eo]ez|frozen|requires_grad|trainable|\(mode\)
# WRONG: sampler|position|scheduler|\(generator\)|buffers
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


class MyTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        loss = super().compute_loss(model, inputs, return_outputs, **kwargs)
        self.seen = (inputs["ids"].tolist(), loss.detach())
        return loss


class GradualUnfreezing(TrainerCallback):
    def __init__(self, at):
        self.at = at

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == 0:
            model.net[0].requires_grad_(False)
        elif state.global_step == self.at:
            model.net[0].requires_grad_(True)


class Report(TrainerCallback):
    trainer = None

    def on_step_end(self, args, state, control, **kwargs):
        tierd.observe(state.global_step, *self.trainer.seen)


def main(spool):
    torch.manual_seed(0)
    model = Model()
    frozen = model.net[0]
    frozen.requires_grad_(False)
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
        model=model, args=args, train_dataset=Rows(), callbacks=[GradualUnfreezing(at=6), report, saving]
    )
    trainer.train(resume_from_checkpoint=saving.resume(trainer))
    ckpt.close()
