"""LoRA with peft: checkpoints and folders of adapters, merging, several adapters, and a run that is stopped and resumed."""

import copy

import peft
import pytest
import torch
import transformers
from shared import equal
from tokenizers import Tokenizer, models

import looplib as ll

# peft asks transformers for an attribute by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
adamw = ll.optimizer(torch.optim.AdamW, lr=ll.schedules.warmup_cosine(1e-2, warmup=2, total=20))


def base_model(width=32, vocabulary=64):
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=vocabulary, **sizes))


def adapted(*names, base=None, **options):
    """The base model with adapters of these names; the first is active."""
    settings = {"r": 2, "lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj"], **options}
    lora = peft.LoraConfig(task_type="CAUSAL_LM", **settings)
    base = base or base_model()
    torch.manual_seed(1)
    model = peft.get_peft_model(base, lora, adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, lora)
    return model.train()


ROWS = [{"input_ids": torch.randint(64, (12,), generator=torch.Generator().manual_seed(row))} for row in range(24)]
LOADER = ll.make_loader([{**row, "labels": row["input_ids"]} for row in ROWS], batch_size=8)
BATCH = {"input_ids": torch.stack([row["input_ids"] for row in ROWS[:4]])}


def trainable(name, tensor):
    return tensor.requires_grad


def started(model, donate=True):
    """A step and a state for the adapter that is active."""
    step = ll.make_train_step(ll.make_grad_fn(model, ll.losses.model_loss), adamw, donate=donate)
    return step, ll.init_state(model, adamw, epoch_length=len(LOADER))


def trained(step, state, until):
    """Train to this step, through as many epochs as that takes."""
    while state.step < until:
        for batch in LOADER(state):
            state, _ = step(state, batch)
            if state.step == until:
                break
    return state


@torch.no_grad()
def logits(model, batch=BATCH):
    return model.eval()(**batch).logits


@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["lm_head"]}], ids=["adapter", "and a module"])
def test_a_run_stopped_within_an_epoch_resumes_from_its_adapter_with_the_bits_of_one_that_was_not(tmp_path, options):
    expected = trained(*started(adapted("default", **options)), until=7)
    ckpt = ll.checkpoint_io(tmp_path, select=trainable)
    ckpt.save(trained(*started(adapted("default", **options)), until=4))
    step, state = started(adapted("default", **options))
    with torch.no_grad():
        for name in [name for name, tensor in state.params.items() if tensor.requires_grad]:
            state.params[name].normal_()  # whatever the adapter began with
    state = ckpt.restore(state)
    assert (state.epoch, state.batch) == (1, 1)
    state = trained(step, state, until=7)
    assert equal(state.params, expected.params)
    moments, reference = (one.opt_state["state"] for one in (state, expected))
    assert all(equal(moments[name], reference[name]) for name in reference)


@pytest.mark.parametrize("donate", [True, False])
def test_a_folder_of_adapter_and_tokenizer_is_the_model_of_the_state(tmp_path, donate):
    base_model().save_pretrained(tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = adapted("default", base=base)
    first = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    state = trained(*started(model, donate), until=3)
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "loop": 1}, unk_token="[UNK]"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")

    ll.checkpoint.save_pretrained(model, state, tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    if not donate:  # the module still holds the weights that the run began with
        assert equal(dict(model.named_parameters()), first)

    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    ll.bind(model, state)
    assert torch.equal(logits(loaded), logits(model))
    assert not torch.equal(logits(loaded), logits(base_model()))
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "adapter")("loop")["input_ids"] == [1]
    assert (tmp_path / "adapter/adapter_model.safetensors").stat().st_size < 10_000


def test_the_merged_model_gives_the_outputs_of_the_adapted_one(tmp_path):
    model = adapted("default").double()
    state = trained(*started(model), until=3)
    expected = logits(model)
    merged = copy.deepcopy(model).merge_and_unload()
    assert type(merged) is transformers.LlamaForCausalLM
    torch.testing.assert_close(logits(merged), expected, rtol=1e-12, atol=1e-12)
    merged.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert torch.equal(logits(loaded), logits(merged))
    # A copy was merged, so the run continues with the bits of one that never was.
    reference = adapted("default").double()
    expected = trained(*started(reference), until=5)
    step, _ = started(model.train())
    state = trained(step, state, until=5)
    assert equal(state.params, expected.params)
    # A run whose own model is merged is refused.
    model.merge_and_unload()
    with pytest.raises(ValueError, match="does not depend on any trainable parameter"):
        trained(step, state, until=6)


def test_one_adapter_is_trained_after_the_other_and_the_second_run_resumes(tmp_path):
    def begun():
        """The first adapter as its own run left it, and a step and a state for the second."""
        model = adapted("first", "second")
        _, state = started(model)
        first.restore(state)  # into the module
        model.set_adapter("second")
        return model, *started(model)

    model, first = adapted("first", "second"), ll.checkpoint_io(tmp_path / "first", select=trainable)
    state = trained(*started(model), until=3)
    first.save(state)
    one = logits(model)
    model.train().set_adapter("second")
    kept = {name: tensor.detach().clone() for name, tensor in model.named_parameters() if ".first." in name}
    step, state = started(model)
    second = ll.checkpoint_io(tmp_path / "second", select=trainable)
    state = trained(step, state, until=4)
    second.save(state)
    expected = trained(step, state, until=6)
    assert equal({name: expected.params[name] for name in kept}, kept)

    other, step, state = begun()
    assert equal(trained(step, second.restore(state), until=6).params, expected.params)
    assert torch.equal(logits(other), logits(model))
    other.set_adapter("first")
    assert torch.equal(logits(other), one)
    # With a first adapter that has not been trained, the checkpoint of the second alone is refused.
    model = adapted("first", "second")
    model.set_adapter("second")
    _, state = started(model)
    with pytest.raises(ValueError, match=r"others: .*\.first\..*load the base model"):
        second.restore(state)


def test_a_base_model_that_merging_has_rounded_is_named(tmp_path):
    model = adapted("default")
    ckpt = ll.checkpoint_io(tmp_path, select=trainable)
    step, state = started(model)
    state = trained(step, state, until=2)
    ckpt.save(state)
    model.merge_adapter()  # writes through .data, which torch does not count
    model.unmerge_adapter()
    state = trained(step, state, until=3)
    ckpt.save(state)
    with pytest.raises(ValueError, match=r"load the base model.*copy\.deepcopy"):
        ckpt.restore(started(adapted("default"))[1])
    assert ckpt.restore(started(adapted("default"))[1], 2).step == 2
