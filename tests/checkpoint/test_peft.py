"""LoRA with peft: checkpoints and folders of adapters, several adapters, and a run that is stopped and resumed."""

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


def test_a_folder_of_adapter_and_tokenizer_is_the_model_of_the_state(tmp_path):
    base_model().save_pretrained(tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = adapted("default", base=base)
    first = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    state = trained(*started(model, donate=False), until=3)
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "loop": 1}, unk_token="[UNK]"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")

    ll.checkpoint.save_pretrained(model, state, tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    assert equal(dict(model.named_parameters()), first)  # the module still holds the weights that the run began with

    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    ll.bind(model, state)
    assert torch.equal(logits(loaded), logits(model))
    assert not torch.equal(logits(loaded), logits(base_model()))
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "adapter")("loop")["input_ids"] == [1]
    assert (tmp_path / "adapter/adapter_model.safetensors").stat().st_size < 10_000
