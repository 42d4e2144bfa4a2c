"""The cookbook's DiLoCo on two real ranks beside a raw loop, the bytes that it sends, and a rank that is lost."""

import copy
import os
import signal

import cookbook
import pytest
import torch
from ranks import be_rank, launch
from torch import distributed, nn
from torch.multiprocessing import get_context
from torch.utils.data import TensorDataset

import looplib as ll

ROUNDS, RESTARTS = cookbook.BLOCK.findall(cookbook.SECTIONS["Synchronize every few steps (local SGD, DiLoCo)"])
COLLECTIVES = [
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single"),
    *("barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather", "gather_object", "isend"),
    *("reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send"),
]


def names_in_float64():
    names = {}
    exec(cookbook.SETUP, names)
    names["model"].double()
    names["train_set"] = TensorDataset(names["x"][:256].double(), names["y"][:256])
    return names


def raw_rounds(names, ranks, rounds):
    """The weights after a raw loop that trains all ranks' networks one after another."""
    model = copy.deepcopy(names["model"])
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    nets = [copy.deepcopy(model) for _ in range(ranks)]
    inner = [torch.optim.AdamW(net.parameters(), lr=1e-2) for net in nets]
    x, y = names["train_set"].tensors
    for number in range(rounds):
        for rank, (net, optimizer) in enumerate(zip(nets, inner, strict=True)):
            net.load_state_dict(model.state_dict())
            shard, state = names["order"][rank]
            for step in range(5 * number, 5 * number + 5):
                epoch, batch = divmod(step, len(shard))
                indices = shard.indices(state.replace(epoch=epoch, batch=batch))
                rows = torch.arange(rank, 256, ranks)[torch.as_tensor(indices)]
                optimizer.zero_grad()
                names["loss_fn"](net, (x[rows], y[rows])).backward()
                optimizer.step()
        for weight, *others in zip(model.parameters(), *(net.parameters() for net in nets), strict=True):
            weight.grad = sum(weight.detach() - other.detach() for other in others) / ranks
        outer.step()
    return dict(model.named_parameters())


def rounds_on_ranks(folder):
    os.chdir(folder)
    sent = []
    with ll.distributed.setup():
        names = names_in_float64()
        first = copy.deepcopy(names["model"])
        exec(ROUNDS.partition("for _ in range(4):")[0], names)
        for name in COLLECTIVES:
            setattr(distributed, name, counted(sent, name, getattr(distributed, name)))
        rank, state, local = names["rank"], names["state"], names["local"]
        for _ in range(6):
            sent.clear()
            state, local = names["train_round"](state, local)
            assert sent == [("all_reduce", 8 * sum(weight.numel() for weight in first.parameters()))]
        order = [names["shard"], ll.init_state(names["model"], epoch_length=len(names["shard"]))]
        # The order of a shard depends on the state's seed alone, of which each rank has its own.
        seeds = [ll.state.fold_in(order[1], number) for number in range(2)]
        assert seeds[rank].seed == local.seed
        names |= {"model": first, "order": [(names["shard"], seed) for seed in seeds]}
        expected = raw_rounds(names, 2, 6)
        for name, weight in state.params.items():
            torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-12)
        assert (state.step, local.step) == (6, 30)
        # Saved at its end, a run of four rounds continues with the next two.
        ll.distributed.set_data_parallel_group(None)
        exec(ROUNDS, names)
        state, local = names["state"], names["local"]
        for _ in range(2):
            state, local = names["train_round"](state, local)
        exec("state = ll.init_" + ROUNDS.partition("for _ in range(4):")[0].partition("state = ll.init_")[2], names)
        assert names["local"].step == 20
        again = names["state"], names["local"]
        for _ in range(2):
            again = names["train_round"](*again)
        assert again[0].step == 6
        assert not ll.debug.differences(state.replace(extra=None), again[0].replace(extra=None))
        assert not ll.debug.differences(local, again[1])
        print("equal")


def counted(sent, name, call):
    def wrapped(*arguments, **options):
        tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
        sent.append((name, sum(tensor.numel() * tensor.element_size() for tensor in tensors)))
        return call(*arguments, **options)

    return wrapped


def test_rounds_are_those_of_a_raw_loop_and_send_the_weights_once_and_resume(tmp_path):
    assert launch(2, rounds_on_ranks, str(tmp_path)).count("equal") == 2


