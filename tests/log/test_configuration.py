"""The configuration of a run leaves out what nobody may read."""

import argparse
import sys

import pytest
from torch import nn

import looplib as ll

HEX = "0123456789abcdef0123456789abcdef01234567"
SECRET = "S3CR3T"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--token", SECRET],
        ["--hf-token", f"-{SECRET}"],
        [f"--hf_token={SECRET}"],
        ["--api-key", SECRET],
        ["-apiKey", SECRET],
        [f"+wandb.api_key={SECRET}"],
        [f"WANDB_API_KEY={SECRET}"],
        ["--aws_secret_access_key", SECRET],
        ["--db.password", SECRET],
        ["--password", "1234" + SECRET],
        [f"--passwordHash={SECRET}"],
        ["--auth", SECRET],
        ["--login", f"hf_{SECRET}aBcDeFgHiJkLmNoP"],
        [f"ghp_{SECRET}aBcDeFgHiJkLmNoP"],
        ["--url", f"https://me:{SECRET}@example.org/data"],
        [f"https://example.org/data?token={SECRET}"],
        ["--header", f"Authorization: Bearer {SECRET}"],
        ["--wandb", f"{SECRET}{HEX}"],
    ],
    ids=str,
)
def test_what_looks_like_a_secret_is_left_out_of_the_command(monkeypatch, arguments):
    monkeypatch.setattr(sys, "argv", ["/home/me/train.py", "--lr", "0.1", *arguments, "--epochs", "3"])
    command = ll.log.configuration(ll.TrainState())["command"]
    assert SECRET not in command
    assert "***" in command
    assert command.startswith("train.py --lr 0.1 ")
    assert command.endswith(" --epochs 3")


def test_other_arguments_are_kept(monkeypatch):
    arguments = [
        "--tokenizer gpt2 --max-tokens 512 --num-key 4 --keyboard qwerty --key-dim 64 --pad-token <pad> --eos_token=</s>",
        "data.csv --use-auth-token --name resnet50-imagenet-lr0.001-batch256-augmented data=imagenet/train ./runs/a_b",
    ]
    monkeypatch.setattr(sys, "argv", ["train.py", *" ".join(arguments).split()])
    assert ll.log.configuration(ll.TrainState())["command"] == f"train.py {' '.join(arguments)}"


def settings_of():
    return {"lr": 0.1, "hf_token": SECRET, "nested": [{"apiKey": SECRET}], "url": f"s3://me:{SECRET}@x", "sha": HEX}


KEPT = {"lr": 0.1, "hf_token": "***", "nested": [{"apiKey": "***"}], "url": "s3://***@x", "sha": HEX}


def test_settings_given_by_name_leave_them_out_too():
    found = ll.log.configuration(ll.TrainState(), args=argparse.Namespace(**settings_of()), password=SECRET)
    assert found["args"] == KEPT
    assert found["password"] == "***"


def test_a_checkpoint_leaves_them_out_too(tmp_path):
    state = ll.copy_state(ll.init_state(nn.Linear(1, 1)))
    ckpt = ll.checkpoint_io(tmp_path, describe=settings_of())
    path = ckpt.save(state)
    assert SECRET not in (path / "manifest.json").read_text()
    assert HEX in (path / "manifest.json").read_text()
    ckpt.restore(state)  # the same settings: no warning
    with pytest.warns(UserWarning, match="lr was 0.1, is 0.2"):
        ll.checkpoint_io(tmp_path, describe=settings_of() | {"lr": 0.2, "hf_token": "new"}).restore(state)
