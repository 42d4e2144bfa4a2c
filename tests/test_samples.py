"""Number of samples in a batch: one rule, for steps, evaluation, microbatches, ranks, positions and predicates.

The batches are those of torchvision's detection (`tuple(zip(*batch))`), DETR (images padded into an object, and a list
of dicts) and graphs. Expected are a raw loop's gradients, counts and means.
"""

import copy
import dataclasses
import itertools

import pytest
import torch
from ranks import launch
from shared import SGD
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import looplib as ll


class NestedTensor:
    """Images that are padded to one size, as DETR's."""

    def __init__(self, images):
        height, width = (max(image.shape[dim] for image in images) for dim in (1, 2))
        self.tensors = torch.zeros(len(images), 3, height, width).to(images[0].dtype)
        self.mask = torch.ones(len(images), height, width, dtype=torch.bool)
        for tensor, mask, image in zip(self.tensors, self.mask, images, strict=True):
            tensor[:, : image.shape[1], : image.shape[2]] = image
            mask[: image.shape[1], : image.shape[2]] = False


class Graph:
    """As torch_geometric's Data: its length is the number of its attributes."""

    def __init__(self, x, edge_index, y):
        self.x, self.edge_index, self.y = x, edge_index, y

    def __len__(self):
        return 3


@dataclasses.dataclass
class GraphRecord:
    x: torch.Tensor
    edge_index: torch.Tensor
    y: torch.Tensor


class Batch(Graph):
    """As torch_geometric's Batch: the nodes of several graphs in one tensor."""

    def __init__(self, graphs):
        super().__init__(
            torch.cat([g.x for g in graphs]),
            torch.cat([g.edge_index for g in graphs], 1),
            torch.cat([g.y for g in graphs]),
        )
        self.num_graphs = len(graphs)


BOXES = [0, 2, 1, 5, 3, 1, 0, 2]  # of each image; the first one has none


def pictures(count=8):
    """Images of different sizes with their boxes."""
    draw = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(3, 4 + k % 3, 5, generator=draw).double(),
            {"boxes": torch.rand(BOXES[k % 8], 4, generator=draw).double(), "labels": torch.arange(BOXES[k % 8])},
        )
        for k in range(count)
    ]


def graphs(count=5):
    draw = torch.Generator().manual_seed(0)
    return [
        Graph(
            torch.randn(k + 2, 3, generator=draw).double(),
            torch.zeros(2, k, dtype=torch.long),
            torch.ones(1).double() * k,
        )
        for k in range(count)
    ]


def detection(samples):
    return tuple(zip(*samples, strict=True))


def detr(samples):
    images, targets = zip(*samples, strict=True)
    return NestedTensor(images), list(targets)


def of_image(model, image, target):
    """The loss of one image."""
    return (model(image.mean((1, 2))) - len(target["boxes"])).square().mean()


def detection_loss(model, batch):
    """The mean over the images, as a detector's."""
    return torch.stack([of_image(model, image, target) for image, target in zip(*batch, strict=True)]).mean()


def graphs_loss(model, batch):
    return torch.stack([(model(graph.x.mean(0)) - graph.y).square().mean() for graph in batch]).mean()


def linear():
    torch.manual_seed(0)
    return nn.Linear(3, 1).double()


def raw_gradients(model, loss):
    return dict(zip(["weight", "bias"], torch.autograd.grad(loss, [model.weight, model.bias]), strict=True))


@pytest.mark.every_case
@pytest.mark.parametrize("collate", [detection, detr])
def test_a_step_counts_images(collate):
    """And not the channels of the first image, or the boxes in it."""
    model, batch = linear(), collate(pictures(2))

    def loss_fn(model, batch):
        images = batch[0].tensors if collate is detr else batch[0]
        return detection_loss(model, (images, batch[1]))

    out = ll.make_grad_fn(model, loss_fn)(ll.init_state(model), batch)
    assert out.samples == 2


