"""Losses of language models against torch's cross-entropy in float64, transformers' own, and whole batches."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.integrations.neftune import neftune_post_forward_hook

import looplib as ll
from looplib.contrib import neftune
from looplib.losses import next_token_loss

quick = settings(deadline=None, max_examples=100)


def numbers(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def labels_of(batch, length, vocabulary, seed=0):
    return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def plain(logits, labels, shift, ignore_index, smoothing, z):
    """The definition, with nothing but `log_softmax` from torch's losses."""
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    logits, labels = logits.flatten(0, 1), labels.flatten()
    valid = labels != ignore_index
    logits, labels = logits[valid], labels[valid]
    total = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
    return total + z * (logits.exp().sum(-1).log() ** 2).sum(), valid.sum()


def tiny_gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=31, n_positions=16, n_embd=8, n_layer=2, n_head=2))


# Against others


@st.composite
def cases(draw):
    batch, length = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    vocabulary, width = draw(st.integers(2, 9)), draw(st.integers(1, 5))
    ignore_index = draw(st.sampled_from([-100, -1, 0, 1]))
    ignored = draw(st.lists(st.booleans(), min_size=batch * length, max_size=batch * length))
    labels = labels_of(batch, length, vocabulary, draw(st.integers(0, 99)))
    labels = labels.masked_fill(torch.tensor(ignored).view(batch, length), ignore_index)
    smoothing, z = draw(st.sampled_from([0.0, 0.1, 1.0])), draw(st.sampled_from([0.0, 1e-2]))
    return labels, vocabulary, width, draw(st.booleans()), ignore_index, smoothing, z


@quick
@given(cases(), st.integers(1, 30), st.booleans(), st.sets(st.sampled_from(["hidden", "weight", "bias"])))
def test_it_is_torchs_cross_entropy_with_its_gradients(case, chunk_size, with_bias, frozen):
    labels, vocabulary, width, shift, ignore_index, smoothing, z = case
    tensors = {"hidden": numbers(*labels.shape, width), "weight": numbers(vocabulary, width, seed=1)}
    if with_bias:
        tensors["bias"] = numbers(vocabulary, seed=2)
    leaves = [tensor.requires_grad_() for name, tensor in tensors.items() if name not in frozen]
    bias = tensors.get("bias")
    logits = F.linear(tensors["hidden"], tensors["weight"], bias)
    true, weight = plain(logits, labels, shift, ignore_index, smoothing, z)
    options = {"shift": shift, "ignore_index": ignore_index, "label_smoothing": smoothing, "z_loss": z}
    of_logits = next_token_loss(logits, labels, **options)
    of_head = next_token_loss(
        tensors["hidden"], labels, head=tensors["weight"], bias=bias, chunk_size=chunk_size, **options
    )
    for loss in (of_logits, of_head):
        assert loss.weight == weight
        torch.testing.assert_close(loss.total, true, rtol=1e-12, atol=1e-12)
        assert loss.total.requires_grad == bool(leaves)
        if leaves:
            theirs = torch.autograd.grad(3 * true, leaves, retain_graph=True)
            ours = torch.autograd.grad(3 * loss.total, leaves, retain_graph=True)
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_without_a_valid_token_all_is_zero():
    hidden, head = numbers(2, 3, 4).requires_grad_(), nn.Linear(4, 5, dtype=torch.float64)
    for labels in (torch.full((2, 3), -100), labels_of(2, 3, 5)[:, :1]):
        inputs = hidden[:, : labels.shape[1]]
        for loss in (next_token_loss(inputs, labels, head=head), next_token_loss(head(inputs), labels)):
            assert loss.total == 0
            assert loss.weight == 0
            for grad in torch.autograd.grad(loss.total, [hidden, *head.parameters()]):
                assert torch.equal(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("by_head", [False, True])
def test_it_is_the_loss_of_transformers(by_head):
    model = tiny_gpt2().eval().double()  # whose head is tied to its embedding
    tokens = labels_of(3, 12, 31)
    labels = tokens.masked_fill(tokens % 5 == 0, -100)
    logits = model(tokens).logits
    # theirs is in float32, so that its gradient is compared with that of torch's own in float64 besides
    torch.testing.assert_close(
        model(tokens, labels=labels).loss.double(),
        F.cross_entropy(logits[:, :-1].mT, labels[:, 1:]),
        rtol=1e-6,
        atol=0,
    )
    theirs = torch.autograd.grad(F.cross_entropy(logits[:, :-1].mT, labels[:, 1:]), list(model.parameters()))

    def loss_fn(model, batch):
        if by_head:
            hidden = model.transformer(batch["tokens"]).last_hidden_state
            return next_token_loss(hidden, batch["labels"], head=model.lm_head, chunk_size=7)
        return next_token_loss(model(batch["tokens"]).logits, batch["labels"])

    # in eval mode throughout, for dropout
    loss = loss_fn(model, {"tokens": tokens, "labels": labels})
    ours = torch.autograd.grad(loss.total / loss.weight, list(model.parameters()))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_one_chunk_has_the_bits_of_the_logits_path(dtype, hidden_dtype):
    hidden = numbers(2, 9, 8, dtype=hidden_dtype).requires_grad_()
    head, labels = nn.Linear(8, 33), labels_of(2, 9, 33)
    leaves = [hidden, *head.parameters()]
    with torch.autocast("cpu", dtype=dtype):
        whole = next_token_loss(head(hidden), labels)
        chunked = next_token_loss(hidden, labels, head=head)
        pieces = next_token_loss(hidden, labels, head=head, chunk_size=4)
    for loss in (chunked, pieces):
        assert loss.total.dtype == torch.float32
        torch.testing.assert_close(loss.total, whole.total, rtol=1e-6, atol=0)
    reference = torch.autograd.grad(whole.total, leaves)
    for loss in (chunked, pieces):
        for ours, theirs in zip(torch.autograd.grad(loss.total, leaves), reference, strict=True):
            assert ours.dtype == theirs.dtype
            torch.testing.assert_close(ours, theirs, rtol=2**-6, atol=2**-6)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("chunk_size", "largest"), [(10, 10 * 97), (3, 97 * 4), (1000, 64 * 97)])
