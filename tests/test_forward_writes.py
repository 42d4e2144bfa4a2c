"""In-place writes of a forward pass: made as in a raw loop by donated steps, refused by name in pure ones."""

import copy

import pytest
import torch
import torch.nn.functional as F
from problem import step_of
from shared import SGD, mean_square, one_report
from torch import nn

import looplib as ll

ROWS, OTHER_ROWS = torch.tensor([[0, 1], [2, 3]]), torch.tensor([[4, 5], [4, 5]])


class Renormed(nn.Module):
    """An embedding whose rows of a norm above 0.5 are shortened by each forward pass."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.embedding, self.linear = nn.Embedding(6, 3), nn.Linear(3, 1)
        with torch.no_grad():
            self.embedding.weight.mul_(10)

    def forward(self, rows):
        return self.linear(self.function(rows, self.embedding.weight, max_norm=0.5))


FUNCTIONS = [F.embedding, F.embedding_bag]


def loss_fn(model, batch):
    rows, factor = batch
    return model(rows).square().mean() * factor


def skipping(optimizer):
    return ll.chain(ll.skip_nonfinite(9), optimizer)


GOOD, BAD = (ROWS, torch.tensor(1.0)), (OTHER_ROWS, torch.tensor(torch.inf))


class Writer(nn.Module):
    """A model whose forward pass writes its weight in place: as a layer, or as published models do."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        if kind in ("Embedding", "EmbeddingBag"):
            self.layer = getattr(nn, kind)(6, 3, max_norm=0.5)
        elif kind == "F.embedding":
            self.layer = nn.Embedding(6, 3)
        else:
            self.layer = nn.Linear(3, 1)
        with torch.no_grad():
            self.layer.weight.mul_(10)

    def forward(self, x):
        weight = self.layer.weight
        match self.kind:
            case "F.embedding":
                return F.embedding(x, weight, max_norm=0.5)
            case "clamp_":
                with torch.no_grad():
                    weight.clamp_(-0.01, 0.01)
            case "data.clamp_":
                weight.data.clamp_(-0.01, 0.01)
            case "data =":
                weight.data = torch.renorm(weight.data, 2, 0, 0.1)
        return self.layer(x)


WRITERS = ["Embedding", "EmbeddingBag", "F.embedding", "clamp_", "data.clamp_", "data ="]


def values(state):
    """Values of the parameters, and where they are."""
    return {name: (tensor.detach().clone(), tensor.data_ptr()) for name, tensor in state.params.items()}


def assert_intact(state, before):
    for name, (value, address) in before.items():
        assert torch.equal(state.params[name], value), name
        assert state.params[name].data_ptr() == address


@one_report
@pytest.mark.parametrize("bound", [True, False])
@pytest.mark.parametrize("kind", WRITERS)
def test_what_writes_the_given_state_is_refused_by_name_and_the_state_is_intact(kind, bound):
    model, batch = Writer(kind), torch.randn(4, 3) if "mb" not in kind else ROWS
    state = ll.init_state(model, SGD)
    if not bound:
        state = ll.copy_state(state)
    before = values(state)
    grad_fn = ll.make_grad_fn(model, mean_square)
    step = ll.make_train_step(ll.make_grad_fn(model, mean_square), SGD)
    message = r"wrote to the parameter layer\.weight in place, as F\.embedding\(max_norm.*its values are as they were"
    for function in (grad_fn, step, step):
        with pytest.raises(RuntimeError, match=message):
            function(state, batch)
        assert_intact(state, before)


def contrastive(model):
    embed = lambda model, x: model(x).reshape(len(x), -1)  # noqa: E731
    return ll.contrib.make_contrastive_grad_fn(model, embed, lambda rows: rows.square().mean(), microbatches=2)


def per_sample(model):
    return ll.contrib.clip_per_sample(ll.contrib.make_per_sample_grad_fn(model, mean_square), 1.0)


OTHER_GRAD_FNS = {
    contrastive: WRITERS,
    per_sample: ["clamp_", "data.clamp_"],  # torch.vmap refuses the others
    lambda model: ll.contrib.sam(ll.make_grad_fn(model, mean_square)): WRITERS,
    lambda model: ll.accumulate(ll.make_grad_fn(model, mean_square), 2): WRITERS,
}


