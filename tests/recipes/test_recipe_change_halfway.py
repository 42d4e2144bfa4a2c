"""The run that is changed half way, beside a loop in plain PyTorch, and stopped before and after the change."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from shared import equal
from test_recipes import load
from torch.nn.functional import cross_entropy
from torch.nn.modules.module import register_module_forward_pre_hook

import looplib as ll

SMALL = {"steps": 60, "width": 16, "depth": 1, "save_every": 7, "log_every": 20}


def plain_loop():
    """Weights after 60 steps of torch's Muon, and of its Adam with the mean gradient of two steps."""
    recipe = load("change_halfway")
    torch.manual_seed(0)
    model, untied = recipe.Transformer(16, 1, tied=True), None
    data, _ = recipe.load_data()
    loaders = recipe.make_loaders(data, 20, seed=0)

    def optimizers(model):
        params = dict(model.named_parameters())
        matrices = [p for name, p in params.items() if name.startswith("blocks.") and p.ndim == 2]
        rest = [p for p in params.values() if not any(p is matrix for matrix in matrices)]
        muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.0)
        return muon, torch.optim.Adam(rest, lr=3e-3, betas=(0.9, 0.95), fused=True), rest

    muon, adam, rest = optimizers(model)
    for step in range(60):
        if step == 40:
            untied = recipe.Transformer(16, 1, tied=False)
            untied.load_state_dict(model.state_dict())  # which has the head's weight as well
            old, (moments, others) = dict(model.named_parameters()), (muon.state, adam.state)
            muon, adam, rest = optimizers(untied)
            for name, p in untied.named_parameters():
                before = old["bytes.weight" if name == "head.weight" else name]
                of = muon if before in moments else adam
                of.state[p] = copy.deepcopy((moments if before in moments else others)[before])
            model = untied
        if step % 20 == 0:
            batches = iter(loaders[step // 20](ll.TrainState(epoch=step // 20)))
        inputs, targets = next(batches)
        for optimizer, peak in ((muon, 0.02), (adam, 3e-3)):
            optimizer.param_groups[0]["lr"] = recipe.rate(peak, 60)(step)
        muon.zero_grad()
        if step % 2 == 0:
            adam.zero_grad()
        cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        muon.step()
        if step % 2:
            for p in rest:
                p.grad /= 2
            adam.step()
    return dict(model.named_parameters())


def stopped(folder, calls):
    """Run the recipe until a pass in training has begun so many times, as Ctrl-C does."""

    def count(module, inputs):
        nonlocal calls
        if type(module).__name__ == "Transformer" and module.training:
            calls -= 1
            if not calls:
                raise KeyboardInterrupt

    hook = register_module_forward_pre_hook(count)
    try:
        load("change_halfway").main(**SMALL, directory=str(folder))
    except KeyboardInterrupt:
        pass
    finally:
        hook.remove()


# Often: at step 5, at 40 with the head just untied, and at 47.
@pytest.mark.slow
@pytest.mark.parametrize("runs", [{"often": (6, 36, 8)}, {"never": (), "often": (6, 36, 8)}], ids=["often", "both"])
def test_it_has_the_bits_of_a_plain_loop_whether_it_is_stopped_before_or_after_the_change(tmp_path, runs):
    expected = plain_loop()
    for name, stops in runs.items():
        for calls in stops:
            stopped(tmp_path / name, calls)
        load("change_halfway").main(**SMALL, directory=str(tmp_path / name))
        ckpt = ll.checkpoint_io(tmp_path / name / "checkpoints")
        weights = load_file(ckpt.latest().path / "tensors.safetensors")
        found = {path.removeprefix("/params/"): each for path, each in weights.items() if path.startswith("/params/")}
        assert equal(found, expected)
        assert not torch.equal(found["head.weight"], found["bytes.weight"])
    first, *others = (ll.log.read_columns(tmp_path / name / "log.jsonl") for name in runs)
    assert first["step"] == [20, 40, 60]
    for columns in others:
        assert columns["step"] == first["step"]
        assert columns["train/loss"] == first["train/loss"]
