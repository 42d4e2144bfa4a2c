"""The repr of what looplib makes is the code that made it; signatures show no sentinels."""

import functools
import inspect
import re

import pytest
import torch
from public import public_names
from torch import nn
from torch.optim import SGD, AdamW
from torch.utils.data import TensorDataset

import looplib as ll

MODEL = nn.Linear(2, 1)
DATA = TensorDataset(torch.ones(8, 2))


def loss_fn(model, batch):
    return model(batch).square().mean()


def metric_fn(model, batch):
    return {"loss": loss_fn(model, batch)}


def chosen(name, tensor):
    return tensor.ndim < 2


def halved_part(grads, state, params, step):
    return ll.types.Transformed({name: grad / 2 for name, grad in grads.items()})


def days(epoch, generator):
    return [epoch % 3, 5, 6, 7]


# In a repr a module and a dataset are the name of their class.
NAMES = {name: value for name, value in globals().items() if name in ("SGD", "AdamW", "torch", "ll")}
NAMES |= {function.__name__: function for function in (loss_fn, metric_fn, chosen, days, halved_part)}
NAMES |= {"Linear": MODEL, "ReLU": nn.ReLU, "TensorDataset": DATA, "range": range(8)}

OPTIMIZERS = [
    "ll.optimizer(AdamW, lr=0.001)",
    "ll.optimizer(AdamW, lr=0.001, betas=(0.9, 0.95), fused=False)",
    "ll.optimizer(AdamW, lr=0.001, groups=[(chosen, {'weight_decay': 0.0})])",
    "ll.optimizer(SGD, lr=ll.warmup_cosine(peak=0.001, warmup=10, total=100, final=0.0))",
    "ll.chain(ll.optimizer(AdamW, lr=0.001), ll.ema(0.9))",
    "ll.chain(ll.optimizer(AdamW, lr=0.001), ('fast', ll.ema(0.5)), ('slow', ll.ema(0.999, every=2)))",
    "ll.chain(ll.optimizer(AdamW, lr=0.001), ll.optim.swa(start=10))",
    "ll.chain(ll.skip_nonfinite(max_consecutive=3), ll.optimizer(SGD, lr=0.1))",
    "ll.chain(ll.optim.dynamic_loss_scale(1024.0, growth_interval=100), ll.optimizer(AdamW, lr=0.001))",
    "ll.chain(ll.skip_nonfinite(), ll.clip_by_global_norm(1.0), ll.optimizer(SGD, lr=0.1))",
    "ll.chain(ll.optim.clip_by_value(0.5), ll.optim.clip_by_norm(1.0, norm_type=1), ll.optimizer(SGD, lr=0.1))",
    "ll.optim.partition({'a': ll.optimizer(AdamW, lr=0.001)}, chosen)",
    "ll.optim.own_steps(ll.optim.every(ll.optimizer(SGD, lr=0.1), 2, gradients='last'))",
    "ll.optim.offload_state(ll.optimizer(AdamW, lr=0.001), buffer_bytes=1000000)",
    "ll.optim.part('own', transform=halved_part)",
]
GRAD_FN = "ll.make_grad_fn(Linear, loss_fn)"
GRAD_FNS = [
    GRAD_FN,
    "ll.make_grad_fn(Linear, ll.autocast(ll.losses.recompute(loss_fn, ReLU), torch.float16))",
    "ll.make_grad_fn(Linear, loss_fn, trainable=chosen, allow_unused=True)",
    f"ll.accumulate(ll.accumulate({GRAD_FN}, microbatches=4), size=4)",
    f"ll.accumulate({GRAD_FN}, microbatches=4, dtype=torch.float32)",
    f"ll.grads.reduce_gradients({GRAD_FN})",
    f"ll.contrib.sam({GRAD_FN}, 0.1, adaptive=True)",
    "ll.contrib.add_noise(ll.contrib.clip_per_sample(ll.contrib.make_per_sample_grad_fn(Linear, loss_fn), 1.0), 1.0, 1.1)",
    "ll.contrib.make_contrastive_grad_fn(Linear, loss_fn, loss_fn, microbatches=2)",
]
STEP = f"ll.make_train_step({GRAD_FN}, ll.optimizer(AdamW, lr=0.001))"
STEPS = [
    STEP,
    f"ll.make_train_step({GRAD_FN}, ll.chain(ll.optimizer(AdamW, lr=0.001), ll.ema(0.9)), donate=True)",
    f"ll.compile_step({STEP}, backend='eager')",
    f"ll.vmap_step({STEP}, own_batches=True)",
    f"ll.transforms.differentiable({STEP})",
    "ll.make_eval_step(Linear, metric_fn)",
    "ll.evaluation.split_on_oom(ll.make_predict_step(Linear, loss_fn), size=4)",
]
LOADERS = [
    "ll.make_loader(TensorDataset, batch_size=4)",
    "ll.make_loader(TensorDataset, batch_size=4, seed=3, drop_last=True, max_batches=1)",
    "ll.make_loader(TensorDataset, batch_size=4, order=ll.data.sequential())",
    "ll.make_loader(range, batch_size=2, order=ll.data.sampler(days))",
    "ll.make_loader(TensorDataset, order=ll.data.growing({0: 2, 9: 4}, order=ll.data.with_replacement(num_samples=7)))",
]
SCHEDULES_AND_PREDICATES = [
    "warmup_cosine(peak=0.001, warmup=10, total=100, final=0.0)",
    "step_decay(start=0.1, every=3, factor=0.5)",
    "((every_n_steps(500) & ~at_epoch_end()) | at_step(1))",
    "every_n_steps(5).between(8, 25)",
]


