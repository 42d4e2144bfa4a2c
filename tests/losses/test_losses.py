"""Losses of language models against torch's cross-entropy in float64, transformers' own, and whole batches."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from shared import SGD, both_steps
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import looplib as ll
from looplib.losses import next_token_loss


def numbers(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def labels_of(batch, length, vocabulary, seed=0):
    return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def plain(logits, labels, shift, ignore_index, smoothing):
    """The definition, with nothing but `log_softmax` from torch's losses."""
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    logits, labels = logits.flatten(0, 1), labels.flatten()
    valid = labels != ignore_index
    logits, labels = logits[valid], labels[valid]
    return F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing), valid.sum()


# Against others


@st.composite
def cases(draw):
    batch, length = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    vocabulary, width = draw(st.integers(2, 9)), draw(st.integers(1, 5))
    ignore_index = draw(st.sampled_from([-100, -1, 0, 1]))
    ignored = draw(st.lists(st.booleans(), min_size=batch * length, max_size=batch * length))
    labels = labels_of(batch, length, vocabulary, draw(st.integers(0, 99)))
    labels = labels.masked_fill(torch.tensor(ignored).view(batch, length), ignore_index)
    return labels, vocabulary, width, draw(st.booleans()), ignore_index, draw(st.sampled_from([0.0, 0.1, 1.0]))


@given(cases(), st.integers(1, 30), st.booleans(), st.sets(st.sampled_from(["hidden", "weight", "bias"])))
def test_it_is_torchs_cross_entropy_with_its_gradients(case, chunk_size, with_bias, frozen):
    labels, vocabulary, width, shift, ignore_index, smoothing = case
    tensors = {"hidden": numbers(*labels.shape, width), "weight": numbers(vocabulary, width, seed=1)}
    if with_bias:
        tensors["bias"] = numbers(vocabulary, seed=2)
    leaves = [tensor.requires_grad_() for name, tensor in tensors.items() if name not in frozen]
    bias = tensors.get("bias")
    head = nn.Linear(width, vocabulary).requires_grad_(False) if with_bias else tensors["weight"]
    if with_bias:
        del head.weight, head.bias
        head.weight, head.bias = tensors["weight"], bias
    logits = F.linear(tensors["hidden"], tensors["weight"], bias)
    true, weight = plain(logits, labels, shift, ignore_index, smoothing)
    options = {"shift": shift, "ignore_index": ignore_index, "label_smoothing": smoothing}
    of_logits = next_token_loss(logits, labels, **options)
    of_head = next_token_loss(tensors["hidden"], labels, head=head, chunk_size=chunk_size, **options)
    for loss in (of_logits, of_head):
        assert loss.weight == weight
        torch.testing.assert_close(loss.total, true, rtol=1e-12, atol=1e-12)
        assert loss.total.requires_grad == bool(leaves)
        if leaves:
            theirs = torch.autograd.grad(3 * true, leaves, retain_graph=True)
            ours = torch.autograd.grad(3 * loss.total, leaves, retain_graph=True)
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_chunks_have_the_numbers_of_the_logits_path(dtype, hidden_dtype):
    hidden = numbers(2, 9, 8, dtype=hidden_dtype).requires_grad_()
    head, labels = nn.Linear(8, 33), labels_of(2, 9, 33)
    leaves = [hidden, *head.parameters()]
    with torch.autocast("cpu", dtype=dtype):
        whole = next_token_loss(head(hidden), labels)
        chunks = [next_token_loss(hidden, labels, head=head, chunk_size=size) for size in (1024, 4)]
    theirs = torch.autograd.grad(whole.total, leaves)
    for loss in chunks:
        assert loss.total.dtype == torch.float32
        torch.testing.assert_close(loss.total, whole.total, rtol=1e-6, atol=0)
        torch.testing.assert_close(torch.autograd.grad(loss.total, leaves), theirs, rtol=2**-6, atol=2**-6)


@pytest.mark.slow
def test_a_bfloat16_weight_adds_its_gradient_up_in_float32():
    hidden, labels = torch.full((1, 4096, 1), 1.0, dtype=torch.bfloat16), torch.zeros(1, 4096, dtype=torch.int64)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    loss = next_token_loss(hidden, labels, head=weight, shift=False, chunk_size=1)
    (grad,) = torch.autograd.grad(loss.total, weight)
    assert grad.dtype == torch.bfloat16
    # half of each token, which bfloat16 stops adding at 128
    assert grad.flatten().tolist() == [-2048.0, 2048.0]


