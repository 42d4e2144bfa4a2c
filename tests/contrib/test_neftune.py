"""NEFTune against transformers' own."""

import copy

import pytest
import torch
from torch import nn
from transformers.integrations.neftune import neftune_post_forward_hook

import looplib as ll
from looplib.contrib import neftune

TOKENS = torch.arange(12).view(2, 6) % 9


def forward(model, batch):
    return model(batch).square().mean()


def test_the_noise_has_the_bits_of_transformers():
    for length, width, alpha in [(6, 4, 5.0), (7, 11, 10.0), (13, 3, 0.3), (16, 64, 15.0)]:
        embedding = nn.Embedding(9, width)
        theirs = copy.deepcopy(embedding)
        theirs.neftune_noise_alpha = alpha
        theirs.register_forward_hook(neftune_post_forward_hook)
        tokens = torch.arange(2 * length).view(2, length) % 9
        torch.manual_seed(1)
        expected = theirs(tokens)
        torch.manual_seed(1)
        got = neftune(lambda model, tokens: model(tokens), lambda model: model, alpha)(embedding, tokens)
        assert torch.equal(got, expected)
        assert not torch.equal(got, embedding(tokens))


def test_steps_repeat_and_there_is_no_noise_in_evaluation():
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2))
    state, noisy = ll.init_state(model), neftune(forward, "0")
    assert torch.equal(*[ll.make_predict_step(model, loss_fn)(state, TOKENS) for loss_fn in (noisy, forward)])
    first, again, plain = (
        ll.make_grad_fn(model, loss_fn)(state, TOKENS).grads for loss_fn in (noisy, noisy, forward)
    )
    assert torch.equal(first["1.weight"], again["1.weight"])
    assert not torch.equal(first["1.weight"], plain["1.weight"])


def test_a_name_is_found_within_wrappers_and_the_hook_is_gone_afterwards():
    model = nn.Sequential(nn.Sequential(nn.Embedding(9, 4)))
    wrapped, embedding = nn.DataParallel(model), model[0][0]
    outputs = []
    for where in ("0.0", lambda model: model.module[0][0]):
        torch.manual_seed(1)
        outputs.append(neftune(lambda model, tokens: model(tokens), where)(wrapped, TOKENS))
    assert torch.equal(*outputs)

    def broken(model, batch):
        assert len(embedding._forward_hooks) == 1
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        neftune(broken, "0.0")(model, None)
    assert not embedding._forward_hooks
    with pytest.raises(ValueError, match=r"'wte'.*'0.0'"):
        neftune(forward, "wte")(model, None)
