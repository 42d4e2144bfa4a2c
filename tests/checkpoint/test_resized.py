"""States whose shapes change during a run: restored with the shapes that were saved, where that is said, else refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared import assert_each_refused, bits, both_steps, examples
from torch import nn

import looplib as ll

OPTIMIZERS = {
    "plain": ll.optimizer(torch.optim.Adam, lr=0.1),
    "chain": ll.optim.partition(
        {
            "rows": ll.chain(ll.optim.every(ll.optimizer(torch.optim.Adam, lr=0.1), 2), ll.ema(0.9)),
            "rest": ll.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9),
        },
        lambda name, tensor: "rows" if name == "table.weight" else "rest",
    ),
}
X = torch.randn(6, 5, 3, generator=torch.Generator().manual_seed(0))


def model_of(rows):
    torch.manual_seed(rows)
    return nn.ModuleDict({"table": nn.Linear(3, rows), "head": nn.Linear(3, 2)})


def loss_fn(model, x):
    return model["table"](x).square().mean() + model["head"](x).square().mean()


def of_rows(rows, name, donate=False):
    """A new state with so many rows, its step, and the module."""
    optimizer = OPTIMIZERS[name]
    model = model_of(rows)
    step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer, donate=donate)
    return ll.init_state(model, optimizer), step, model


@both_steps
@pytest.mark.parametrize("bound", [True, False], ids=["bound", "unbound"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_optimizers_state_follows_its_parameter_and_the_run_continues(tmp_path, name, bound, donate):
    state, step, _ = of_rows(7, name)
    for x in X[:3]:
        state, _ = step(state, x)
    ckpt = ll.checkpoint_io(tmp_path)
    ckpt.save(state)
    template, step_of_4, model = of_rows(4, name, donate)  # whose module has other shapes
    template = template if bound else ll.copy_state(template)
    before = bits(template.params)
    resized = ckpt.restore(template, resized=("params.table.*",), quiet=True)
    assert bits(resized) == bits(state)
    assert all(tensor.requires_grad for tensor in resized.params.values())
    assert bits(template.params) == before  # which stays valid
    with pytest.raises(ValueError, match=r"\(7, 3\), the model's has \(4, 3\).*ll.bind\(model, state, resize=True\)"):
        step_of_4(resized, X[0])
    table = model["table"].weight
    resized = ll.bind(model, resized, resize=True)
    assert model["table"].weight is table
    assert bits(dict(model.named_parameters())) == bits(state.params)
    if bound:
        with pytest.raises(ll.DonatedStateError):
            print(template.params)
    else:
        assert bits(template.params) == before
    for x in X[3:]:
        state, _ = step(state, x)
        resized, _ = step_of_4(resized, x)
    assert bits(resized) == bits(state)


def test_the_shapes_of_the_state_are_no_reason_to_lose_the_module(tmp_path):
    ckpt, (state, step, _) = ll.checkpoint_io(tmp_path), of_rows(4, "plain")
    state, _ = step(state, X[0])
    ckpt.save(state)
    bound, _, _ = of_rows(4, "plain")
    restored = ckpt.restore(bound, resized=("params.*",), quiet=True)
    assert restored.params["table.weight"] is vars(bound)["_params"]["table.weight"]  # the module's own, as ever


def test_other_shapes_are_refused_by_name_unless_they_are_named(tmp_path):
    ckpt, (state, *_), (template, *_) = ll.checkpoint_io(tmp_path), of_rows(7, "plain"), of_rows(4, "plain")
    ckpt.save(state.replace(extra={"kept": torch.ones(2)}))
    template = template.replace(extra={"kept": torch.zeros(2)})
    both = r"resized=\('params.table.weight', 'params.table.bias'\)\)"
    wide = template.replace(params={name: tensor.double() for name, tensor in template.params.items()})
    moments = ll.TrainState(params=state.params, opt_state=template.opt_state, extra=template.extra)
    assert_each_refused(
        (lambda: ckpt.restore(template), ValueError, rf"/params/table.weight is a .*\(7, 3\).*\(4, 3\)[\s\S]*{both}"),
        (lambda: ckpt.restore(template, resized=("params.table.weight",)), ValueError, "/params/table.bias is a"),
        (lambda: ckpt.restore(moments), ValueError, "/opt_state/Adam/state/table.weight/exp_avg is a"),
        (lambda: ckpt.restore(wide, resized=("params",)), ValueError, "float32 .*in the checkpoint, a float64"),
        (
            lambda: ckpt.restore(template, resized=("params", "means")),
            ValueError,
            "resized names 'means', and the state has",
        ),
        (lambda: ckpt.restore(template, resized="params"), TypeError, "resized is 'params'; give names"),
        (lambda: ckpt.restore({"step": 0}, resized=("params",)), TypeError, "resized= names leaves of a state"),
    )
    assert ckpt.restore(moments, resized=("opt_state.Adam",), quiet=True).opt_state is not None


plain = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary())
tensors = st.lists(st.integers(0, 3), max_size=2).map(torch.ones)
grown = st.recursive(
    st.one_of(plain, tensors),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.dictionaries(st.integers(-(2**63), 2**63 - 1), inner, max_size=3),
    ),
    max_leaves=8,
)


@settings(max_examples=examples(25), deadline=None)
@given(history=grown, start=st.sampled_from([[], {}, (), None, 0]))
def test_what_grows_in_extra_comes_back_whatever_it_is(tmp_path_factory, history, start):
    ckpt = ll.checkpoint_io(tmp_path_factory.mktemp("grown"))
    ckpt.save(ll.TrainState(extra={"history": history, "kept": 1}))
    state = ckpt.restore(ll.TrainState(extra={"history": start, "kept": 0}), resized=("extra.history",), quiet=True)
    assert repr(state.extra) == repr({"history": history, "kept": 1})
    assert bits(state.extra) == bits({"history": history, "kept": 1})


def test_what_grows_is_refused_by_name_without_it_and_where_only_a_state_can_make_it(tmp_path):
    ckpt = ll.checkpoint_io(tmp_path)
    best = ll.predicates.BestSoFar("eval/loss")
    ckpt.save(ll.TrainState(extra={"history": [1.0, 2.0], "best": best.update(0.5, 3)}))
    start = ll.TrainState(extra={"history": [], "best": best})
    with pytest.raises(
        ValueError, match=r"/extra/history/0 is in the checkpoint, [\s\S]*resized=\('extra.history',\)"
    ):
        ckpt.restore(start)
    expected = {"history": [1.0, 2.0], "best": best.update(0.5, 3)}
    for names in (("extra.history",), ("extra",), ("extra.h*",)):
        assert ckpt.restore(start, resized=names, quiet=True).extra == expected
    with pytest.raises(ValueError, match=r"has extra\.best, a container that is neither list, tuple nor dict"):
        ckpt.restore(ll.TrainState(extra={"history": []}), resized=("extra",))
