"""The names that the code of an answer has at hand, and the processes that it runs in."""

import io
import socket
from contextlib import redirect_stdout

import pytest
import torch
from torch import distributed, nn
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

import looplib as ll


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.fixture
def loss_fn():
    def loss_fn(model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y)

    return loss_fn


@pytest.fixture
def metric_fn():
    def metric_fn(model, batch):
        x, y = batch
        logits = model(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": ll.accuracy(logits, y)}

    return metric_fn


def examples(count):
    """Four numbers, and which of the first three is largest."""
    x = torch.randn(count, 4)
    return torch.utils.data.TensorDataset(x, x[:, :3].argmax(1))


@pytest.fixture
def train_set():
    return examples(40)


@pytest.fixture
def test_set():
    return examples(25)


@pytest.fixture
def test_batches(test_set):
    """Batches of 10, 10 and 5."""
    return [test_set[first : first + 10] for first in range(0, 25, 10)]


@pytest.fixture
def batch(train_set):
    return train_set[:12]


@pytest.fixture
def grad_fn(model, loss_fn):
    return ll.make_grad_fn(model, loss_fn)


@pytest.fixture
def optimizer():
    return ll.optimizer(torch.optim.AdamW, lr=1e-2)


@pytest.fixture
def train_step(grad_fn, optimizer):
    return ll.make_train_step(grad_fn, optimizer)


@pytest.fixture
def eval_step(model, metric_fn):
    return ll.make_eval_step(model, metric_fn)


@pytest.fixture
def predict_step(model):
    return ll.make_predict_step(model, lambda model, batch: model(batch[0]))


@pytest.fixture
def loader(train_set):
    """Five batches of eight in an epoch."""
    return ll.make_loader(train_set, batch_size=8, seed=0)


@pytest.fixture
def state(model, optimizer, loader):
    return ll.init_state(model, optimizer, seed=0, loader=loader)


@pytest.fixture
def ckpt():
    return ll.checkpoint_io("runs/small")


@pytest.fixture
def rows():
    """Rows passed to `log`."""
    return []


@pytest.fixture
def log(rows):
    return ll.log.record(rows)


@pytest.fixture
def train(train_step, loader):
    """`train(state, steps)`: the states after each step; with `train_step=`, using a different step."""

    def train(state, steps, train_step=train_step):
        states = []
        while len(states) < steps:
            for batch in loader(state):
                state, _ = train_step(state, batch)
                states.append(state)
                if len(states) == steps:
                    break
        return states

    return train


@pytest.fixture
def tokens():
    """Three texts of ten tokens."""
    return torch.randint(0, 50, (3, 10))


@pytest.fixture
def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropouts, bos_token_id=0, eos_token_id=0))


@pytest.fixture
def lm_loss():
    def lm_loss(model, tokens):
        return ll.next_token_loss(model(input_ids=tokens).logits, tokens)

    return lm_loss


@pytest.fixture
def terminal():
    """A file that is no terminal."""
    return io.StringIO()


@pytest.fixture
def torchrun(monkeypatch):
    """The environment that `torchrun --nproc-per-node 1` sets."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    names = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in names.items():
        monkeypatch.setenv(name, str(value))


class Classifier(nn.Module):
    """As models for fastNLP are written: arguments by the names of the batch, and a dict as the output."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, words, target=None):
        logits = self.linear(words)
        return {"pred": logits} if target is None else {"pred": logits, "loss": F.cross_entropy(logits, target)}

    def train_step(self, words, target):
        return {"loss": 2 * self(words, target)["loss"]}

    def evaluate_step(self, words):
        return {"pred": self(words)["pred"].argmax(1)}


@pytest.fixture
def classifier():
    return Classifier()


@pytest.fixture
def words(batch):
    return {"words": batch[0], "target": batch[1]}


@pytest.fixture
def rank_0_of_2():
    """The first of two processes, whose messages go nowhere."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    distributed.destroy_process_group()


@pytest.fixture
def lengths():
    """Those of the 40 examples, in tokens."""
    return torch.randint(1, 100, (40,)).tolist()


@pytest.fixture
def printed():
    """Standard output."""
    with redirect_stdout(io.StringIO()) as stream:
        yield stream