@one_report
@pytest.mark.parametrize("bound", [True, False])
@pytest.mark.parametrize(("make", "kind"), [(make, kind) for make, kinds in OTHER_GRAD_FNS.items() for kind in kinds])
def test_other_gradient_functions_refuse_writes_by_name_and_the_state_is_intact(make, kind, bound):
    model, batch = Writer(kind), torch.randn(4, 3) if "mb" not in kind else ROWS
    grad_fn, state = make(model), ll.init_state(model, SGD)
    state = state if bound else ll.copy_state(state)
    before = values(state)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"wrote to the parameter layer\.weight.*its values are as they were"):
            grad_fn(state, batch)
        assert_intact(state, before)


def test_embeddings_that_fail_after_they_have_written_leave_the_state_intact():
    model = Writer("clamp_")

    def failing(model, x):
        model(x)
        raise KeyError("the function's own")

    grad_fn = ll.contrib.make_contrastive_grad_fn(model, failing, torch.mean, microbatches=2)
    state = ll.init_state(model, SGD)
    before = values(state)
    with pytest.raises(KeyError):
        grad_fn(state, torch.ones(4, 3))
    assert_intact(state, before)


@pytest.mark.parametrize("make", [contrastive, per_sample])
def test_donated_steps_of_other_gradient_functions_may_write_as_a_raw_loop_does(make):
    model, raw = Writer("clamp_"), Writer("clamp_")
    step, state = ll.make_train_step(make(model), SGD, donate=True), ll.init_state(model, SGD)
    sgd = torch.optim.SGD(raw.parameters(), lr=0.1)
    for batch in 0.01 * torch.randn(3, 4, 3):  # no sample's gradient is clipped
        state, _ = step(state, batch)
        sgd.zero_grad()
        mean_square(raw, batch).backward()
        sgd.step()
    torch.testing.assert_close(dict(state.params), dict(raw.named_parameters()))


@one_report
@pytest.mark.parametrize("begins", [2, 4, 8])
def test_writes_through_data_that_begin_later_are_refused_at_the_next_look(begins):
    model, batch = Writer("none"), torch.randn(4, 3)
    grad_fn, state = ll.make_grad_fn(model, mean_square), ll.init_state(model, SGD)
    for _ in range(begins - 1):
        grad_fn(state, batch)
    model.kind, before = "data.clamp_", values(state)
    with pytest.raises(RuntimeError, match=r"wrote to the parameter layer\.weight.*its values are as they were"):
        grad_fn(state, batch)
    assert_intact(state, before)


@one_report
@pytest.mark.parametrize("bound", [True, False])
@pytest.mark.parametrize("kind", WRITERS)
def test_evaluations_and_predictions_run_on_copies_of_what_they_write(kind, bound):
    model, batch = Writer(kind), torch.randn(4, 3) if "mb" not in kind else ROWS
    eval_step = ll.make_eval_step(model, lambda model, batch: {"loss": mean_square(model, batch)})
    predict_step = ll.make_predict_step(model, lambda model, batch: model(batch))
    step = ll.make_train_step(ll.make_grad_fn(model, mean_square), SGD, donate=True)
    state = ll.init_state(model, SGD)
    state = state if bound else ll.copy_state(state)
    raw = Writer(kind)
    sgd = torch.optim.SGD(raw.parameters(), lr=0.1)
    for _ in range(3):
        before, expected = values(state), copy.deepcopy(raw).eval()(batch).detach()
        torch.testing.assert_close(predict_step(state, batch), expected)
        found = ll.evaluate(eval_step, state, [batch])["loss"]
        assert found == pytest.approx(expected.square().mean().item(), rel=1e-5)
        assert_intact(state, before)
        state, _ = step(state, batch)
        sgd.zero_grad()
        mean_square(raw, batch).backward()
        sgd.step()
    torch.testing.assert_close(dict(state.params), dict(raw.named_parameters()))


@pytest.mark.every_case
@pytest.mark.parametrize("kind", WRITERS)
def test_graphs_of_pure_steps_and_predictions_refuse_writes(kind):
    model, batch = Writer(kind), torch.randn(4, 3) if "mb" not in kind else ROWS
    grad_fn = ll.make_grad_fn(model, mean_square)
    made = [
        ll.make_train_step(grad_fn, SGD),
        ll.make_predict_step(model, lambda model, batch: model(batch)),
    ]
    if kind == "data =":  # which a graph would leave out
        made.append(ll.make_train_step(grad_fn, SGD, donate=True))
    for step in made:
        state = ll.copy_state(ll.init_state(model, SGD))
        before = values(state)
        with pytest.raises(RuntimeError, match=r"wrote to the parameter layer\.weight in place"):
            ll.compile_step(step, backend="eager")(state, batch)
        assert_intact(state, before)