def code_of(thing):
    """The repr without what a comment adds: the kernel, the number of batches."""
    return repr(thing).partition("  # ")[0]


@pytest.mark.parametrize("codes", [OPTIMIZERS, GRAD_FNS, STEPS, LOADERS])
def test_the_repr_is_the_code_that_made_it(codes):
    for code in codes:
        assert code_of(eval(code, NAMES)) == code


def test_what_holds_files_or_a_bar_is_shown_with_what_it_was_made_of(tmp_path):
    assert repr(ll.checkpoint_io(tmp_path)) == f"CheckpointIO({str(tmp_path)!r})"
    assert repr(ll.progress(len, epochs=3)) == "ll.progress(len, epochs=3)"


def test_schedules_and_predicates_read_as_code():
    for code in SCHEDULES_AND_PREDICATES:
        assert repr(eval(code, {**vars(ll.schedules), **vars(ll.predicates)})) == code


def test_comments_say_what_code_does_not():
    assert repr(ll.make_loader(DATA, batch_size=3)).endswith("  # 3 batches")
    adamw = ll.optimizer(AdamW, lr=0.1)
    clipped = ll.chain(ll.clip_by_global_norm(1.0), adamw)
    for optimizer in (adamw, clipped, ll.optim.every(clipped, 2), ll.optim.own_steps(adamw)):
        assert repr(optimizer).count("  # kernel: fused") == 1


def test_an_optimizer_with_an_update_of_ones_own_does_not_claim_to_be_the_inner_one():
    inner = ll.optimizer(SGD, lr=0.1)

    def nothing(grads, state, params, step):
        return params, state

    own = ll.optim.part("nothing", init=inner.init, update_=nothing, role="weights")
    assert repr(own) == "ll.optim.part('nothing', init=init, update_=nothing, role='weights')"
    assert repr(ll.types.Optimizer({"SGD": own.parts["nothing"]})) == "Optimizer(SGD)"


def test_functions_of_ones_own_within_a_step_are_shown_by_their_names():
    inner = ll.make_grad_fn(MODEL, loss_fn)

    def halved(state, batch, **request):
        return inner(state, batch, **request)

    optimizer = ll.optimizer(SGD, lr=lambda step: 0.1)
    step = ll.make_train_step(halved, optimizer)
    assert repr(step) == "ll.make_train_step(halved, ll.optimizer(SGD, lr=lambda step: ...))"
    # A step is an ordinary function.
    assert type(step).__name__ == "function"  # in error messages
    assert list(inspect.signature(step).parameters) == ["state", "batch"]
    state, metrics = step(ll.init_state(MODEL, optimizer), batch=torch.ones(4, 2))
    assert state.step == 1
    assert list(metrics) == ["loss"]


def test_a_copy_by_functools_is_not_taken_for_the_function():
    sharp = ll.contrib.sam(ll.make_grad_fn(MODEL, loss_fn))

    @functools.wraps(sharp)
    def copied(state, batch, **request):
        return sharp(state, batch, **request)

    assert "ll.contrib.sam" in repr(ll.accumulate(sharp, 2))
    assert "ll.contrib.sam" not in repr(ll.accumulate(copied, 2))
    for grad_fn in (sharp, copied):  # and what it wraps acts as it does alone
        with pytest.raises(ValueError, match="sam within accumulate"):
            ll.accumulate(grad_fn, 2)(ll.init_state(MODEL), torch.ones(4, 2))


def test_signatures_show_no_sentinels():
    for name, value in public_names().items():
        if inspect.isfunction(value):
            assert not re.search(r"inspect\._empty|object at 0x|<class|<\w+\.", str(inspect.signature(value))), name
