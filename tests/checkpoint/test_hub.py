"""Pushing to the Hugging Face Hub, by huggingface_hub's own client against a stand-in for its HTTP interface."""

import math
import os
import subprocess
import sys
import threading
import time

import huggingface_hub
import pytest
import torch
from hub_server import TOKEN, use
from huggingface_hub import constants
from public import ROOT
from ranks import launch
from shared import equal
from torch import nn
from torch.distributed.fsdp import fully_shard

import looplib as ll

REPO = "me/tiny"


def make(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = ll.optimizer(torch.optim.AdamW, lr=1e-2)
    grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    return ll.make_train_step(grad_fn, optimizer, donate=True), ll.init_state(model, optimizer)


def trained(step, state, steps):
    for _ in range(steps):
        state, _ = step(state, torch.randn(4, 4, generator=torch.Generator().manual_seed(state.step)))
    return state


def steps_in(repo):
    return sorted({path.split("/")[1] for path in repo.files if path.startswith("checkpoints/")})


def pull(folder):
    huggingface_hub.snapshot_download(REPO, local_dir=folder)
    return ll.checkpoint_io(folder / "checkpoints", monitor="loss")


def test_a_run_continues_from_a_pulled_folder_with_the_bits_of_one_that_was_never_stopped(server, tmp_path):
    step, state = make()
    ckpt, hub = ll.checkpoint_io(tmp_path / "run"), ll.checkpoint.hub(REPO, private=True)
    state = trained(step, state, 3)
    ckpt.save(state)
    ckpt.push(hub)
    hub.wait()
    expected = trained(step, state, 2)
    repo = server.repos[REPO]
    assert repo.private
    assert [commit["message"] for commit in repo.commits[1:]] == ["Checkpoint of step 3"]
    assert [*(tmp_path / "run").glob(".pushing-*")] == []

    cached = huggingface_hub.snapshot_download(REPO, cache_dir=tmp_path / "cache")  # links into a folder of blobs
    local = huggingface_hub.snapshot_download(REPO, local_dir=tmp_path / "local")
    assert (ll.checkpoint_io(f"{cached}/checkpoints").latest().path / "manifest.json").is_symlink()
    for number, folder in enumerate((cached, local)):
        step, first = make(seed=1)
        pulled, own = ll.checkpoint_io(f"{folder}/checkpoints"), ll.checkpoint_io(tmp_path / f"own-{number}")
        state = own.restore(pulled.restore(first))
        assert state.step == 3
        state = trained(step, state, 1)
        own.save(state)
        step, first = make(seed=2)
        state = trained(step, own.restore(pulled.restore(first)), 1)  # its own checkpoint comes first
        assert state.step == expected.step == 5
        assert equal(state.params, expected.params)

    # A folder of its own can also be continued in place, and pushed from.
    step, first = make(seed=1)
    ckpt = ll.checkpoint_io(f"{local}/checkpoints", keep_last=1)
    ckpt.save(trained(step, ckpt.restore(first), 2))
    ckpt.push(hub)
    hub.wait()
    assert steps_in(repo) == ["step-00000005"]
    _, first = make(seed=3)
    assert equal(pull(tmp_path / "again").restore(first).params, expected.params)


def test_a_folder_pulled_in_part_is_named_damaged(server, tmp_path):
    _, state = make()
    ckpt, hub = ll.checkpoint_io(tmp_path / "run"), ll.checkpoint.hub(REPO)
    ckpt.save(state)
    ckpt.push(hub)
    hub.wait()
    folder = huggingface_hub.snapshot_download(REPO, cache_dir=tmp_path / "cache", allow_patterns="*.json")
    pulled = ll.checkpoint_io(f"{folder}/checkpoints")
    with (
        pytest.warns(UserWarning, match=r"tensors\.safetensors"),
        pytest.raises(ll.checkpoint.DamagedCheckpointError, match="no whole checkpoint"),
    ):
        pulled.restore(state)


def test_the_loop_continues_during_an_upload_and_what_is_pushed_is_whole(server, tmp_path):
    uploading, proceed = threading.Event(), threading.Event()

    def before(method, path):
        if "/large/" in path:
            uploading.set()
            assert proceed.wait(30)

    step, state = make()
    ckpt, hub = ll.checkpoint_io(tmp_path / "run", keep_last=1), ll.checkpoint.hub(REPO)
    state = trained(step, state, 1)
    server.before = before
    ckpt.save(state)
    ckpt.push(hub)  # returns while the server keeps the upload waiting
    assert uploading.wait(30)
    for _ in range(4):
        state = trained(step, state, 1)
        ckpt.save(state)
        ckpt.push(hub)  # each replaces the one before it, which has not begun
    assert [checkpoint.step for checkpoint in ckpt.steps()] == [5]  # step 1, under way, has been deleted here
    assert len(server.repos[REPO].commits) == 1
    proceed.set()
    hub.wait()
    contents = {path.name: path.read_bytes() for path in ckpt.latest().path.iterdir()}
    commits = server.repos[REPO].commits[1:]
    assert [commit["message"] for commit in commits] == ["Checkpoint of step 1", "Checkpoint of step 5"]
    assert sum("/tree/" in path for _, path in server.requests) == 2
    assert {
        path.split("/")[-1]: content for path, content in commits[1]["files"].items() if "step" in path
    } == contents
    first, reference = {**commits[0]["files"]}, trained(*make(), 1)
    for path in (path for path in first if "step" in path):
        target = tmp_path / "first" / path.split("/", 1)[1]
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(first[path])
    assert equal(ll.checkpoint_io(tmp_path / "first").restore(make(1)[1]).params, reference.params)


def test_a_checkpoint_that_is_replaced_while_it_is_linked_is_linked_again(server, tmp_path, monkeypatch):
    step, state = make()
    ckpt, hub, links = ll.checkpoint_io(tmp_path / "run"), ll.checkpoint.hub(REPO), []
    ckpt.save(state)
    state = trained(step, state, 1).replace(step=0)

    def link(source, target, link=os.link):
        link(source, target)
        links.append(target)
        if len(links) == 1:
            ckpt.save(state)  # the same step with other weights, between two files

    monkeypatch.setattr(os, "link", link)
    ckpt.push(hub)
    hub.wait()
    assert len(links) >= 3
    assert equal(pull(tmp_path / "pulled").restore(make(1)[1]).params, state.params)


def test_without_hard_links_files_are_copied(server, tmp_path, monkeypatch):
    def link(source, target):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    _, state = make()
    ckpt, hub = ll.checkpoint_io(tmp_path / "run"), ll.checkpoint.hub(REPO)
    ckpt.save(state)
    ckpt.push(hub)
    hub.wait()
    assert equal(pull(tmp_path / "pulled").restore(make(1)[1]).params, make()[1].params)


def test_the_repository_holds_the_latest_and_the_best_and_uploads_each_once(server, tmp_path):
    step, state = make()
    ckpt, hub = ll.checkpoint_io(tmp_path / "run", monitor="loss", keep_last=2), ll.checkpoint.hub(REPO)
    for loss in (0.5, 0.2, 0.4, 0.3):
        state = trained(step, state, 1)
        ckpt.save(state, {"loss": loss})
        ckpt.push(hub)
        hub.wait()
    assert steps_in(server.repos[REPO]) == ["step-00000002", "step-00000004"]
    assert len(server.announced) == len({*server.announced}) == 8
    assert len([path for path in server.repos[REPO].files if "step" in path]) == 4
    pulled = pull(tmp_path / "pulled")
    assert (pulled.best().step, pulled.latest().step) == (2, 4)
    # A file that somebody has deleted there is pushed again.
    repo = server.repos[REPO]
    repo.commit("deleted", {path: file for path, file in repo.files.items() if "step-00000002/t" not in path})
    ckpt.push(hub)
    hub.wait()
    assert len([path for path in repo.files if "step" in path]) == 4


def test_a_background_save_is_pushed_once_it_is_complete(server, tmp_path, monkeypatch):
    step, state = make()
    ckpt, hub = ll.checkpoint_io(tmp_path, asynchronous=True), ll.checkpoint.hub(REPO)
    proceed = threading.Event()

    def sync(file, sync=os.fsync):
        assert proceed.wait(30)
        sync(file)

    monkeypatch.setattr(os, "fsync", sync)
    ckpt.save(trained(step, state, 1))
    ckpt.push(hub)  # returns while the save is under way
    time.sleep(0.05)
    proceed.set()
    hub.wait()
    ckpt.wait()
    assert steps_in(server.repos[REPO]) == ["step-00000001"]


@pytest.mark.parametrize("answer", ["drop", 403])
def test_an_error_of_the_network_is_named_and_the_run_continues(server, tmp_path, answer):
    step, state = make()
    ckpt, hub = ll.checkpoint_io(tmp_path / "run"), ll.checkpoint.hub(REPO)
    server.before = lambda method, path: answer if "/commit/" in path else None
    state = trained(step, state, 1)
    ckpt.save(state)
    ckpt.push(hub)
    pushed = time.monotonic()
    while not hub._pushes[-1].done():
        assert time.monotonic() < pushed + 30
        time.sleep(0.01)
    state = trained(step, state, 1)
    ckpt.save(state)
    named = {"drop": "RemoteProtocolError", 403: "answers 403"}[answer]
    message = rf"could not be pushed to me/tiny at http://127.0.0.1.*{named}.*complete in their directory"
    with pytest.warns(UserWarning, match=message) as caught:
        ckpt.push(hub)
    assert caught[0].filename == __file__
    with pytest.raises(OSError, match=message):
        hub.wait()
    hub.wait()  # an error is raised once
    assert len(server.repos[REPO].commits) == 1
    server.before = lambda method, path: None
    state = trained(step, state, 1)
    ckpt.save(state)
    ckpt.push(hub)
    hub.wait()
    assert steps_in(server.repos[REPO]) == ["step-00000003"]
    assert [checkpoint.step for checkpoint in ckpt.steps()] == [1, 2, 3]


def test_an_error_while_a_later_push_succeeds_is_a_warning(server, tmp_path):
    _, state = make()
    ckpt, hub = ll.checkpoint_io(tmp_path / "run"), ll.checkpoint.hub(REPO)
    answers, reached, proceed = [500], threading.Event(), threading.Event()

    def before(method, path):
        if "/commit/" in path and answers:
            reached.set()
            assert proceed.wait(30)
            return answers.pop()
        return None

    server.before = before
    ckpt.save(state)
    ckpt.push(hub)
    assert reached.wait(30)
    ckpt.push(hub)
    proceed.set()
    with pytest.warns(UserWarning, match="answers 500"):
        hub.wait()
    assert steps_in(server.repos[REPO]) == ["step-00000000"]


def test_later_steps_there_are_refused_and_a_gitignore_leaves_nothing_out(server, tmp_path):
    _, state = make()
    hub = ll.checkpoint.hub(REPO)
    repo = server.repos[REPO]
    repo.commit("by hand", {**repo.files, ".gitignore": b"*.safetensors", "checkpoints/notes.md": b"mine"})
    ckpt = ll.checkpoint_io(tmp_path / "later")
    ckpt.save(state.replace(step=7))
    ckpt.push(hub)
    hub.wait()
    folder = "checkpoints/step-00000007"
    names = {"checkpoints/notes.md", f"{folder}/manifest.json", f"{folder}/tensors.safetensors"}
    assert {path for path in repo.files if path.startswith("checkpoints/")} == names
    ckpt = ll.checkpoint_io(tmp_path / "earlier")
    ckpt.save(state.replace(step=5))
    ckpt.push(hub)
    with pytest.raises(OSError, match=r"later steps \(7\) than the latest here, 5: .*another repository"):
        hub.wait()
    assert len(repo.commits) == 3
    empty = ll.checkpoint_io(tmp_path / "empty")
    empty.push(hub)
    with pytest.raises(OSError, match=r"no complete checkpoint in .*/empty"):
        hub.wait()


def test_what_cannot_work_is_said_at_the_start(server, tmp_path, monkeypatch):
    with pytest.raises(TypeError, match=r"repo_id is None; give the name of a repository"):
        ll.checkpoint.hub(None)
    with pytest.raises(ValueError, match="Repo id"):
        ll.checkpoint.hub("me/two/slashes")
    with pytest.raises(TypeError, match=r"card is 'README.md'; give a function of a Checkpoint"):
        ll.checkpoint.hub(REPO, card="README.md")
    with pytest.raises(TypeError, match=r"hub is the text 'me/tiny'; give ll\.checkpoint\.hub"):
        ll.checkpoint_io(tmp_path).push(REPO)
    with pytest.raises(OSError, match=r"me/tiny could not be reached or created at http.*: .*401"):
        ll.checkpoint.hub(REPO, token="hf_other")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match="pip install huggingface_hub"):
        ll.checkpoint.hub(REPO)


