"""Losses that models compute themselves, against the whole batch and against the real Trainer."""

import textwrap

import pytest
import torch
from ranks import launch
from torch import nn
from transformers import (
    AutoModelForSeq2SeqLM,
    BartConfig,
    BartForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MarianConfig,
    MarianMTModel,
    T5Config,
)

import looplib as ll

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
VOCAB = 11


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert(cls, **settings):
    return cls(BertConfig(vocab_size=VOCAB, max_position_embeddings=16, **SIZES, **NO_DROPOUT, **settings))


def t5():
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    config = T5Config(vocab_size=VOCAB, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, **sizes)
    return AutoModelForSeq2SeqLM.from_config(config)


def marian():
    sizes = {"layers": 1, "attention_heads": 2, "ffn_dim": 16}
    sizes = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sizes.items()}
    ids = {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1, "forced_eos_token_id": 1}
    return MarianMTModel(
        MarianConfig(vocab_size=VOCAB, d_model=16, max_position_embeddings=16, dropout=0.0, **sizes, **ids)
    )


def berts():
    halves = [BertConfig(vocab_size=VOCAB, max_position_embeddings=16, **SIZES, **NO_DROPOUT) for _ in range(2)]
    config = EncoderDecoderConfig.from_encoder_decoder_configs(*halves)
    config.pad_token_id = config.decoder_start_token_id = 0
    model = EncoderDecoderModel(config)
    model.encoder.pooler.requires_grad_(False)  # which the loss does not use
    return model


def gpt2():
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_positions=16, n_embd=16, n_layer=1, n_head=2, **no_dropout))


def llama():
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, max_position_embeddings=16, **SIZES))


def tokens():
    """Eight rows of ragged lengths: 1 to 8 labels in each, -100 in the rest."""
    ids = torch.randint(2, VOCAB, (8, 9), generator=torch.Generator().manual_seed(1))
    rest = torch.arange(9) > torch.tensor([[8], [1], [2], [7], [3], [1], [5], [6]])
    return {"input_ids": ids, "attention_mask": (~rest).long(), "labels": ids.masked_fill(rest, -100)}


def classes(of_token):
    batch = tokens()
    labels = batch["labels"] % 3
    batch["labels"] = labels.masked_fill(batch["labels"] == -100, -100) if of_token else labels[:, 0].contiguous()
    return batch


MODELS = {
    "causal": (llama, tokens),
    "causal, with the default loss": (gpt2, tokens),
    "masked": (lambda: bert(BertForMaskedLM), tokens),
    "token classifier": (lambda: bert(BertForTokenClassification, num_labels=3), lambda: classes(True)),
    "sequence classifier": (lambda: bert(BertForSequenceClassification, num_labels=3), lambda: classes(False)),
    "encoder-decoder": (t5, tokens),
    "marian": (marian, tokens),
    "encoder-decoder of two models": (berts, tokens),
}


def made(name):
    torch.manual_seed(0)
    make, batch = MODELS[name]
    return make(), batch()


@pytest.mark.filterwarnings("ignore:Version v4.12.0 introduces a better way:FutureWarning")  # of EncoderDecoderModel
@pytest.mark.parametrize("name", MODELS)
def test_microbatches_have_the_gradient_of_the_whole_batch(name):
    model, batch = made(name)
    model.double()  # though transformers computes the logarithms in float32
    trained = {key: parameter for key, parameter in model.named_parameters() if parameter.requires_grad}
    loss = model(**batch).loss  # the mean over the whole batch, by the model alone
    expected = torch.autograd.grad(loss, list(trained.values()), materialize_grads=True)

    def gradients(loss_fn):
        return ll.accumulate(ll.make_grad_fn(model, loss_fn), 4)(ll.init_state(model), batch).grads

    grads = gradients(ll.losses.model_loss)
    # With accumulation, transformers 5.23 trains models whose forward pass has a **kwargs but ignores num_items_in_batch
    # (BERT, T5) with the sum of the microbatches' gradients, and counts the first label of GPT-2. Whole batches are right.
    torch.testing.assert_close(grads, dict(zip(trained, expected, strict=True)), rtol=1e-4, atol=1e-7)
    if name != "sequence classifier":
        with pytest.warns(UserWarning, match="ll.losses.model_loss"):
            naive = gradients(lambda model, batch: model(**batch).loss)
        assert max((naive[key] - grads[key]).abs().max() for key in grads) > 1e-3