def test_an_evaluation_that_fails_after_it_has_written_leaves_the_state_intact():
    model = Writer("clamp_")

    def failing(model, x):
        model(x)
        raise KeyError("the function's own")

    state = ll.init_state(model, SGD)
    before = values(state)
    for function in (ll.make_predict_step(model, failing), ll.make_grad_fn(model, failing)):
        with pytest.raises(KeyError):
            function(state, torch.ones(4, 3))
        assert_intact(state, before)


def test_a_layer_with_max_norm_that_the_loss_leaves_out_is_no_reason_to_refuse():
    model = nn.ModuleDict({"used": nn.Linear(3, 1), "unused": nn.Embedding(6, 3, max_norm=0.5)})
    step = step_of(model, SGD, loss_fn=lambda model, x: model["used"](x).square().mean(), allow_unused=True)
    state, _ = step(ll.copy_state(ll.init_state(model, SGD)), torch.ones(4, 3))
    assert state.step == 1


@pytest.mark.parametrize("batches", [[GOOD, BAD], [BAD, GOOD]])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_donated_step_may_write_what_it_trains_as_a_raw_loop_does(function, batches):
    model, optimizer = Renormed(function), skipping(SGD)
    step, raw = step_of(model, optimizer, True, loss_fn), Renormed(function)
    sgd, state = torch.optim.SGD(raw.parameters(), lr=0.1), ll.init_state(model, optimizer)
    for batch in batches:
        before = state
        state, _ = step(state, batch)
        with pytest.raises(ll.DonatedStateError, match=f"that run is at step {state.step} now"):  # skipped or not
            _ = before.params
        sgd.zero_grad()
        loss_fn(raw, batch).backward()
        if batch is GOOD:
            sgd.step()
    assert state.step == 1
    torch.testing.assert_close(dict(state.params), dict(raw.named_parameters()))


def test_a_step_that_fails_spends_the_state_whose_parameters_it_has_written():
    model = Renormed(F.embedding)

    def failing(model, batch):
        loss_fn(model, batch)
        raise KeyError("the loss function's own")

    step = step_of(model, SGD, True, failing)
    state = ll.init_state(model, SGD)
    with pytest.raises(KeyError):
        step(state, BAD)
    with pytest.raises(ll.DonatedStateError, match="there is no state after it"):
        _ = state.params


def test_evaluation_of_inference_tensors_counts_no_writes():
    model = nn.Linear(2, 1)
    with torch.inference_mode():
        state = ll.copy_state(ll.init_state(model))
    assert ll.make_predict_step(model, lambda model, x: model(x))(state, torch.ones(3, 2)).shape == (3, 1)


class Clamped(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x):
        self.linear.weight.data.clamp_(-0.01, 0.01)
        return self.linear(x)


def test_pure_steps_find_writes_to_data_though_torch_does_not_count_them():
    model = Clamped()
    grad_fn = ll.make_grad_fn(model, mean_square)
    step = ll.make_train_step(grad_fn, SGD)
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"wrote to the parameter linear\.weight in place"):
            step(ll.copy_state(ll.init_state(model, SGD)), torch.ones(4, 3))


class Momentum(nn.Module):
    """A frozen network that follows the trained one, as in MoCo and BYOL."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.online, self.target = nn.Linear(3, 2), nn.Linear(3, 2).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.online.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
        return (self.online(x) - self.target(x)).square().mean()


def test_a_donated_step_may_move_a_momentum_encoder_as_a_raw_loop_does():
    model, optimizer = Momentum(), skipping(SGD)
    grad_fn = ll.make_grad_fn(model, lambda model, x: model(x))
    with pytest.raises(RuntimeError, match=r"wrote to the parameter target\.weight, target\.bias in place"):
        ll.make_train_step(grad_fn, optimizer)(ll.copy_state(ll.init_state(model, optimizer)), torch.ones(4, 3))
    step = ll.make_train_step(grad_fn, optimizer, donate=True)
    state, batches = ll.init_state(model, optimizer), torch.randn(5, 4, 3)
    batches[3] = torch.inf
    raw = Momentum()
    sgd = torch.optim.SGD(raw.online.parameters(), lr=0.1)
    for batch in batches:
        before = ll.TrainState(params={"slow": state.params["target.weight"]})
        state, _ = step(state, batch)
        sgd.zero_grad()
        raw(batch).backward()
        if not state.skipped:
            sgd.step()
        with pytest.raises(ll.DonatedStateError):  # the skipped step has moved the encoder too
            _ = before.params
    assert state.step == 4
    torch.testing.assert_close(dict(state.params), dict(raw.named_parameters()))