def test_a_model_card_with_the_numbers_of_the_best_checkpoint_is_pushed(server, tmp_path):
    step, state = make()
    config = {"args": {"warmup": 100, "note": "a | b"}, "versions": {"torch": torch.__version__}, "sizes": [1, 2]}

    def card(checkpoint):
        about = {
            "task": "regression",
            "dataset": "points",
            "text": "Mine.\n",
            "license": "mit",
            "base_model": "me/base",
        }
        return ll.checkpoint.model_card(checkpoint, "tiny", config=config, **about)

    ckpt, hub = ll.checkpoint_io(tmp_path / "run", monitor="loss"), ll.checkpoint.hub(REPO, card=card)
    for loss in (0.5, 0.25, 0.75):
        state = trained(step, state, 1)
        ckpt.save(state, {"loss": loss, "ratio": math.inf})
    ckpt.push(hub)
    hub.wait()
    pull(tmp_path / "pulled")
    found = huggingface_hub.ModelCard.load(tmp_path / "pulled/README.md")
    assert (found.data.license, found.data.base_model) == ("mit", "me/base")
    [result] = found.data.eval_results
    assert (result.metric_type, result.metric_value) == ("loss", 0.25)
    assert (result.task_type, result.dataset_name) == ("regression", "points")
    assert found.text.startswith("\n# tiny\n\nMine.\n\n## Metrics\n\nOf step 2, epoch 0, 8 samples, saved at 2")
    lines = {
        "| loss | 0.25 |",
        "| ratio | inf |",
        "| args.warmup | 100 |",
        r"| args.note | a \| b |",
        "| sizes | [1, 2] |",
    }
    assert lines | {f"| versions.torch | {torch.__version__} |"} <= {*found.text.splitlines()}
    # Without config=, the settings that the checkpoint stores.
    stored = ll.checkpoint.model_card(ckpt.latest(), "tiny", task="regression", dataset="points")
    assert "| optimizer.class | torch.optim.adamw.AdamW |\n| optimizer.lr | 0.01 |" in stored.text
    with pytest.raises(
        TypeError, match=r"checkpoint is a .*give one that ckpt\.latest\(\) or ckpt\.best\(\) returns"
    ):
        ll.checkpoint.model_card(ckpt.latest().path, "tiny", task="regression", dataset="points")


