"""The recipe language_model: its data, and its loss beside that of whole logits."""

import pydoc_data.topics

import pytest
import torch
from test_recipes import load
from torch.nn import functional as F

import looplib as ll


@pytest.fixture
def recipe():
    return load("language_model")


def test_windows_hold_each_byte_of_the_documentation_once_as_a_label(recipe):
    train, test = (windows.tensors[0] for windows in recipe.load_data(64))
    text = "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items())).encode()
    cut = len(text) * 9 // 10
    for windows, part in ((train, text[:cut]), (test, text[cut:])):
        assert bytes(windows[:, 1:].flatten().tolist()) == part[1 : 1 + 64 * len(windows)]
        assert len(part) - 64 * len(windows) <= 64 + 1


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_its_loss_and_gradient_are_those_of_whole_logits(recipe, precision):
    torch.manual_seed(0)
    model = recipe.Transformer(16, 2, 2, 32, 0.0)
    batch = (torch.randint(0, 256, (4, 33)),)

    def whole(model, batch):
        logits = model.head(model(batch[0][:, :-1])).float()
        return F.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten())

    state, cast = ll.init_state(model), precision == "bfloat16"
    found = ll.accumulate(ll.make_grad_fn(model, ll.autocast(recipe.loss_fn, enabled=cast)), 2)(state, batch)
    expected = ll.make_grad_fn(model, ll.autocast(whole, enabled=cast))(state, batch)
    for name, grad in expected.grads.items():
        # bfloat16 has 8 bits, and gradients are sums of products that cancel
        torch.testing.assert_close(found.grads[name], grad, rtol=0, atol=2e-3 if cast else 1e-6)
