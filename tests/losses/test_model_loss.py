"""Losses that models compute themselves, against the whole batch and against the real Trainer."""

import pytest
import torch
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