def test_predicates_count_images():
    """`every_n_samples(8)` is true after every second batch of 4."""
    model = linear()
    loader = ll.make_loader(pictures(), batch_size=4, collate_fn=detection, order=ll.data.sequential())
    train_step = ll.make_train_step(ll.make_grad_fn(model, detection_loss), SGD)
    state = ll.init_state(model, SGD, loader=loader)
    steps, counts = [], []
    while state.epoch < 3:
        for batch in loader(state):
            state, _ = train_step(state, batch)
            counts.append(state.samples)
            if ll.predicates.every_n_samples(8)(state):
                steps.append(state.step)
    assert counts == [4, 8, 12, 16, 20, 24]
    assert steps == [2, 4, 6]


def test_a_run_with_another_batch_size_continues_at_the_next_image():
    model, seen = linear(), []
    samples = [(image, {**target, "id": k}) for k, (image, target) in enumerate(pictures(24))]
    train_step = ll.make_train_step(ll.make_grad_fn(model, detection_loss), SGD)
    four, two = (
        ll.make_loader(samples, batch_size=size, collate_fn=detection, order=ll.data.sequential()) for size in (4, 2)
    )
    state = ll.init_state(model, SGD, loader=four)
    for batch in four(state):
        state, _ = train_step(state, batch)
        seen += [target["id"] for target in batch[1]]
        if state.batch == 3:
            break
    state = two.resume(state)
    seen += [target["id"] for batch in two(state) for target in batch[1]]
    assert seen == list(range(24))


@pytest.mark.every_case
@pytest.mark.parametrize("collate", [detection, detr])
def test_an_evaluation_averages_over_images(collate):
    """1.875 where 1.2 is right, if boxes count; and a batch whose first image has no boxes would not count."""
    samples, model = pictures(5), linear()

    def metric_fn(model, batch):
        return {"boxes": torch.tensor([float(len(target["boxes"])) for target in batch[1]]).mean()}

    step, state = ll.make_eval_step(model, metric_fn), ll.init_state(model)
    batches = [collate(samples[:2]), collate(samples[2:3]), collate(samples[3:])]
    scores = ll.evaluate(step, state, batches, rates=True)
    assert scores["boxes"] == pytest.approx(sum(BOXES[:5]) / 5)
    assert scores["samples_per_second"] * scores["seconds"] == pytest.approx(5)
    loader = ll.make_loader(samples, batch_size=2, collate_fn=collate, order=ll.data.sequential())
    assert ll.evaluate(step, state, loader)["boxes"] == pytest.approx(sum(BOXES[:5]) / 5)


@pytest.mark.every_case
@pytest.mark.parametrize("microbatches", [2, 3, 5])
@pytest.mark.parametrize("kind", [lambda graph: graph, lambda graph: GraphRecord(graph.x, graph.edge_index, graph.y)])
def test_a_list_of_graphs_is_cut_between_graphs(kind, microbatches):
    model, batch, seen = linear(), [*map(kind, graphs())], []

    def loss_fn(model, batch):
        seen.append([len(graph.x) for graph in batch])
        return graphs_loss(model, batch)

    out = ll.accumulate(ll.make_grad_fn(model, loss_fn), microbatches)(ll.init_state(model), batch)
    assert [*itertools.chain(*seen)] == [2, 3, 4, 5, 6]
    assert len(seen) == microbatches
    assert out.samples == 5
    torch.testing.assert_close(out.grads, raw_gradients(model, graphs_loss(model, batch)))


@pytest.mark.every_case
@pytest.mark.parametrize("count", [2, 3, 4])  # 3: as many images as channels
def test_images_and_boxes_are_cut_between_images(count):
    model, batch = linear(), detection(pictures(count))
    out = ll.accumulate(ll.make_grad_fn(model, detection_loss), size=1)(ll.init_state(model), batch)
    torch.testing.assert_close(out.grads, raw_gradients(model, detection_loss(model, batch)))