class InTwoPrecisions(nn.Module):
    """A frozen layer, one in bfloat16, and one in float32."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.low = nn.Linear(8, 16).bfloat16()
        self.readout = nn.Linear(16, 3)

    def forward(self, x):
        return self.readout(self.low(self.frozen(x).bfloat16()).relu().float())


def test_frozen_weights_and_two_precisions_keep_their_dtypes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(cookbook.SETUP, names)
    names["model"] = InTwoPrecisions()
    names["grad_fn"] = ll.make_grad_fn(names["model"], names["loss_fn"])
    first = {name: weight.detach().clone() for name, weight in names["model"].named_parameters()}
    exec(ROUNDS.partition("for _ in range(4):")[0], names)
    state, local = names["train_round"](names["state"], names["local"])
    raw = {name: nn.Parameter(weight.clone()) for name, weight in first.items() if not name.startswith("frozen")}
    outer = torch.optim.SGD(raw.values(), lr=0.7, momentum=0.9, nesterov=True)
    for name, weight in raw.items():  # one rank: the mean is its own change
        weight.grad = first[name] - local.params[name]
    outer.step()
    for name, weight in state.params.items():
        assert weight.dtype == first[name].dtype
        assert weight.equal(first[name]) == name.startswith("frozen")
        torch.testing.assert_close(weight, raw.get(name, first[name]).detach())


def test_a_process_that_comes_after_the_group_says_so():
    names = {}
    exec(cookbook.SETUP, names)
    exec(RESTARTS.partition("def alone")[0], names)
    store = distributed.HashStore()
    store.add("3/here", 2)
    store.set("3/size", "2")
    with pytest.raises(
        SystemExit, match=r"process 2 came after the 2 of the group: raise patience above 5.0 seconds"
    ):
        names["join"](store, 3, 5.0)


def test_a_group_that_cannot_be_formed_is_not_destroyed():
    names = {}
    exec(cookbook.SETUP, names)
    exec(RESTARTS.partition("def alone")[0], names)
    calls = []

    def join(*arguments):
        calls.append(arguments)
        raise RuntimeError("no group")

    names["join"] = join
    with pytest.raises(RuntimeError, match="no group"):
        names["train_rounds"](None, ll.init_state(names["model"]), None, distributed.HashStore(), rounds=1)
    assert len(calls) == 10  # attempts


def one_of_three(port, number, folder):
    """Rank 1 is killed in its eighth inner step, in the middle of the second round."""
    store = distributed.TCPStore("localhost", port, is_master=False)
    names = names_in_float64()
    exec(ROUNDS.partition("state = ll.init_state")[0], names)
    names |= {"shard": ll.make_loader(names["train_set"], batch_size=32)}
    exec(RESTARTS.partition("def alone")[0], names)
    whole_step = names["inner_step"]

    def inner_step(local, batch):
        if number == 1 and local.step == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole_step(local, batch)

    names["inner_step"] = inner_step
    starts = []

    def train_round(state, local):
        starts.append(
            (state.step, local.step, distributed.get_world_size(), ll.copy_state(state), ll.copy_state(local))
        )
        return names["train_round"](state, local)

    state = ll.init_state(names["model"], names["outer"])
    local = ll.state.fold_in(ll.init_state(names["model"], names["inner"], epoch_length=8), number)
    state = names["train_rounds"](train_round, state, local, store, rounds=3, patience=2.0)
    torch.save(([each[:3] for each in starts], [each[3:] for each in starts], state), f"{folder}/{number}")


@pytest.mark.slow
def test_a_lost_rank_lets_the_others_begin_the_round_again(tmp_path):
    store = distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    context = get_context("forkserver")
    processes = []
    (tmp_path / "printed").mkdir()
    try:
        for number in range(3):
            environment = {"WORLD_SIZE": "0"}
            arguments = (number, tmp_path / "printed", environment, one_of_three, (store.port, number, str(tmp_path)))
            processes.append(context.Process(target=be_rank, args=arguments))
            processes[-1].start()
        for process in processes:
            process.join(200)
    finally:
        for process in processes:
            process.kill()
    printed = "".join(path.read_text() for path in sorted((tmp_path / "printed").iterdir()))
    assert [process.exitcode for process in processes] == [0, -signal.SIGKILL, 0], printed
    assert printed.count("round 1 begins again") == 2
    assert (printed.count("of 3 in group 0"), printed.count("of 2 in group 1")) == (3, 2)
    ends = []
    for number in (0, 2):
        counts, states, end = torch.load(tmp_path / str(number), weights_only=False)
        assert counts == [(0, 0, 3), (1, 5, 3), (1, 5, 2), (2, 10, 2)]
        for first, again in zip(states[1], states[2], strict=True):
            assert not ll.debug.differences(first, again)
        ends.append(end)
    assert not ll.debug.differences(*ends)
    assert ends[0].step == 3
