"""A tiny GPT-2, trained by `transformers.Trainer` and by looplib on the very same batches."""

import functools
import tempfile

import pytest
import torch
from shared import InDouble
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import looplib as ll

PIECES, EXAMPLES, EPOCHS = 4, 3, 2
MICROBATCHES = 30  # in an epoch: seven windows of four and one of two, whose last microbatch has two samples
STEPS = 16
PEAK, WARMUP, MAX_NORM, DECAY = 3e-3, 5, 1.2, 0.1


def gpt2():
    torch.manual_seed(0)
    sizes = {"vocab_size": 100, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **dropouts, bos_token_id=0, eos_token_id=0)).double()
    # GPT2LMHeadModel comes without one, and then the Trainer counts first tokens as well, which are never predicted.
    model.loss_type = "ForCausalLM"
    return model


def texts():
    """(tokens, length of the prompt, which is not learned). Without a prompt the first token is not learned."""
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randint, generator=generator)
    lengths = [int(draw(4, 17, ())) for _ in range(MICROBATCHES * EXAMPLES - 1)]
    return [(draw(0, 100, (length,)), int(draw(0, length - 1, ()))) for length in lengths]


def collate(examples):
    width = max(len(tokens) for tokens, _ in examples)
    ids = torch.zeros(len(examples), width, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, (tokens, prompt) in enumerate(examples):
        ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
        labels[row, prompt : len(tokens)] = tokens[prompt:]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def by_trainer():
    """The parameters, the log, and the examples of each micro-batch in the Trainer's own order."""
    model, seen = gpt2(), []

    def recording(examples):
        seen.append(examples)
        return collate(examples)

    with tempfile.TemporaryDirectory() as directory:
        args = TrainingArguments(
            directory,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_pin_memory=False,
            logging_steps=1,
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=EXAMPLES,
            gradient_accumulation_steps=PIECES,
            optim="adamw_torch_fused",
            learning_rate=PEAK,
            lr_scheduler_type="linear",
            warmup_steps=WARMUP,
            weight_decay=DECAY,
            max_grad_norm=MAX_NORM,
        )
        trainer = Trainer(model, args, train_dataset=texts(), data_collator=recording)
        with InDouble():
            trainer.train()
    log = [record for record in trainer.state.log_history if "loss" in record]
    assert (len(log), len(seen)) == (STEPS, MICROBATCHES * EPOCHS)
    return {name: tensor.detach() for name, tensor in model.named_parameters()}, log, seen


def predictions(model, batch):
    """Logits and targets of the tokens that are learned."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    targets = batch["labels"][:, 1:]
    learned = targets != -100
    return logits[learned], targets[learned]


def token_loss(model, batch):
    logits, targets = predictions(model, batch)
    return ll.Mean(F.cross_entropy(logits, targets, reduction="sum"), len(targets))


def by_looplib(batches):
    model = gpt2()
    adamw = ll.optimizer(
        torch.optim.AdamW,
        lr=ll.schedules.warmup_linear(PEAK, warmup=WARMUP, total=STEPS),
        weight_decay=DECAY,
        groups=[(lambda name, tensor: tensor.ndim < 2, {"weight_decay": 0.0})],
    )
    optimizer = ll.chain(ll.clip_by_global_norm(MAX_NORM), adamw)
    train_step = ll.make_train_step(ll.accumulate(ll.make_grad_fn(model, token_loss)), optimizer, donate=True)
    state, log = ll.init_state(model, optimizer), []
    with InDouble():
        for batch in batches:
            state, metrics = train_step(state, batch)
            log.append(ll.compute(metrics))
    return state.params, log


@pytest.mark.slow
def test_the_trainers_average_over_tokens_is_accumulate_with_a_mean():
    params, log, seen = by_trainer()
    pieces = [collate(examples) for examples in seen]
    epochs = [pieces[first : first + MICROBATCHES] for first in range(0, len(pieces), MICROBATCHES)]
    windows = [epoch[first : first + PIECES] for epoch in epochs for first in range(0, MICROBATCHES, PIECES)]
    found, metrics = by_looplib(windows)
    torch.testing.assert_close(dict(found), params, rtol=1e-9, atol=1e-11)
    for row, expected in zip(metrics, log, strict=True):  # which the Trainer adds up in float32
        assert (row["loss"], row["grad_norm"]) == pytest.approx((expected["loss"], expected["grad_norm"]), rel=1e-6)
