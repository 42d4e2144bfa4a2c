"""Moments on the host against the same optimizer without it and a raw loop, to the bit, on the far device.

There, a copy is carried out as late as a device might, so that a wait that is missing shows as a wrong number.
"""

import itertools
import weakref

import pytest
import torch
from far.device import far, host_reads
from far.test_cases import bits
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from problem import assert_refused, batches, loss_fn, net, raw_loop, run, step_of
from shared import both_steps, examples, update
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import looplib as ll
from looplib.transforms import UntraceableError

PLAIN = {"fused": False, "foreach": False}
SMALL = 100  # bytes: several groups, and parameters that are larger alone


@pytest.fixture(autouse=True)
def device():
    with far() as device:
        yield device


def adamw(**options):
    return ll.optimizer(torch.optim.AdamW, lr=ll.warmup_cosine(1e-2, warmup=2, total=9), **options)


def offloaded(optimizer, buffer_bytes=SMALL):
    return ll.optim.offload_state(optimizer, buffer_bytes=buffer_bytes)


def on(device, count=4):
    return [batch.to(device) for batch in batches(count)]


def moments(state):
    return [
        leaf
        for leaf in torch.utils._pytree.tree_leaves(state.opt_state)
        if isinstance(leaf, torch.Tensor) and leaf.dim()
    ]


def all_of(state):
    return bits((state.params, state.buffers, state.opt_state)), state.step


CLASSES = {
    "AdamW": (torch.optim.AdamW, {"amsgrad": True}),
    "AdamW, plain": (torch.optim.AdamW, PLAIN),
    "AdamW, foreach": (torch.optim.AdamW, {"foreach": True}),
    "Adam": (torch.optim.Adam, {"maximize": True, **PLAIN}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, **PLAIN}),
    "SGD without moments": (torch.optim.SGD, PLAIN),
    "Adamax": (torch.optim.Adamax, {}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    "Adagrad": (torch.optim.Adagrad, {"initial_accumulator_value": 0.1, **PLAIN}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Muon": (torch.optim.Muon, {}),
}


@both_steps
@pytest.mark.every_case
@pytest.mark.parametrize("kind", CLASSES)
def test_each_class_has_the_bits_of_its_own_loop_and_its_moments_on_the_host(device, kind, donate):
    cls, options = CLASSES[kind]

    def model():
        made = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
        if cls is torch.optim.Muon:  # which takes matrices alone
            made = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 2, bias=False))
        torch.manual_seed(0)
        for parameter in made.parameters():
            nn.init.normal_(parameter, 0, 0.3)
        return made.to(device)

    plain = ll.optimizer(cls, lr=0.01, **options)
    expected, state = (run(model(), one, on(device), donate) for one in (plain, offloaded(plain)))
    assert all_of(state) == all_of(expected)
    assert all(tensor.is_cpu and tensor.is_pinned() for tensor in moments(state))
    assert [tensor.is_cpu for tensor in moments(expected)] == [False] * len(moments(state))
    if kind != "AdamW":  # whose fused kernel looplib has chosen
        other = model()
        raw_loop(other, cls(other.parameters(), lr=0.01, **options), on(device))
        assert bits(list(state.params.values())) == bits(list(other.parameters()))