def test_the_weight_is_the_number_of_what_the_models_mean_is_over():
    for name in ("causal", "masked", "token classifier", "sequence classifier"):
        model, batch = made(name)
        labels = batch["labels"][:, 1:] if name == "causal" else batch["labels"]
        loss = ll.losses.model_loss(model.eval(), batch)
        assert loss.weight == len(labels[labels >= 0]), name


def test_regression_and_several_labels_per_sample_count_samples():
    batch = tokens()
    for settings, labels in (
        ({"num_labels": 1}, torch.rand(8)),
        ({"num_labels": 3}, torch.rand(8, 3)),
        ({"num_labels": 2, "problem_type": "regression"}, torch.rand(8, 2)),
    ):
        model = bert(BertForSequenceClassification, **settings).eval()
        loss = ll.losses.model_loss(model, batch | {"labels": labels})
        assert loss.weight == 8
        torch.testing.assert_close(loss.total / 8, model(**(batch | {"labels": labels})).loss)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # read by peft
def test_wrapped_models_are_looked_through(one_process):
    peft = pytest.importorskip("peft")
    model = llama().eval()
    expected = ll.losses.model_loss(model, tokens())
    for wrapped in (
        nn.parallel.DistributedDataParallel(model),
        torch.compile(model, backend="eager"),
        peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])).eval(),  # which begins as the model
    ):
        torch.testing.assert_close(ll.losses.model_loss(wrapped, tokens()), expected)


class Tiny(nn.Module):
    def forward(self, labels):
        return labels


def test_models_whose_average_is_unknown_are_refused_by_name():
    for model, name in (
        (BartForCausalLM(BartConfig(vocab_size=VOCAB, d_model=16, decoder_layers=1)), "BartForCausalLM"),
        (bert(BertForQuestionAnswering), "BertForQuestionAnswering"),  # of two positions
        (Tiny(), "Tiny"),
    ):
        with pytest.raises(TypeError, match=name):
            ll.losses.model_loss(model, tokens())
    with pytest.raises(KeyError, match="labels"):
        ll.losses.model_loss(llama(), {"input_ids": torch.ones(1, 3, dtype=torch.long)})


def without_labels(batch, rows):
    """The batch, whose first rows have no labels."""
    labels = batch["labels"].clone()
    labels[:rows] = -100
    return batch | {"labels": labels}


OF_EACH_KIND = ["causal", "masked", "encoder-decoder", "sequence classifier", "token classifier"]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_a_microbatch_without_labels_does_not_count(name):
    model, batch = made(name)
    model.double()
    batch = without_labels(batch, 4)  # all of the first microbatch
    trained = {key: parameter for key, parameter in model.named_parameters() if parameter.requires_grad}
    loss = model(**batch).loss
    expected = torch.autograd.grad(loss, list(trained.values()), materialize_grads=True)
    state = ll.init_state(model)
    out = ll.accumulate(ll.make_grad_fn(model, ll.losses.model_loss), 2)(state, batch)
    torch.testing.assert_close(out.metrics["loss"].compute().item(), loss.item(), rtol=1e-6, atol=0)
    torch.testing.assert_close(out.grads, dict(zip(trained, expected, strict=True)), rtol=1e-4, atol=1e-7)

    # In the log and in an evaluation, each label counts once, too.
    eval_step = ll.make_eval_step(model, ll.losses.model_loss)
    model.eval()
    halves = [{key: column[part] for key, column in batch.items()} for part in (slice(4), slice(4, 8))]
    value = ll.evaluate(eval_step, state, halves)["loss"]
    assert value == pytest.approx(loss.item(), rel=1e-6)
    window = ll.Window()
    for half in halves:
        window = window.add(eval_step(state, half))
    assert ll.compute(window.metrics())["loss"] == pytest.approx(loss.item(), rel=1e-6)

    # A step without any has no gradient, and a loss of 0 / 0.
    none = ll.make_grad_fn(model, ll.losses.model_loss)(state, halves[0])
    assert none.metrics["loss"].weight == 0
    assert all((grad == 0).all() for grad in none.grads.values())