def test_no_tensor_is_larger_than_a_chunk_of_logits_or_the_head(dtype, chunk_size, largest):
    hidden, weight = numbers(4, 16, 4, dtype=dtype).requires_grad_(), numbers(97, 4, dtype=dtype).requires_grad_()
    with Largest() as seen:
        loss = next_token_loss(hidden, labels_of(4, 16, 97), head=weight, chunk_size=chunk_size, label_smoothing=0.1)
        loss.total.backward()
    assert seen.elements == largest
    with Largest() as seen, torch.no_grad():  # and no gradient is made where none is asked for
        next_token_loss(hidden, labels_of(4, 16, 97), head=weight, chunk_size=2)
    assert seen.elements == 2 * 97
    with Largest() as seen:  # nor one of a frozen head
        next_token_loss(hidden, labels_of(4, 16, 97), head=weight.detach(), chunk_size=2).total.backward()
    assert seen.elements == hidden.numel()


@pytest.mark.parametrize("donate", [False, True])
def test_a_compiled_step_takes_chunks_too(donate):
    tokens, ends = labels_of(4, 6, 11), []
    model = nn.ModuleList([nn.Embedding(11, 8), nn.Linear(8, 11)])
    optimizer = ll.optimizer(torch.optim.SGD, lr=0.1)

    def by_logits(model, tokens):
        return next_token_loss(model[1](model[0](tokens)), tokens, z_loss=1e-2)

    def by_head(model, tokens):
        return next_token_loss(model[0](tokens), tokens, head=model[1], z_loss=1e-2, chunk_size=5)

    for loss_fn in (by_logits, by_head):
        step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer, donate=donate)
        step = step if loss_fn is by_logits else ll.compile_step(step, backend="eager")
        ends.append(step(ll.copy_state(ll.init_state(model, optimizer)), tokens)[0].params)
    torch.testing.assert_close(dict(ends[1]), dict(ends[0]), rtol=1e-5, atol=1e-6)


# Errors