@both_steps
def test_a_chain_has_the_bits_of_a_raw_loop_with_clipping_and_an_average(device, donate):
    optimizer = ll.chain(
        ll.clip_by_global_norm(0.1), offloaded(ll.optimizer(torch.optim.AdamW, lr=0.01, **PLAIN)), ll.ema(0.9)
    )
    state = run(net().to(device), optimizer, on(device), donate)
    model = net().to(device)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    average.update_parameters(model)  # the first call copies
    adamw = torch.optim.AdamW(model.parameters(), lr=0.01, **PLAIN)

    for batch in on(device):
        adamw.zero_grad()
        loss_fn(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        adamw.step()
        average.update_parameters(model)
    assert bits(list(state.params.values())) == bits(list(model.parameters()))
    assert bits(list(ll.optim.average(optimizer, state).values())) == bits(list(average.module.parameters()))
    rows = state.opt_state["AdamW"]["state"]
    for name, parameter in model.named_parameters():
        assert all(tensor.is_cpu for tensor in rows[name].values())
        assert bits(rows[name]) == bits({key: adamw.state[parameter][key] for key in rows[name]})


def with_infinity(device):
    data = on(device, 5)
    return [*data[:2], data[2] / 0, *data[3:]]


CHAINS = {
    "clipping, average": lambda inner: ll.chain(ll.clip_by_global_norm(0.1), inner, ll.ema(0.9)),
    "scale": lambda inner: ll.chain(ll.optim.dynamic_loss_scale(2.0**127, growth_interval=2), inner),
    "skipped": lambda inner: ll.chain(ll.skip_nonfinite(3), inner, ll.ema(0.9)),
    "partition": lambda inner: ll.optim.partition(
        {"2": inner, "1": ll.optimizer(torch.optim.SGD, lr=0.1)}, lambda name, tensor: str(tensor.ndim)
    ),
    "partition of two": lambda inner: ll.optim.partition(
        {"2": ll.chain(ll.clip_by_global_norm(0.1), inner), "1": offloaded(adamw(foreach=True), 10**6)},
        lambda name, tensor: str(tensor.ndim),
    ),
    "own_steps": ll.optim.own_steps,
    "every": lambda inner: ll.optim.every(inner, 2),
}


@both_steps
@pytest.mark.every_case
@pytest.mark.parametrize("buffer_bytes", [1, 300, 2**28])
@pytest.mark.parametrize("kind", CHAINS)
def test_a_chain_with_accumulation_has_the_bits_of_the_one_without(device, kind, buffer_bytes, donate):
    def state_of(inner):
        wrap = {"wrap": lambda grad_fn: ll.accumulate(grad_fn, 2)}
        return run(
            net(dropout=0.2).to(device),
            CHAINS[kind](inner),
            with_infinity(device) if kind == "skipped" else on(device),
            donate,
            **wrap,
        )

    plain = adamw(
        groups=[(lambda name, tensor: tensor.ndim < 2, {"weight_decay": 0.0})], betas=(ll.optim.inject(0.8), 0.99)
    )
    assert all_of(state_of(offloaded(plain, buffer_bytes))) == all_of(state_of(plain))


@pytest.mark.slow
@both_steps
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped_with_and_without_it(
    device, tmp_path, asynchronous, donate
):
    plain, data = adamw(), on(device, 5)
    whole = all_of(run(net().to(device), plain, data, donate))
    for number, (before, after) in enumerate(itertools.product([offloaded(plain), plain], repeat=2)):
        ckpt = ll.checkpoint_io(tmp_path / str(number), asynchronous=asynchronous)
        ckpt.save(run(net().to(device), before, data[:2], donate))
        ckpt.wait()
        for bound in (True, False):
            model = net().to(device)
            step, state = step_of(model, after, donate and bound), ll.init_state(model, after)
            state = ckpt.restore(state if bound else ll.copy_state(state))
            for batch in data[2:]:
                state, _ = step(state, batch)
            assert all_of(state) == whole
            assert {tensor.is_cpu for tensor in moments(state)} == {after is not plain}
            assert all(tensor.is_pinned() for tensor in moments(state) if tensor.is_cpu)


def test_old_states_and_copies_keep_their_bits_and_can_be_continued(device):
    model, optimizer, data = net().to(device), offloaded(adamw()), on(device)
    step, state, states = step_of(model, optimizer), ll.init_state(model, optimizer), []
    for batch in data:
        states.append((state, all_of(state), ll.copy_state(state)))
        state, _ = step(state, batch)
    for (old, kept, copy), batch in zip(states, data, strict=True):
        assert all_of(old) == all_of(copy) == kept
        again, _ = step(copy, batch)
        assert all_of(copy) == kept
        assert all(tensor.is_pinned() for tensor in moments(again))
    assert all_of(again) == all_of(state)


def test_a_donated_state_stays_in_its_memory(device):
    model, optimizer = net().to(device), offloaded(adamw())
    step, state = step_of(model, optimizer, donate=True), ll.init_state(model, optimizer)
    places = [tensor.data_ptr() for tensor in moments(state)]
    for batch in on(device):
        spent, (state, _) = state, step(state, batch)
    assert [tensor.data_ptr() for tensor in moments(state)] == places
    with pytest.raises(ll.DonatedStateError):
        _ = spent.opt_state


def test_rows_surgery_and_torchs_own_optimizer_take_moments_from_the_host(device):
    model, plain = net().to(device), ll.optimizer(torch.optim.AdamW, lr=0.01, **PLAIN)
    states = []
    for optimizer in (plain, offloaded(plain)):
        state = run(net().to(device), optimizer, on(device))
        grown = ll.optim.take_rows(
            optimizer, state, {"0.bias": torch.tensor([3, 1])}, {"0.bias": torch.ones(3, device=device)}
        )
        raw = torch.optim.AdamW(model.parameters(), lr=0.01, **PLAIN)
        raw.load_state_dict(ll.checkpoint.optimizer_state_dict(model, state, raw))
        assert {tensor.device for row in raw.state.values() for tensor in row.values() if tensor.dim()} == {device}
        loaded = ll.checkpoint.load_optimizer_state_dict(model, state, raw)
        assert {tensor.is_cpu for tensor in [*moments(grown), *moments(loaded)]} == {optimizer is not plain}
        states.append((all_of(grown), all_of(loaded)))
    assert states[0] == states[1]


@pytest.mark.parametrize("buffer_bytes", [400, 2000])
def test_moments_on_the_device_never_exceed_the_buffer(device, monkeypatch, buffer_bytes):
    alive, most, empty_like = weakref.WeakSet(), [], torch.empty_like

    def counted(tensor, **options):
        made = empty_like(tensor, **options)
        if made.device == device:
            alive.add(made)
            most.append(sum(each.nbytes for each in alive))
        return made

    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(10))).to(device)
    optimizer = offloaded(adamw(), buffer_bytes)
    step, state = step_of(model, optimizer, donate=True), ll.init_state(model, optimizer)
    everything = sum(tensor.nbytes for tensor in moments(state))
    monkeypatch.setattr(torch, "empty_like", counted)
    for batch in on(device):
        state, _ = step(state, batch)
    assert buffer_bytes / 2 < max(most) <= buffer_bytes < everything
    assert not alive