def ranks_of_which_one_has_no_labels():
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model, batch = made("causal")
    batch = without_labels(batch, 4)
    loss = model(**batch).loss.item()
    own = slice(4) if dist.get_rank() == 0 else slice(4, 8)
    grad_fn = ll.make_grad_fn(nn.parallel.DistributedDataParallel(model), ll.losses.model_loss)
    step = ll.make_train_step(grad_fn, ll.optimizer(torch.optim.SGD, lr=0.1), donate=True)
    state = ll.init_state(model, ll.optimizer(torch.optim.SGD, lr=0.1))
    _, metrics = step(state, {key: column[own] for key, column in batch.items()})
    assert ll.compute(ll.distributed.reduce(metrics))["loss"] == pytest.approx(loss, rel=1e-5)
    dist.destroy_process_group()


@pytest.mark.slow
def test_a_rank_without_labels_does_not_count():
    launch(2, ranks_of_which_one_has_no_labels)


@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_the_loss_function_that_the_refusal_dictates_is_right_without_labels(name):
    with pytest.raises(TypeError) as refused:
        ll.losses.model_loss(Tiny(), tokens())
    lines = str(refused.value).partition("write\n")[2]
    model, batch = made(name)
    code = lines.replace("count = ...", f"count = (batch['labels'][..., {int(name == 'causal')}:] != -100).sum()")
    names = {"ll": ll, "torch": torch}
    exec(textwrap.dedent(code), names)  # as a user copies it
    whole = model.eval()(**(batch := without_labels(batch, 4))).loss.item()
    halves = [{key: column[part] for key, column in batch.items()} for part in (slice(4), slice(4, 8))]
    first, second = (names["loss_fn"](model, half) for half in halves)
    assert first.weight == 0
    assert first.merge(second).compute().item() == pytest.approx(whole, rel=1e-5)


def prompted(model, task_type="CAUSAL_LM", kind="PromptTuningConfig", **settings):
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    return peft.get_peft_model(model, getattr(peft, kind)(task_type=task_type, num_virtual_tokens=3, **settings))


PROMPTS = {
    "prompt tuning": {},
    "p-tuning": {"kind": "PromptEncoderConfig", "encoder_hidden_size": 8},
    "prefix tuning": {"kind": "PrefixTuningConfig"},
}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # read by peft
@pytest.mark.parametrize("name", PROMPTS)
def test_prompt_learning_counts_what_the_wrapped_model_averages_over(name):
    model, batch = llama().double(), tokens()
    model = prompted(model, **PROMPTS[name])
    trained = {key: parameter for key, parameter in model.named_parameters() if parameter.requires_grad}
    loss = model(**batch).loss
    expected = torch.autograd.grad(loss, list(trained.values()))
    state = ll.init_state(model)
    for grad_fn in (
        ll.make_grad_fn(model, ll.losses.model_loss),
        ll.accumulate(ll.make_grad_fn(model, ll.losses.model_loss), 3),
    ):
        out = grad_fn(state, batch)
        torch.testing.assert_close(out.metrics["loss"].compute().item(), loss.item(), rtol=1e-6, atol=0)
        torch.testing.assert_close(out.grads, dict(zip(trained, expected, strict=True)), rtol=1e-4, atol=1e-7)
    with model.disable_adapter():  # without virtual tokens, as for a reference model
        loss = ll.losses.model_loss(model, batch)
        torch.testing.assert_close(loss.total / loss.weight, model(**batch).loss, rtol=1e-6, atol=0)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # read by peft
def test_prompt_learning_whose_loss_is_its_own_is_refused_by_name():
    settings = {"cpt_token_ids": [1, 2, 3], "cpt_mask": [1, 1, 1], "cpt_tokens_type_mask": [1, 2, 4]}
    with pytest.raises(TypeError, match="CPT"):
        ll.losses.model_loss(prompted(llama(), kind="CPTConfig", **settings), tokens())
