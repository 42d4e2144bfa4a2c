"""A script for transformers' Trainer with everything on; recipes/from_transformers.py is the same as a loop.

recipes/FROM_TRANSFORMERS_SCRIPT.md shows it beside that loop, and a test trains both.
"""

import pydoc_data.topics
from pathlib import Path

import torch
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint


def main():
    args = TrainingArguments(
        output_dir="runs/original",
        num_train_epochs=2,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        per_device_eval_batch_size=8,
        bf16=True,
        learning_rate=5e-3,
        lr_scheduler_type="cosine",
        warmup_steps=50,
        weight_decay=0.1,
        max_grad_norm=1.0,
        label_smoothing_factor=0.1,
        logging_steps=20,
        eval_strategy="steps",
        eval_steps=100,
        save_strategy="steps",
        save_steps=100,
        save_total_limit=3,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=False,
        enable_jit_checkpoint=True,
        report_to="tensorboard",
        seed=42,
    )
    set_seed(args.seed)
    sizes = GPT2Config(
        vocab_size=256, n_positions=128, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    train_set, eval_set = load_data()
    trainer = Trainer(
        GPT2LMHeadModel(sizes),
        args,
        train_dataset=train_set,
        eval_dataset=eval_set,
        data_collator=default_data_collator,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        callbacks=[EarlyStoppingCallback(early_stopping_patience=3)],
    )
    there = Path(args.output_dir).is_dir()
    trainer.train(resume_from_checkpoint=get_last_checkpoint(args.output_dir) if there else None)
    trainer.save_model()
    scores = trainer.evaluate()
    print(f"{scores['eval_accuracy']:.2%} of the next bytes guessed")
    return trainer


def load_data():
    text = "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items())).encode()
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().unfold(0, 128, 128)
    labels = windows.clone()
    labels[:, 0] = -100  # which is never predicted, and yet counted by the Trainer otherwise
    examples = [{"input_ids": window, "labels": label} for window, label in zip(windows, labels, strict=True)]
    return examples[: len(windows) * 9 // 10], examples[len(windows) * 9 // 10 :]


def compute_metrics(prediction):
    guessed, labels = prediction.predictions, prediction.label_ids
    return {"accuracy": (guessed[:, :-1] == labels[:, 1:]).mean()}


if __name__ == "__main__":
    main()
