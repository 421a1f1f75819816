"""A loop of Hugging Face's Trainer over a LoRA model, whose checkpoints do not hold the base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from loaders.parts import trainer_arguments
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback

import tierd
from tierd.adapters.transformers import TierdCallback

EVERY, SAMPLES, BATCH, TOKENS = 3, 48, 4, 50


class Texts(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, TOKENS, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def built(base_seed: int, adapter_seed: int) -> Any:
    """Return a LoRA model. The seeds decide the weights of the base, as files do, and those of the adapter."""
    torch.manual_seed(base_seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    base = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, vocab_size=TOKENS, **sizes))
    torch.manual_seed(adapter_seed)
    return get_peft_model(base, LoraConfig(r=4, lora_dropout=0.2, target_modules=["q_proj", "v_proj"]))


class Observe(TrainerCallback):
    """Reports a sum of the adapter's weights, which other samples, dropout or learning rates change."""

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        adapter = sum(
            value.detach().double().abs().sum() for value in parts["model"].parameters() if value.requires_grad
        )
        tierd.observe(state.global_step - 1, [], float(adapter))


def trainer_of(model: Any, home: Path, saving: TierdCallback, **options: Any) -> Trainer:
    args = trainer_arguments(
        home,
        per_device_train_batch_size=BATCH,
        learning_rate=0.01,
        logging_strategy="no",
        seed=3,
        remove_unused_columns=True,
        **options,
    )
    return Trainer(model=model, args=args, train_dataset=Texts(), callbacks=[Observe(), saving])


def train(spool: Path) -> None:
    torch.set_num_threads(1)
    with tierd.Checkpointer(spool, "run", to=[]) as ckpt:
        saving = TierdCallback(ckpt, every_steps=EVERY, trainable_only=True)
        trainer = trainer_of(built(1, 2), spool.parent, saving, num_train_epochs=100)
        trainer.train(resume_from_checkpoint=saving.resume(trainer))
