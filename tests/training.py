"""A training by transformers' Trainer as a user would write it. Imports nothing of relinear: an exported
folder is trained without."""

from pathlib import Path

import torch
from transformers import (
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)


def train(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> tuple[float, float]:
    """The evaluation's loss before and after. The rows are of unequal length, padded on the right, and their
    prompts masked."""
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(2, 97, (n,), generator=draw).tolist() for n in (9, 14, 20, 6)]
    data = [
        {"input_ids": row, "attention_mask": [1] * len(row), "labels": [-100] * 3 + row[3:]} for row in rows
    ]
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        num_train_epochs=4,
        learning_rate=1e-2,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=data,
        eval_dataset=data,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    return before, trainer.evaluate()["eval_loss"]