def test_columns_in_a_list_are_cut_as_columns():
    """As default_collate returns ((view, view), label)."""
    model, views, labels = linear(), torch.randn(2, 7, 3).double(), torch.randn(7).double()

    def loss_fn(model, batch):
        (one, other), labels = batch
        return (model(one + other).squeeze(1) - labels).square().mean()

    batch = [[*views], labels]
    out = ll.accumulate(ll.make_grad_fn(model, loss_fn), 3)(ll.init_state(model), batch)
    assert out.samples == 7
    torch.testing.assert_close(out.grads, raw_gradients(model, loss_fn(model, batch)))


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (detr(pictures(4)), r"batch\[0\] is a NestedTensor, an object that cannot be cut"),
        # Three images of three channels, or three columns of three rows.
        (
            {"image": [torch.zeros(3, 4, 4)] * 3, "y": torch.zeros(3)},
            r"batch\['image'\] is a list of 3 whose items have 3",
        ),
        ([{"x": torch.zeros(2, 3)}, {"y": torch.zeros(2)}], "batch is a list of 2 whose items have 2 rows each"),
    ],
)
def test_what_could_be_cut_in_two_ways_is_refused(batch, words):
    model = linear()
    grad_fn = ll.make_grad_fn(model, lambda model, batch: model.weight.sum())
    with pytest.raises(ValueError, match=words):
        ll.accumulate(grad_fn, 2)(ll.init_state(model), batch)


# `count_samples=` is given once


def num_graphs(batch):
    return batch.num_graphs


def sum_over_nodes(model, batch):
    """The mean over graphs of a sum over nodes, as of a pooling layer."""
    return model(batch.x).sum() / batch.num_graphs


def test_functions_around_a_gradient_function_count_as_it_does():
    model, raw, batch = linear(), linear(), Batch(graphs())
    grad_fn = ll.make_grad_fn(model, sum_over_nodes, count_samples=num_graphs)
    state = ll.init_state(model, SGD)
    for wrapped in (
        grad_fn,
        ll.grads.map_batch(grad_fn, lambda state, batch: batch),
        ll.accumulate(grad_fn, 1),
        ll.grads.reduce_gradients(ll.accumulate(grad_fn)),
    ):
        given = [Batch(graphs()[:2]), Batch(graphs()[2:])] if "reduce" in repr(wrapped) else batch
        assert wrapped(state, given).samples == 5
        after, _ = ll.make_train_step(wrapped, SGD)(state, given)
        assert (after.samples, after.batch_samples) == (5, 5)
        torch.testing.assert_close(wrapped(state, given).grads, raw_gradients(raw, sum_over_nodes(raw, batch)))
    with pytest.raises(ValueError, match="cannot be cut: its parts would have 5, 5"):
        ll.accumulate(grad_fn, 2)(state, batch)
    with pytest.raises(ValueError, match="give count_samples= to make_grad_fn alone"):
        ll.accumulate(grad_fn, 2, count_samples=num_graphs)


def test_accumulate_notices_a_gradient_function_that_counts_differently():
    model = linear()
    grad_fn = ll.make_grad_fn(model, sum_over_nodes, count_samples=num_graphs)
    mapped = ll.grads.map_batch(grad_fn, lambda state, batch: Batch([*batch, *batch]))
    with pytest.raises(ValueError, match=r"accumulate counts 5 samples .* and the grad_fn .* around 10: give"):
        ll.accumulate(mapped, 2)(ll.init_state(model), graphs())
    mapped = ll.grads.map_batch(grad_fn, lambda state, batch: Batch(batch))
    out = ll.accumulate(mapped, 2)(ll.init_state(model), graphs())  # whose batches are lists
    assert ll.grads.reduce_gradients(mapped)(ll.init_state(model), graphs()).samples == out.samples == 5
    torch.testing.assert_close(out.grads, raw_gradients(model, sum_over_nodes(model, Batch(graphs()))))