def test_init_makes_the_state_in_parts_and_pins_it(device):
    model = net().to(device)
    plain, hosted = (ll.init_state(model, one) for one in (adamw(), offloaded(adamw())))
    assert all_of(plain) == all_of(hosted)
    assert [*plain.opt_state["AdamW"]["state"]] == [*hosted.opt_state["AdamW"]["state"]]
    assert all(tensor.is_cpu and tensor.is_pinned() for tensor in moments(hosted))


def test_the_first_copies_are_on_their_way_before_the_host_reads_whether_to_update(device):
    model, optimizer = net().to(device), ll.chain(ll.skip_nonfinite(3), offloaded(adamw(), 2**28))
    state, batch = ll.init_state(model, optimizer), on(device)[0]
    gradients = ll.make_grad_fn(model, loss_fn)(state, batch)
    with host_reads() as reads:
        before = torch.ops.far.queued_copies()
        out = optimizer.transform(gradients.grads, state.opt_state, state.params, 0)
        assert torch.ops.far.queued_copies() - before == len(moments(state))
    (visit,) = out.carry["AdamW"]
    assert not visit.loaded.query()  # nothing has waited for the copies
    assert reads == []


# Any parameters and gradients


@settings(deadline=None, max_examples=examples(40), phases=[Phase.generate])
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=6),
    dtypes=st.lists(
        st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.complex64]), min_size=6, max_size=6
    ),
    where=st.lists(st.sampled_from(["far:0", "far:1", "cpu"]), min_size=6, max_size=6),
    present=st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=3),
    buffer_bytes=st.integers(1, 3000),
    donate=st.booleans(),
    options=st.sampled_from([{}, PLAIN, {"foreach": True}]),
)
def test_any_parameters_in_any_order_have_the_bits_of_the_optimizer_alone(
    shapes, dtypes, where, present, buffer_bytes, donate, options
):
    def trained(optimizer):
        generator = torch.Generator().manual_seed(0)

        def values(number):
            return torch.randn(shapes[number], dtype=dtypes[number], generator=generator).to(where[number])

        params = {f"p{number}": values(number).requires_grad_() for number in range(len(shapes))}
        opt_state = optimizer.init(params)
        for step, flags in enumerate(present):
            grads = {name: values(number) for number, name in enumerate(params) if flags[number]}
            if grads:
                with torch.no_grad():
                    params, opt_state = update(optimizer, grads, opt_state, params, step, donate)
        return bits(torch.utils._pytree.tree_map(torch.Tensor.cpu, (params, opt_state)))

    plain = ll.optimizer(torch.optim.AdamW, lr=0.1, **options)
    assert trained(ll.optim.offload_state(plain, buffer_bytes=buffer_bytes)) == trained(plain)


