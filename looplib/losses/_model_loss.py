"""Losses that models compute themselves, as a sum and a count, and the columns of a batch that a model takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from looplib._core.checks import check, warn
from looplib._core.mappings import without
from looplib._core.misuse import warn_of_packed
from looplib.metrics import Mean


def model_inputs(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Columns of a batch that the model's `forward` takes, to call it with.

    >>> import looplib as ll, torch
    >>> class Net(torch.nn.Module):
    ...     def forward(self, pixels, mask=None):
    ...         return pixels.sum()
    >>> ll.losses.model_inputs(Net(), {"pixels": torch.ones(2), "mask": None})
    {'pixels': tensor([1., 1.]), 'mask': None}

    It looks through DDP, peft and torch.compile. If it leaves a column out, it warns about it by name. If `forward` has
    `**kwargs` beside other arguments, these get no columns, as in transformers' Trainer. If it has `**kwargs` alone, they
    get all.

    Args:
        model: the model that will be called with the result: `model(**ll.losses.model_inputs(model, batch))`.
        batch: columns by name.

    Raises:
        TypeError: the batch is not a mapping.
    """
    check_columns(batch)
    inner: Any = innermost(model)
    takes = arguments_of(type(inner).forward)
    if takes == {"**"}:
        return dict(batch)
    if left_out := [name for name in batch if name not in takes]:
        named = ", ".join(sorted(takes - {"**"})) or "no arguments by name"
        warn(f"columns left out of the batch: {', '.join(left_out)}; {type(inner).__name__}.forward takes {named}")
    return without(batch, left_out)


def check_columns(batch: Any) -> None:
    kind = type(batch).__name__
    check(isinstance(batch, Mapping), f"the batch is a {kind}; give a dict of arguments of the model", TypeError)


def innermost(model: Any) -> Any:
    """The model within peft, DDP or torch.compile."""
    return _layers(model)[-1]


def _layers(model: Any) -> list[Any]:
    """The model and what it wraps, from the outside in."""
    layers = [model]
    while (inner := _inner(layers[-1])) is not None:
        layers.append(inner)
    return layers


def _inner(model: Any) -> Any:
    if callable(get_base_model := getattr(model, "get_base_model", None)):  # peft
        return get_base_model()
    if compiled := getattr(model, "_orig_mod", None):
        return compiled
    return getattr(model, "module", None) if isinstance(model, nn.parallel.DistributedDataParallel) else None


@lru_cache(64)  # asked for each batch; a notebook that defines a class again and again keeps 64 of them
def arguments_of(forward: Callable[..., Any]) -> frozenset[str]:
    """Names of the arguments of a `forward`, and "**" if it takes any other name."""
    parameters = [*inspect.signature(forward).parameters.values()][1:]  # after self
    return frozenset("**" if p.kind is p.VAR_KEYWORD else p.name for p in parameters)


def model_loss(model: nn.Module, batch: Mapping[str, Any]) -> Mean:
    """Loss of a transformers model, weighted by what it averages over: tokens or samples.

    >>> import looplib as ll, torch
    >>> from transformers import BertConfig, BertForTokenClassification
    >>> sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    >>> model = BertForTokenClassification(BertConfig(vocab_size=9, **sizes))
    >>> batch = {"input_ids": torch.tensor([[1, 2, 3], [4, 5, 0]]), "labels": torch.tensor([[0, 1, 1], [0, 1, -100]])}
    >>> ll.losses.model_loss(model, batch).weight
    tensor(5)
    >>> grad_fn = ll.accumulate(ll.make_grad_fn(model, ll.losses.model_loss), microbatches=2)

    Pass it to `make_grad_fn` as it is. The gradient is then that of the mean over all tokens with a label, whatever the
    microbatches and ranks. With `lambda model, batch: model(**batch).loss`, a microbatch with few tokens would count as
    much as one with many.

    The model is called with all columns of the batch as arguments, with `num_items_in_batch` if it takes that, and without
    a cache, so that documents packed into one row do not see each other. A column that its `forward` does not name goes into
    the `**kwargs` of `forward`, where most models ignore it without a message, or is a TypeError if there are none.
    `model_inputs` warns about such columns.

    The weight is the number of labels that are not -100. Causal models predict the next token, so the first label of
    each row is not counted, but within peft's prompt tuning and p-tuning, whose virtual tokens predict it. For regression
    and for several labels per sample, the weight is the number of samples. Microbatches and ranks without labels do not
    count. If there are no labels in a whole step, its gradient is zero and its loss is 0 / 0, NaN in the log.

    In rows of several documents, models keep these apart only if they take `position_ids` and get no `attention_mask`
    (b, length). A warning says if a batch has both, or if the `forward` of the model names no `position_ids`. It looks at
    the first, second, fourth, ... batch of a model, and not while a step is traced (`compile_step`), which has no values.

    Args:
        model: a transformers model for causal or masked language modeling, sequence-to-sequence generation, or the
            classification of tokens, sequences or images; also within DDP or peft.
        batch: arguments of the model by name, `labels` among them.

    Raises:
        TypeError: the model is of another kind, or peft changes its labels in another way, so the count is unknown: write a
            loss function that returns `ll.Mean(torch.where(count > 0, loss * count, 0.0), count)`, since the mean over no
            labels may be NaN. Or the batch is not a mapping.
        KeyError: the batch has no labels.

    Source: transformers' `num_items_in_batch`, as its Trainer counts it, but for one case. If a causal model's class sets no
    `loss_type`, as that of GPT2LMHeadModel, the Trainer (5.23) counts the first label of each row too, which is never
    predicted. In rows of `n` labels, its loss and its gradient are then (n - 1) / n of these. They agree if
    `model.loss_type = "ForCausalLM"` is set before the Trainer is made.
    """
    check_columns(batch)
    layers = _layers(model)
    base = layers[-1]
    count = _count_of(layers)(base, batch)
    arguments = dict(batch)
    takes = arguments_of(type(base).forward)
    warn_of_packed(base, batch, takes)
    if takes & {"num_items_in_batch", "**"} and getattr(base, "accepts_loss_kwargs", True):
        arguments["num_items_in_batch"] = count.clamp(min=1)
    if "use_cache" in takes:  # with a cache, transformers lets documents that are packed into a row see each other
        arguments.setdefault("use_cache", False)
    loss = model(**arguments).loss
    count = count.to(loss.device)
    return Mean(torch.where(count > 0, loss * count, 0.0), count)  # a mean over no labels may be NaN