def test_an_evaluation_counts_as_its_step_does():
    model = linear()
    batches = [Batch(graphs()[:4]), Batch(graphs()[4:])]
    metric_fn = lambda model, batch: {"y": batch.y.mean()}  # noqa: E731
    step = ll.make_eval_step(model, metric_fn, count_samples=num_graphs)
    state = ll.init_state(model)
    for one in (step, ll.evaluation.split_on_oom(step), ll.compile_step(step, backend="eager")):
        if one is step or "split" in repr(one):
            scores = ll.evaluate(one, state, batches, rates=True)
            assert scores["samples_per_second"] * scores["seconds"] == pytest.approx(5)
            assert scores["y"] == pytest.approx(2)  # (0 + 1 + 2 + 3 + 4) / 5
    with pytest.raises(TypeError, match=r"cannot count the samples in a Batch.*make_eval_step"):
        ll.evaluate(ll.make_eval_step(model, metric_fn), state, batches)


def test_lists_are_cut_for_what_does_not_fit_and_in_checks():
    model, batch = linear(), detection(pictures(5))
    state = ll.init_state(model)
    predict_step = ll.make_predict_step(
        model, lambda model, batch: torch.stack([model(image.mean((1, 2))) for image in batch[0]])
    )
    expected = torch.stack([model(image.mean((1, 2))) for image in batch[0]]).detach()
    (rows,) = ll.predict(ll.evaluation.split_on_oom(predict_step, 2), state, [batch])
    torch.testing.assert_close(rows, expected)
    eval_step = ll.make_eval_step(model, lambda model, batch: {"loss": detection_loss(model, batch)})
    loss = detection_loss(model, batch).item()
    assert ll.evaluate(ll.evaluation.split_on_oom(eval_step, 2), state, [batch])["loss"] == pytest.approx(loss)
    grad_fn = ll.make_grad_fn(model, detection_loss)
    ll.testing.assert_microbatches_equal_batch(grad_fn, state, batch)
    ll.testing.assert_samples_independent(predict_step, state, batch)
    worst = ll.debug.worst_samples(grad_fn, state, batch, range(5))
    norms = [
        torch.cat([grad.flatten() for grad in raw_gradients(model, of_image(model, *sample)).values()]).norm()
        for sample in pictures(5)
    ]
    assert [score.index for score in worst] == sorted(range(5), key=lambda k: -norms[k])


def test_per_sample_and_contrastive_gradients_count_as_they_are_told():
    model = nn.Linear(3, 2).double()
    state, rows = ll.init_state(model), torch.randn(6, 3).double()
    constant = torch.ones(2).double()
    batch = {"x": rows, "constant": constant}
    count = lambda batch: len(batch["x"])  # noqa: E731
    for options, words in (({}, "has 6, .* has 2"), ({"count_samples": count}, "6 samples")):
        grad_fn = ll.contrib.make_per_sample_grad_fn(model, lambda model, b: model(b["x"]).mean(), **options)
        with pytest.raises(ValueError, match=words):
            grad_fn(state, batch)

    def embed(model, views):
        return model(views[0]), model(views[1])

    def loss(embeddings):
        return (embeddings[0] @ embeddings[1].T).square().mean()

    pairs = [(row, row + 1) for row in rows]  # a list of pairs of vectors: 2 samples or 3 or 6
    grad_fn = ll.contrib.make_contrastive_grad_fn(
        model,
        lambda model, pairs: embed(model, [torch.stack(views) for views in zip(*pairs, strict=True)]),
        loss,
        microbatches=4,
        count_samples=len,
    )
    out = grad_fn(state, pairs)
    value = loss(embed(model, (rows, rows + 1)))
    expected = dict(zip(["weight", "bias"], torch.autograd.grad(value, [model.weight, model.bias]), strict=True))
    assert out.samples == 6
    torch.testing.assert_close(out.grads, expected)


