"""Hugging Face Trainer: a small GPT-2 with random weights, trained, evaluated and saved.

    torchrun --standalone --nproc-per-node=2 examples/integrations/hf_trainer.py

The Trainer builds the wrapper through Accelerate, so one line before it is all: `ddp_mp.install(mixed_precision=...)`.  Leave
`bf16` and `fp16` of the TrainingArguments off: those are autocast.  Gradient accumulation, clipping, evaluation and
checkpoints are the Trainer's own, and see full-precision parameters.
Prints the loss, and what type the parameters have that were saved.
"""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import ddp_mp

BATCH, ACCUMULATE, LENGTH, SAMPLES = 2, 2, 12, 32


class Tokens(Dataset):
    """Random sequences."""

    def __init__(self) -> None:
        self.rows = torch.randint(0, 50, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def build_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": LENGTH, "vocab_size": 50}
    return GPT2LMHeadModel(GPT2Config(**sizes, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0, bos_token_id=0, eos_token_id=0))


def main() -> dict[str, torch.Tensor]:
    ddp_mp.install(mixed_precision=ddp_mp.MixedPrecision(torch.bfloat16, torch.float32))

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=not torch.cuda.is_available(),
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=ACCUMULATE,
            num_train_epochs=1,
            optim="sgd",
            learning_rate=0.1,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            train_sampling_strategy="sequential",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(build_model(), arguments, train_dataset=Tokens(), eval_dataset=Tokens())
        trainer.train()
        patched = ddp_mp.is_patched(trainer.model_wrapped)
        evaluated = trainer.evaluate()["eval_loss"]
        trainer.save_model(f"{folder}/saved-{dist.get_rank()}")
        if trainer.is_world_process_zero():
            saved = {tensor.dtype for tensor in load_file(f"{folder}/saved-0/model.safetensors").values()}
            print(f"patched: {patched}, evaluation loss {evaluated:.4f}, saved in {saved}")
        state = trainer.model.state_dict()
        trainer.accelerator.end_training()
        return state


if __name__ == "__main__":
    main()
