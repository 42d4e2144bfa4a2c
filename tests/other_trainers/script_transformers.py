import torch
from sklearn.datasets import load_digits
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification, set_seed

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
data = [{"pixel_values": image, "labels": label} for image, label in zip(images, digits.target, strict=True)]
train_set, eval_set = data[:1408], data[1408:]

set_seed(42)
sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
model = ViTForImageClassification(ViTConfig(image_size=8, patch_size=2, num_channels=1, num_labels=10, **sizes))


def compute_metrics(prediction):
    return {"accuracy": (prediction.predictions.argmax(-1) == prediction.label_ids).mean()}


args = TrainingArguments(
    output_dir="runs/trainer",
    num_train_epochs=5,
    per_device_train_batch_size=32,
    gradient_accumulation_steps=2,
    per_device_eval_batch_size=64,
    learning_rate=3e-3,
    lr_scheduler_type="cosine",
    warmup_steps=20,
    weight_decay=0.1,
    max_grad_norm=1.0,
    logging_steps=20,
    eval_strategy="epoch",
    save_strategy="epoch",
    save_total_limit=2,
    load_best_model_at_end=True,
    metric_for_best_model="accuracy",
    report_to="none",
)
trainer = Trainer(model, args, train_dataset=train_set, eval_dataset=eval_set, compute_metrics=compute_metrics)
trainer.train()
trainer.save_model("runs/trainer/best")
print(trainer.evaluate())
