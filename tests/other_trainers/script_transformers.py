import argparse
import inspect
import pydoc_data.topics

from transformers import (
    BertConfig,
    BertForSequenceClassification,
    ByT5Tokenizer,
    EarlyStoppingCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)

tokenizer = ByT5Tokenizer()
prose = [line for topic in pydoc_data.topics.topics.values() for line in topic.splitlines() if line[:1].isalpha()]
code = [line.strip() for line in inspect.getsource(argparse).splitlines() if line.strip()]
lines = [(line, label) for pair in zip(prose[:320], code[:320], strict=True) for label, line in enumerate(pair)]
data = [{**tokenizer(line, truncation=True, max_length=32), "labels": label} for line, label in lines]
train_set, eval_set = data[:384], data[384:]

set_seed(42)
sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
model = BertForSequenceClassification(BertConfig(vocab_size=len(tokenizer), **sizes, **dropout))
model.accepts_loss_kwargs = False  # or microbatches add up: BERT does not divide by num_items_in_batch


def compute_metrics(prediction):
    return {"accuracy": (prediction.predictions.argmax(-1) == prediction.label_ids).mean()}


args = TrainingArguments(
    output_dir="runs/trainer",
    num_train_epochs=12,
    per_device_train_batch_size=16,
    gradient_accumulation_steps=2,
    per_device_eval_batch_size=64,
    learning_rate=3e-3,
    lr_scheduler_type="cosine",
    warmup_steps=10,
    weight_decay=0.1,
    max_grad_norm=1.0,
    logging_steps=10,
    eval_strategy="epoch",
    save_strategy="epoch",
    save_total_limit=2,
    load_best_model_at_end=True,
    metric_for_best_model="accuracy",
    report_to="tensorboard",
)
trainer = Trainer(
    model,
    args,
    train_dataset=train_set,
    eval_dataset=eval_set,
    processing_class=tokenizer,
    compute_metrics=compute_metrics,
    callbacks=[EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=0.005)],
)
trainer.train()
trainer.save_model("runs/trainer/best")
print(trainer.evaluate())