# What is refused


def test_what_it_cannot_keep_is_refused_by_name(device):
    adam = ll.optimizer(torch.optim.Adam, lr=0.1)
    for wrong in (
        ll.chain(ll.clip_by_global_norm(1.0), adam),
        ll.optim.partition({"all": adam}, lambda name, tensor: "all"),
        ll.optim.own_steps(adam),
        ll.optim.offload_state(adam),
        ll.optimizer(torch.optim.LBFGS, lr=0.1),
        ll.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.1),
        ll.optimizer(torch.optim.Adafactor, lr=0.1),
        ll.optim.part("mine", update_=lambda grads, state, params, step: (params, state), role="weights"),
    ):
        name = str(wrong.call).partition("(")[0]
        assert_refused(ValueError, f"offload_state {name} wrap", lambda wrong=wrong: ll.optim.offload_state(wrong))
    assert_refused(ValueError, "ema no weights", lambda: ll.optim.offload_state(ll.ema(0.9)))
    assert_refused(TypeError, "class Adam ll.optimizer", lambda: ll.optim.offload_state(torch.optim.Adam))
    assert_refused(ValueError, "buffer_bytes 0 at least 1", lambda: ll.optim.offload_state(adam, buffer_bytes=0))

    class Special(torch.Tensor):
        pass

    params, inner = {"w": torch.zeros(3).as_subclass(Special)}, ll.optim.offload_state(adam)
    opt_state = adam.init({"w": torch.zeros(3)})
    for call in (lambda: inner.init(params), lambda: inner.update(params, opt_state, params, 0)):
        assert_refused(TypeError, "offload_state w Special CPUOffloadPolicy", call)


def test_a_state_of_another_optimizer_is_refused_before_anything_is_written(device):
    model, optimizer = net().to(device), offloaded(adamw())
    step, state = step_of(model, optimizer, donate=True), ll.init_state(model, optimizer)
    other = ll.init_state(model, ll.optimizer(torch.optim.Adagrad, lr=0.1)).opt_state["Adagrad"]
    rows = state.opt_state["AdamW"]["state"]
    short = {**rows, "0.weight": {**rows["0.weight"], "exp_avg": torch.zeros(3)}}
    double = {**rows, "0.weight": {**rows["0.weight"], "exp_avg": rows["0.weight"]["exp_avg"].double()}}
    for opt_state, words in [
        ({}, "state was made"),
        ({"AdamW": other}, "sum AdamW"),
        ({"AdamW": {"state": short}}, "exp_avg 0.weight (3,)"),
        ({"AdamW": {"state": double}}, "exp_avg 0.weight float64"),
    ]:
        assert_refused(
            ValueError,
            words if opt_state else "AdamW init_state",
            lambda s=opt_state: step(state.replace(opt_state=s), on(device)[0]),
        )
    assert step(state, on(device)[0])[0].step == 1


@pytest.mark.slow
def test_steps_that_run_as_graphs_refuse_it():
    model, optimizer = net(norm=nn.LayerNorm), offloaded(adamw())
    step, state = step_of(model, optimizer), ll.init_state(model, optimizer)
    stack = ll.transforms.stack_states([state, state], same_seeds=True)
    for call in (
        lambda: ll.compile_step(step, backend="eager")(state, batches(1)[0]),
        lambda: ll.vmap_step(step)(stack, batches(1)[0]),
        lambda: ll.transforms.differentiable(step)(state, batches(1)[0]),
    ):
        assert_refused(UntraceableError, "ll.optim.offload_state compile_step leave", call)


class CPUOffloadOptimizer(torch.optim.Optimizer):
    """torchao's has this name, and no defaults."""

    def __init__(self, params, optimizer_class=torch.optim.AdamW, **kwargs):
        self.param_groups = [{"params": params}]

    def step(self, closure=None):
        pass


def test_torchaos_offloading_optimizer_is_refused_with_the_line_to_write():
    import torchao.optim

    for wrong in (torchao.optim.CPUOffloadOptimizer, CPUOffloadOptimizer, CPUOffloadOptimizer([torch.ones(2)])):
        words = "CPUOffloadOptimizer ll.optim.offload_state(ll.optimizer(torch.optim.AdamW,"
        assert_refused(TypeError, words, lambda wrong=wrong: ll.optimizer(wrong, lr=1e-3))