@pytest.mark.parametrize(
    ("inputs", "labels", "options", "message"),
    [
        ((2, 3), (2, 3), {}, r"inputs have shape \(2, 3\).*\(batch, length, vocabulary\)"),
        ((2, 3, 4), (2, 4), {}, r"labels have shape \(2, 4\) and dtype torch.int64; inputs of shape \(2, 3, 4\)"),
        ((2, 3, 4), (2, 3), {"bias": (4,)}, "a bias without a head"),
        ((2, 3, 4), (2, 3), {"head": (5, 3)}, r"weight has shape \(5, 3\); .* need \(vocabulary, 4\)"),
        (
            (2, 3, 4),
            (2, 3),
            {"head": (5, 4), "bias": (4,)},
            r"bias has shape \(4,\); a head of \(5, 4\) needs \(5,\)",
        ),
        ((2, 3, 4), (2, 3), {"label_smoothing": 1.5}, "label_smoothing=1.5"),
        ((2, 3, 4), (2, 3), {"chunk_size": 0}, "chunk_size=0"),
    ],
)
def test_what_does_not_fit_is_said_with_its_shape(inputs, labels, options, message):
    options = {name: torch.zeros(value) if isinstance(value, tuple) else value for name, value in options.items()}
    with pytest.raises(ValueError, match=message):
        next_token_loss(torch.zeros(inputs), torch.zeros(labels, dtype=torch.int64), **options)


def test_labels_and_heads_of_other_kinds_are_refused():
    inputs, labels = torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"dtype torch\.int32"):
        next_token_loss(inputs, labels.int())
    with pytest.raises(ValueError, match="bias"):
        next_token_loss(inputs, labels, head=nn.Linear(4, 5), bias=torch.zeros(5))
    with pytest.raises(TypeError, match="Embedding"):
        next_token_loss(inputs, labels, head=nn.Embedding(5, 4))


# NEFTune


def forward(model, batch):
    return model(batch).square().mean()


def test_the_noise_has_the_bits_of_transformers():
    for length, width, alpha in [(6, 4, 5.0), (7, 11, 10.0), (13, 3, 0.3), (16, 64, 15.0)]:
        embedding = nn.Embedding(9, width)
        theirs = copy.deepcopy(embedding)
        theirs.neftune_noise_alpha = alpha
        theirs.register_forward_hook(neftune_post_forward_hook)
        tokens = labels_of(2, length, 9)
        torch.manual_seed(1)
        expected = theirs(tokens)
        torch.manual_seed(1)
        got = neftune(lambda model, tokens: model(tokens), lambda model: model, alpha)(embedding, tokens)
        assert torch.equal(got, expected)
        assert not torch.equal(got, embedding(tokens))


def test_a_name_finds_the_embedding_within_wrappers():
    wrapped, tokens = nn.DataParallel(tiny_gpt2()), labels_of(2, 5, 31)
    outputs = []
    for where in ("transformer.wte", lambda model: model.module.transformer.wte):
        torch.manual_seed(1)
        outputs.append(neftune(lambda model, tokens: model(tokens).logits, where)(wrapped, tokens))
    assert torch.equal(*outputs)


def test_there_is_no_noise_in_evaluation_and_steps_repeat():
    model, tokens = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2)), labels_of(2, 6, 9)
    noisy, state = neftune(forward, "0"), ll.init_state(model)

    def metric_fn(loss_fn):
        return lambda model, batch: {"loss": ll.Mean(loss_fn(model, batch))}

    scores = [ll.make_eval_step(model, metric_fn(f))(state, tokens)["loss"].total for f in (noisy, forward)]
    assert torch.equal(*scores)
    grads = [ll.make_grad_fn(model, f)(state, tokens).grads["1.weight"] for f in (noisy, noisy, forward)]
    assert torch.equal(grads[0], grads[1])
    assert not torch.equal(grads[0], grads[2])


def test_the_hook_is_gone_afterwards_and_after_an_error():
    model = nn.Sequential(nn.Embedding(9, 4))

    def broken(model, batch):
        assert len(model[0]._forward_hooks) == 1
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        neftune(broken, "0")(model, None)
    neftune(forward, "0")(model, labels_of(2, 6, 9))
    assert not model[0]._forward_hooks


def test_an_unknown_name_is_told_with_the_embeddings_there_are():
    with pytest.raises(ValueError, match=r"'wte'.*'0'"):
        neftune(forward, "wte")(nn.Sequential(nn.Embedding(9, 4)), None)