def _count_of(layers: list[Any]) -> Callable[[Any, Mapping[str, Any]], Tensor]:
    """Function that counts what the model's loss averages over."""
    model = layers[-1]
    cls: Any = type(model)
    calls_function = "loss_function" in _names_in(cls.forward)
    rule = _BY_FUNCTION.get(model.loss_function.__name__) if calls_function else _BY_CLASS.get(_kind_of(model))
    name = cls.__name__
    if prompts := _prompts_of(layers):
        name = f"{name} with {prompts} of peft"
        rule = None if rule is None or prompts not in _WITH_PROMPTS else _WITH_PROMPTS[prompts].get(rule, rule)
    if rule is not None:
        return rule
    raise TypeError(
        f"model_loss cannot know what the loss of {name} averages over; write\n    def loss_fn(model, batch):\n"
        "        loss = model(**batch).loss\n"
        "        count = ...  # the labels, tokens or samples that it averages over, as a tensor\n"
        "        return ll.Mean(torch.where(count > 0, loss * count, 0.0), count)"
    )


def _prompts_of(layers: list[Any]) -> str:
    """The kind of peft's prompt learning that is around the model, if any."""
    for layer in layers:
        config: Any = getattr(layer, "active_peft_config", None)
        if getattr(config, "is_prompt_learning", False) and not getattr(layer, "_adapters_disabled", False):
            return str(config.peft_type.value)
    return ""


def _kind_of(model: Any) -> str:
    """The end of the class's name if it tells what the loss averages over."""
    kind = next(filter(type(model).__name__.endswith, _BY_CLASS), "")
    of_decoder = kind == "ForConditionalGeneration" and not model.config.is_encoder_decoder
    return "" if of_decoder else kind


@lru_cache(64)
def _names_in(forward: Callable[..., Any]) -> frozenset[str]:
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return frozenset(code.co_names if code else ())


def _next_labels(model: Any, batch: Mapping[str, Any]) -> Any:
    return (batch["labels"][..., 1:] != -100).sum()


def _all_labels(model: Any, batch: Mapping[str, Any]) -> Any:
    return (batch["labels"] != -100).sum()


def _samples(model: Any, batch: Mapping[str, Any]) -> Any:
    labels, config = batch["labels"], model.config
    kind = config.problem_type or ("single_label_classification" if config.num_labels > 1 else "regression")
    if kind == "single_label_classification" and not labels.is_floating_point():
        return (labels != -100).sum()
    return torch.tensor(len(labels), device=labels.device)


# Models that call transformers' loss functions, by the names of these.
_BY_FUNCTION = {
    "ForCausalLMLoss": _next_labels,
    "ForMaskedLMLoss": _all_labels,
    "ForTokenClassification": _all_labels,
    "ForSequenceClassificationLoss": _samples,
}

# Kinds of peft's prompt learning, with rules that they change. Virtual tokens of inputs predict each row's first label;
# those of a cache predict none. Another kind, such as CPT, has a loss of its own.
_PREDICTED = {_next_labels: _all_labels}
_WITH_PROMPTS: dict[str, dict[Any, Any]] = {
    "PROMPT_TUNING": _PREDICTED,
    "MULTITASK_PROMPT_TUNING": _PREDICTED,
    "P_TUNING": _PREDICTED,
    "PREFIX_TUNING": {},
    "CARTRIDGE": {},
}

# Models with a cross-entropy of their own. Those for causal language modeling are missing: some shift the labels.
_BY_CLASS = {
    "ForConditionalGeneration": _all_labels,  # if they have an encoder and a decoder
    "ForMaskedLM": _all_labels,
    "ForTokenClassification": _all_labels,
    "ForSequenceClassification": _samples,
    "ForImageClassification": _samples,
    "MarianMTModel": _all_labels,
    "EncoderDecoderModel": _all_labels,  # of text, speech or images
}
