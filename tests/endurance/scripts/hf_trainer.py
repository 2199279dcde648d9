"""A small GPT-2 trained by Hugging Face's Trainer, which uses accelerate."""

import argparse
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

asked = argparse.ArgumentParser()
asked.add_argument("--steps", type=int, default=100)
steps = asked.parse_args().steps
sizes = {"n_embd": 192, "n_layer": 4, "n_head": 6, "n_positions": 96, "vocab_size": 2048}
config = GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
texts = [{"input_ids": t, "labels": t} for t in torch.randint(2048, (2048, 96))]
with tempfile.TemporaryDirectory() as folder:
    settings = TrainingArguments(
        folder,
        per_device_train_batch_size=4,
        max_steps=steps,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    Trainer(GPT2LMHeadModel(config), settings, train_dataset=texts).train()