# Memory


class Largest(TorchDispatchMode):
    """Remembers the most elements that a new tensor had."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if all(result.alias_info is None for result in func._schema.returns):  # else a view, or written in place
            sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
            self.elements = max([self.elements, *sizes])
        return out


def largest(function):
    with Largest() as seen:
        function()
    return seen.elements


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_is_larger_than_a_chunk_of_logits_or_the_head(dtype):
    hidden, weight = numbers(4, 16, 4, dtype=dtype).requires_grad_(), numbers(97, 4, dtype=dtype).requires_grad_()

    def loss(chunk_size, head=weight, **options):
        return next_token_loss(hidden, labels_of(4, 16, 97), head=head, chunk_size=chunk_size, **options).total

    for chunk_size, elements in ((10, 10 * 97), (3, 97 * 4), (1000, 64 * 97)):
        assert largest(lambda: loss(chunk_size, label_smoothing=0.1).backward()) == elements  # noqa: B023
    with torch.no_grad():  # no gradient is made where none is asked for
        assert largest(lambda: loss(2)) == 2 * 97
    assert largest(lambda: loss(2, weight.detach()).backward()) == hidden.numel()  # nor one of a frozen head


@pytest.mark.slow
@both_steps
def test_a_compiled_step_takes_chunks_too(donate):
    tokens, ends = labels_of(4, 6, 11), []
    model = nn.ModuleList([nn.Embedding(11, 8), nn.Linear(8, 11)])

    def by_logits(model, tokens):
        return next_token_loss(model[1](model[0](tokens)), tokens)

    def by_head(model, tokens):
        return next_token_loss(model[0](tokens), tokens, head=model[1], chunk_size=5)

    for loss_fn in (by_logits, by_head):
        step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), SGD, donate=donate)
        step = step if loss_fn is by_logits else ll.compile_step(step, backend="eager")
        ends.append(step(ll.copy_state(ll.init_state(model, SGD)), tokens)[0].params)
    torch.testing.assert_close(dict(ends[1]), dict(ends[0]), rtol=1e-5, atol=1e-6)


# Errors


def test_what_does_not_fit_is_said_with_its_shape():
    inputs, labels = torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64)
    for arguments, options, named in (
        ((inputs[0], labels), {}, r"\(3, 4\).*\(batch, length, vocabulary\)"),
        ((inputs, labels[:, :2]), {}, r"labels .*\(2, 2\) and dtype torch.int64; .*\(2, 3, 4\)"),
        ((inputs, labels.int()), {}, r"torch\.int32"),
        ((inputs, labels), {"head": nn.Linear(5, 6)}, r"head .*\(6, 5\).*\(2, 3, 4\).*\(vocabulary, 4\)"),
        ((inputs, labels), {"chunk_size": 0}, "chunk_size"),
        ((inputs, labels), {"label_smoothing": -0.1}, "label_smoothing is -0.1"),
        ((inputs, labels), {"label_smoothing": 1.5}, "label_smoothing is 1.5"),
    ):
        with pytest.raises(ValueError, match=named):
            next_token_loss(*arguments, **options)
    for arguments in ((None, labels), (inputs, None)):
        with pytest.raises(TypeError, match=r"(inputs|labels) are None"):
            next_token_loss(*arguments)
    with pytest.raises(TypeError, match="Embedding"):
        next_token_loss(inputs, labels, head=nn.Embedding(5, 4))


class CappedLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x).tanh()


def with_a_hook():
    head = nn.Linear(4, 5)
    head.register_forward_hook(lambda module, args, logits: logits.tanh())
    return head


@pytest.mark.parametrize("make", [lambda: CappedLinear(4, 5), with_a_hook, lambda: spectral_norm(nn.Linear(4, 5))])
def test_a_head_that_computes_something_else_than_its_weight_says_is_refused(make):
    with pytest.raises(TypeError, match=r"forward hooks of its own.*give the logits"):
        next_token_loss(torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64), head=make())


def test_a_head_with_a_parametrized_weight_gives_the_loss_of_its_logits():
    head, inputs, labels = (
        parametrizations.weight_norm(nn.Linear(4, 5)),
        torch.randn(2, 3, 4),
        torch.ones(2, 3).long(),
    )
    torch.testing.assert_close(next_token_loss(inputs, labels, head=head), next_token_loss(head(inputs), labels))