@pytest.mark.every_case
@pytest.mark.parametrize("wrap", [lambda step: ll.compile_step(step, backend="eager"), lambda step: step])
def test_a_compiled_step_counts_the_same(wrap):
    model = linear()
    batch = {"x": torch.randn(6, 3).double(), "classes": ["a", "b"], "scale": 0.5}
    grad_fn = ll.make_grad_fn(model, lambda model, b: model(b["x"]).mean(), count_samples=lambda b: len(b["x"]))
    step = wrap(ll.make_train_step(grad_fn, SGD))
    state, _ = step(ll.init_state(model, SGD), batch)
    assert state.samples == 6


def test_members_count_the_same():
    model, batch = linear(), {"x": torch.randn(6, 3).double(), "scale": 0.5}
    step = ll.vmap_step(ll.make_train_step(ll.make_grad_fn(model, lambda model, b: model(b["x"]).mean()), SGD))
    states = ll.transforms.stack_states([ll.init_state(model, SGD, seed=seed) for seed in range(2)])
    assert step(states, batch)[0].samples == 6


# Ranks


def train_on_two_ranks():
    with ll.distributed.setup(timeout=60):
        rank = ll.distributed.rank()
        own = detection(pictures(3)[:2] if rank == 0 else pictures(3)[2:])  # 2 images and 1
        raw = DistributedDataParallel(linear())
        (detection_loss(raw, own) * len(own[0]) * 2 / 3).backward()  # DDP divides by 2, and the images are 3
        model = DistributedDataParallel(linear())
        grad_fn, state = ll.make_grad_fn(model, detection_loss), ll.init_state(model, SGD)
        before = copy.deepcopy(dict(state.params))
        state, metrics = ll.make_train_step(grad_fn, SGD, donate=True)(state, own)
        assert (state.samples, state.batch_samples) == (3, 3)
        for name, param in raw.module.named_parameters():
            torch.testing.assert_close(state.params[name], before[name] - 0.1 * param.grad)
        whole = detection_loss(linear(), detection(pictures(3)))
        assert ll.compute(ll.distributed.reduce(metrics))["loss"] == pytest.approx(whole.item())

        # reduce_gradients, where rank 0 has images without boxes: its batch is not empty.
        samples = pictures(7)
        own = detr([samples[0], samples[6]] if rank == 0 else samples[1:2])
        loss_fn = lambda model, batch: detection_loss(model, (batch[0].tensors, batch[1]))  # noqa: E731
        model = linear()
        grad_fn = ll.grads.reduce_gradients(ll.make_grad_fn(model, loss_fn))
        out = grad_fn(ll.init_state(model), own)
        losses = [of_image(model, image, target) for image, target in zip(own[0].tensors, own[1], strict=True)]
        sums = [grad / 3 for grad in raw_gradients(model, sum(losses)).values()]
        for grad in sums:
            torch.distributed.all_reduce(grad)
        torch.testing.assert_close([*out.grads.values()], sums)
        assert out.samples == 3

        # An evaluation and predictions, each sample of which comes once, from the rank that has it.
        loader = ll.make_loader(pictures(5), batch_size=3, collate_fn=detection, order=ll.data.sequential())
        alone, state = linear(), ll.init_state(linear())
        step = ll.make_eval_step(alone, lambda model, batch: {"loss": detection_loss(model, batch)})
        expected = torch.stack([of_image(alone, *sample) for sample in pictures(5)]).mean().item()
        assert ll.evaluate(step, state, loader)["loss"] == pytest.approx(expected)
        predict_step = ll.make_predict_step(
            alone, lambda model, batch: torch.stack([model(image.mean((1, 2))) for image in batch[0]])
        )
        rows = torch.cat(list(ll.predict(predict_step, state, loader)))
        torch.testing.assert_close(
            rows, torch.stack([alone(image.mean((1, 2))) for image, _ in pictures(5)]).detach()
        )


def test_two_ranks_weigh_their_images():
    launch(2, train_on_two_ranks)