def test_a_card_that_cannot_be_made_is_an_error_of_the_push_and_not_of_the_run(server, tmp_path):
    ckpt, hub = ll.checkpoint_io(tmp_path / "run"), ll.checkpoint.hub(REPO, card=lambda checkpoint: {}["missing"])
    ckpt.save(make()[1])
    ckpt.push(hub)
    with pytest.raises(OSError, match=r"could not be pushed .* KeyError: 'missing'"):
        hub.wait()


def on_two_ranks(endpoint, folder):
    with pytest.MonkeyPatch.context() as patch:
        use(patch, endpoint)
        torch.distributed.init_process_group("gloo")
        model = fully_shard(nn.Linear(4, 4))
        state = ll.init_state(model)
        ckpt, hub = ll.checkpoint_io(folder, asynchronous=True, keep_last=1), ll.checkpoint.hub(REPO)
        for step in (1, 2):
            ckpt.save(state.replace(step=step))
            ckpt.push(hub)
        assert bool(hub._pushes) == ll.distributed.is_rank_zero()
        hub.wait()
        ckpt.wait()
        with pytest.raises(OSError, match=r"could not be reached or created at .*401"):
            ll.checkpoint.hub(REPO, token="hf_other")  # on both
        torch.distributed.destroy_process_group()


