"""The configuration of a run is found, and leaves out what nobody may read."""

import argparse
import json
import os
import subprocess
import sys
import types

import orjson
import pytest
import torch

import looplib as ll

HEX = "0123456789abcdef0123456789abcdef01234567"
SECRET = "S3CR3T"


def test_what_is_named_as_a_secret_is_left_out_of_the_command_and_the_rest_is_kept(monkeypatch):
    def command(arguments):
        monkeypatch.setattr(sys, "argv", ["/home/me/train.py", *arguments.split()])
        return ll.log.configuration(ll.TrainState())["command"]

    for secret in (
        f"--token {SECRET}",
        f"--hf-token -{SECRET}",
        f"--hf_token={SECRET}",
        f"-apiKey {SECRET}",
        f"+wandb.api_key={SECRET}",
        f"WANDB_API_KEY={SECRET}",
        f"--aws_secret_access_key {SECRET}",
        f"--db.password {SECRET}",
        f"--passwordHash={SECRET}",
        f"--auth {SECRET}",
        f"--url https://me:{SECRET}@example.org/data",
        f"https://example.org/data?token={SECRET}",
        f"--login hf_aBcDeFgHiJkLmNoP{SECRET}",
    ):
        shown = command(f"--lr 0.1 {secret} --epochs 3")
        assert SECRET not in shown
        assert shown.startswith("train.py --lr 0.1 ")
        assert shown.endswith(" --epochs 3")
        assert "***" in shown
    plain = (
        "--tokenizer gpt2 --max-tokens 512 --num-key 4 --keyboard qwerty --key-dim 64 --pad-token <pad> --eos_token=</s> "
        "data.csv --use-auth-token --name resnet50-imagenet-lr0.001-batch256-augmented data=imagenet/train ./runs/a_b"
    )
    assert command(plain) == f"train.py {plain}"


def settings_of():
    return {"lr": 0.1, "hf_token": SECRET, "nested": [{"apiKey": SECRET}], "url": f"s3://me:{SECRET}@x", "sha": HEX}


KEPT = {"lr": 0.1, "hf_token": "***", "nested": [{"apiKey": "***"}], "url": "s3://***@x", "sha": HEX}


def test_settings_given_by_name_leave_them_out_too():
    found = ll.log.configuration(
        ll.TrainState(), args=argparse.Namespace(**settings_of()), password=SECRET, log=ll.console()
    )
    assert found["args"] == KEPT
    assert (found["password"], found["log"]) == ("***", "console()")


def test_nothing_has_to_be_listed(tmp_path):
    model = torch.nn.Linear(2, 1)
    model.config = types.SimpleNamespace(hidden=2, labels={n: str(n) for n in range(1000)})
    optimizer = ll.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    loader = ll.make_loader(torch.ones(8, 2), batch_size=4)
    step = ll.make_train_step(ll.make_grad_fn(model, lambda model, x: model(x).mean()), optimizer, donate=True)
    state = ll.init_state(model, optimizer, loader=loader)
    for batch in loader(state):
        state, _ = step(state, batch)
    settings = []
    client = types.SimpleNamespace(
        start=lambda folder, run_id, config: settings.append(config), log=print, artifact=print, close=print
    )
    log = ll.log.in_background(ll.log.tracker(client, tmp_path))
    log(state, {"x": 1.0})
    log.close()
    (settings,) = settings
    assert settings == ll.log.configuration(state) == json.loads(orjson.dumps(settings))
    assert settings["model"] == {"class": "Linear", "parameters": 3, "hidden": 2, "labels": "dict of 1000"}
    assert settings["optimizer"]["SGD"].items() >= {"lr": 0.1, "momentum": 0.9, "nesterov": False}.items()
    assert settings["loader"]["batch_size"] == 4
    assert settings.items() >= {"seed": 0, "epoch_length": 2, "ranks": 1}.items()
    assert settings["versions"]["torch"] == torch.__version__


def model_of(model):
    return ll.log.configuration(ll.init_state(model))["model"]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # read by peft
def test_models_within_wrappers_of_torch_and_peft_give_their_config():
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    small = transformers.GPT2Config(vocab_size=8, n_positions=4, n_embd=8, n_layer=1, n_head=1)
    model = transformers.GPT2LMHeadModel(small)
    found = {"class": "GPT2LMHeadModel", "n_embd": 8, "model_type": "gpt2"}
    assert model_of(torch.compile(model)).items() >= found.items()
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    settings = model_of(adapted)
    assert (settings["n_embd"], settings["adapters"]["default"]["r"]) == (8, 2)


def test_a_config_that_fails_does_not_end_the_run():
    model = torch.nn.Linear(2, 1)
    model.config = types.SimpleNamespace(to_dict=lambda: 1 / 0)
    assert model_of(model)["config"] == "not described: ZeroDivisionError('division by zero')"
    assert model_of(torch.nn.Sequential(model)) == {"class": "Sequential", "parameters": 3}


@pytest.mark.slow
def test_the_commit_is_that_of_the_program(tmp_path):
    program = tmp_path / "train.py"
    program.write_text("import looplib as ll\nprint(ll.log.configuration(ll.TrainState()).get('git_commit'))\n")
    environment = {
        **os.environ,
        "GIT_CEILING_DIRECTORIES": str(tmp_path.parent),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }

    def output(*command, **options):
        done = subprocess.run(command, check=True, capture_output=True, text=True, **options)
        return done.stdout.strip()

    def git(*arguments):
        return output("git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments, cwd=tmp_path)

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    commit = git("rev-parse", "HEAD")
    assert output(sys.executable, program, env=environment) == commit
    program.write_text(program.read_text() + "# changed\n")
    assert output(sys.executable, program, env=environment) == f"{commit}-dirty"


def test_an_accelerator_that_the_machine_lacks_is_not_the_device(monkeypatch):
    def accelerator(check_available):
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", accelerator)
    assert ll.log.configuration(ll.TrainState())["device"] == "cpu"
