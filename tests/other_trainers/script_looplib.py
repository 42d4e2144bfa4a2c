import torch
from sklearn.datasets import load_digits
from transformers import ViTConfig, ViTForImageClassification

import looplib as ll

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
data = [{"pixel_values": image, "labels": label} for image, label in zip(images, digits.target, strict=True)]
train_set, eval_set = data[:1408], data[1408:]

torch.manual_seed(42)
sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
model = ViTForImageClassification(ViTConfig(image_size=8, patch_size=2, num_channels=1, num_labels=10, **sizes))


def metric_fn(model, batch):
    output = model(**batch)
    return {"loss": output.loss, "accuracy": ll.accuracy(output.logits, batch["labels"])}


loader = ll.make_loader(train_set, batch_size=64, seed=42)  # the whole batch of an update
eval_batches = ll.make_loader(eval_set, batch_size=64, order=ll.data.in_order())
lr = ll.warmup_cosine(3e-3, warmup=20, total=5 * len(loader))
no_decay = [(lambda name, tensor: tensor.ndim < 2, {"weight_decay": 0.0})]  # biases and norms, as in the Trainer
optimizer = ll.optimizer(torch.optim.AdamW, lr=lr, weight_decay=0.1, groups=no_decay)
grad_fn = ll.accumulate(ll.make_grad_fn(model, ll.losses.model_loss), microbatches=2)
train_step = ll.make_train_step(ll.clip_by_global_norm(grad_fn, 1.0), optimizer, donate=True)
eval_step = ll.make_eval_step(model, metric_fn)
log = ll.tee(ll.jsonl("runs/loop/log.jsonl"), ll.console())
ckpt = ll.checkpoint_io("runs/loop/checkpoints", keep_last=2, monitor="eval/accuracy", mode="max")
log_now, eval_now, done = ll.every_n_steps(20), ll.at_epoch_end(), ll.after_epochs(5)

state, window = ckpt.restore(ll.init_state(model, optimizer, epoch_length=len(loader))), ll.Window()
while not done(state):
    for batch in loader(state):
        state, metrics = train_step(state, batch)
        window = window.add(metrics)
        if log_now(state):
            log(state, ll.compute(window.metrics(), prefix="train/"))
            window = ll.Window()
        if eval_now(state):
            log(state, scores := ll.evaluate(eval_step, state, eval_batches, prefix="eval/"))
            ckpt.save(state, scores)

state = ckpt.restore(state, which="best")
ll.checkpoint.save_pretrained(model, state, "runs/loop/best")
print(ll.evaluate(eval_step, state, eval_batches))
