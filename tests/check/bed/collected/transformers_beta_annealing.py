# HALF: first
# FRAMEWORK: transformers
# SOURCE: https://github.com/Lightning-AI/pytorch-lightning/issues/2631 (attributes lost after resume), KL annealing in a Trainer subclass
# EXPECTED: The weight of the KL term (beta) grows in an attribute of the Trainer subclass that is not saved, so it starts at zero again.
# KEYWORDS: beta|anneal
# WRONG: sampler|position|scheduler|\(optimizer\)|\(generator\)|\(weights\)|buffers
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


class Autoencoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = torch.nn.Linear(6, 4), torch.nn.Linear(2, 6)

    def forward(self, x, ids):
        mean, log_var = self.encode(x).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * (log_var / 2).exp()
        kl = -0.5 * (1 + log_var - mean.square() - log_var.exp()).mean()
        return {"reconstruction": (self.decode(z) - x).square().mean(), "kl": kl}


class VAETrainer(Trainer):
    beta = 0.0

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        out = model(**inputs)
        loss = out["reconstruction"] + self.beta * out["kl"]
        self.beta = min(1.0, self.beta + 0.04)
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
    trainer = report.trainer = VAETrainer(
        model=Autoencoder(), args=args, train_dataset=Rows(), callbacks=[report, saving]
    )
    trainer.train(resume_from_checkpoint=saving.resume(trainer))
    ckpt.close()
