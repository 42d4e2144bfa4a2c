import argparse
import inspect
import pydoc_data.topics

import torch
from transformers import BertConfig, BertForSequenceClassification, ByT5Tokenizer, DataCollatorWithPadding

import looplib as ll

tokenizer = ByT5Tokenizer()
prose = [line for topic in pydoc_data.topics.topics.values() for line in topic.splitlines() if line[:1].isalpha()]
code = [line.strip() for line in inspect.getsource(argparse).splitlines() if line.strip()]
lines = [(line, label) for pair in zip(prose[:320], code[:320], strict=True) for label, line in enumerate(pair)]
data = [{**tokenizer(line, truncation=True, max_length=32), "labels": label} for line, label in lines]
train_set, eval_set = data[:384], data[384:]

torch.manual_seed(42)
sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
model = BertForSequenceClassification(BertConfig(vocab_size=len(tokenizer), **sizes, **dropout))


def metric_fn(model, batch):
    output = model(**ll.losses.model_inputs(model, batch))
    return {"loss": output.loss, "accuracy": ll.accuracy(output.logits, batch["labels"])}


collate_fn = DataCollatorWithPadding(tokenizer)
microbatches = ll.data.collate_microbatches(collate_fn, 2)  # each padded to its own longest sample
loader = ll.make_loader(train_set, batch_size=32, seed=42, collate_fn=microbatches)  # the batch of an update
eval_batches = ll.make_loader(eval_set, batch_size=64, order=ll.data.in_order(), collate_fn=collate_fn)

lr = ll.warmup_cosine(3e-3, warmup=10, total=12 * len(loader))
no_decay = [(lambda name, tensor: tensor.ndim < 2, {"weight_decay": 0.0})]  # biases and norms, as in the Trainer
optimizer = ll.optimizer(torch.optim.AdamW, lr=lr, weight_decay=0.1, groups=no_decay)
grad_fn = ll.accumulate(ll.make_grad_fn(model, ll.losses.model_loss))
train_step = ll.make_train_step(ll.clip_by_global_norm(grad_fn, 1.0), optimizer, donate=True)
eval_step = ll.make_eval_step(model, metric_fn)

best = ll.predicates.BestSoFar("eval/accuracy", mode="max", min_delta=ll.predicates.MinDelta(0.005, cumulative=False))
eval_now, done = ll.at_epoch_end(), ll.after_epochs(12) | ll.early_stopping(patience=2)
log = ll.tee(ll.log.tracker("tensorboard", "runs/loop"), ll.jsonl("runs/loop/log.jsonl"), ll.console())
log_metrics = ll.log.windowed(log, ll.every_n_steps(10), prefix="train/")
ckpt = ll.checkpoint_io("runs/loop/checkpoints", keep_last=2, monitor="eval/accuracy", mode="max")

print(f"{12 * len(loader)} steps, {sum(p.numel() for p in model.parameters()):,} parameters")
state = ckpt.restore(ll.init_state(model, optimizer, epoch_length=len(loader), extra={"best": best}))
while not done(state):
    for batch in loader(state):
        state, metrics = train_step(state, batch)
        log_metrics(state, metrics)
        if eval_now(state):
            log(state, scores := ll.evaluate(eval_step, state, eval_batches, prefix="eval/"))
            state = ll.update_best(state, scores)
            ckpt.save(state, scores)

best_state = ckpt.restore(state, which="best")
ll.checkpoint.save_pretrained(model, best_state, "runs/loop/best")
tokenizer.save_pretrained("runs/loop/best")
print(ll.evaluate(eval_step, best_state, eval_batches))