def test_the_first_of_two_ranks_pushes_what_both_have_written(server, tmp_path):
    launch(2, on_two_ranks, server.endpoint, tmp_path / "run")
    assert sum(path == "/api/repos/create" for _, path in server.requests) == 2  # one for each hub(...)
    commits = server.repos[REPO].commits[1:]
    assert commits[-1]["message"] == "Checkpoint of step 2"
    assert len(commits) <= 2
    names = {path.split("/")[-1] for path in commits[-1]["files"] if path.startswith("checkpoints/")}
    assert names >= {"manifest.json", "tensors-00000.safetensors", "tensors-00001.safetensors"}
    local = {path.name: path.read_bytes() for path in (tmp_path / "run/step-00000002").iterdir()}
    assert {p.split("/")[-1]: f for p, f in commits[-1]["files"].items() if "step" in p} == local


def test_a_run_starts_while_the_network_is_down_and_its_first_push_creates_the_repository(
    server, tmp_path, monkeypatch
):
    server.before = lambda method, path: 503
    message = (
        r"me/tiny could not be reached or created at http.*503.*the run continues, and the next push tries again"
    )
    with pytest.warns(UserWarning, match=message):
        hub = ll.checkpoint.hub(REPO)
    server.before = lambda method, path: None
    ckpt = ll.checkpoint_io(tmp_path)
    ckpt.save(make()[1])
    ckpt.push(hub)
    hub.wait()
    assert steps_in(server.repos[REPO]) == ["step-00000000"]
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.warns(UserWarning, match=r"at http://127.0.0.1:9: ConnectError"):
        ll.checkpoint.hub(REPO)


