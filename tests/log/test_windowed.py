"""Means over a window of steps, by a sink that is called with the metrics of each."""

import torch
from torch import nn

import looplib as ll


def test_it_logs_what_a_window_logs():
    model, optimizer = nn.Linear(3, 1), ll.optimizer(torch.optim.SGD, lr=0.1)
    train_step = ll.make_train_step(ll.make_grad_fn(model, lambda model, x: model(x).square().mean()), optimizer)
    loader = ll.make_loader(torch.randn(23, 3), batch_size=4)
    rows, expected, window, now = [], [], ll.Window(), ll.every_n_steps(4)
    log_metrics, log = ll.log.windowed(ll.log.record(rows), now, prefix="train/"), ll.log.record(expected)
    state, done = ll.init_state(model, optimizer, epoch_length=len(loader)), ll.after_epochs(2)
    while not done(state):
        for batch in loader(state):
            state, metrics = train_step(state, batch)
            log_metrics(state, metrics)
            window = window.add(metrics)
            if now(state):
                log(state, ll.compute(window.metrics(), prefix="train/"))
                window = ll.Window()
    assert [row["step"] for row in rows] == [4, 8, 12]
    assert rows == expected