SCRIPT = """
import sys, torch, looplib as ll
state = ll.init_state(torch.nn.Linear(2, 1))
ckpt, hub = ll.checkpoint_io(sys.argv[1]), ll.checkpoint.hub("me/tiny")
ckpt.save(state)
ckpt.push(hub)
print("trained", flush=True)
"""


def start(server, folder):
    environment = {
        "HF_ENDPOINT": server.endpoint,
        "HF_TOKEN": TOKEN,
        "HF_HUB_DISABLE_XET": "1",
        "PYTHONPATH": str(ROOT),
    }
    environment |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT, str(folder / "run")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=environment, text=True, **pipes)


@pytest.mark.slow
def test_a_process_that_is_killed_in_a_push_leaves_nothing_there_and_the_next_one_pushes(server, tmp_path):
    uploading, proceed = threading.Event(), threading.Event()

    def before(method, path):
        if "/large/" in path:
            uploading.set()
            assert proceed.wait(60)

    server.before = before
    process = start(server, tmp_path)
    assert uploading.wait(60)
    process.kill()
    process.communicate()
    proceed.set()
    assert len(server.repos[REPO].commits) == 1
    assert len([*(tmp_path / "run").glob(".pushing-*")]) == 1
    out, err = start(server, tmp_path).communicate()  # waits for its push at exit
    assert (out, err) == ("trained\n", "")
    assert steps_in(server.repos[REPO]) == ["step-00000000"]
    assert [*(tmp_path / "run").glob(".pushing-*")] == []


@pytest.mark.slow
def test_an_error_that_nobody_has_waited_for_is_printed_at_exit(server, tmp_path):
    server.before = lambda method, path: 403 if "/commit/" in path else None
    process = start(server, tmp_path)
    out, err = process.communicate()
    assert (out, process.returncode) == ("trained\n", 0)
    assert "looplib: the last push failed: the checkpoints of" in err
    assert "answers 403" in err
