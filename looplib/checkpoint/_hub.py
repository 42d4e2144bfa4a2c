"""Hugging Face Hub: checkpoints and a model card, pushed in the background."""

from __future__ import annotations

import concurrent.futures
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from looplib._core.checks import check, check_type
from looplib._core.collective import together
from looplib._core.notices import warn
from looplib.checkpoint._background import raised, unheard
from looplib.checkpoint._describe import Checkpoint, describe
from looplib.checkpoint._directory import PUSHING, Lock, clear, number_of
from looplib.checkpoint._listing import Listing, Stamp, changed_since, stamp_of
from looplib.checkpoint._policy import Policy

FOLDER = "checkpoints"
"""Folder of a repository that checkpoints are pushed to."""

_LATER = 408, 429  # HTTP's: the request took too long, or there were too many


def hub(
    repo_id: str,
    *,
    card: Callable[[Checkpoint], Any] | None = None,
    private: bool | None = None,
    token: str | bool | None = None,
) -> Hub:
    """Hugging Face Hub: a repository that `CheckpointIO.push` copies checkpoints to. It is created if it does not exist.

    >>> import looplib as ll, torch
    >>> ckpt, state = ll.checkpoint_io("runs/tiny-lm"), ll.init_state(torch.nn.Linear(2, 1))
    >>> hub = ll.checkpoint.hub("me/tiny-lm", private=True)  # doctest: +SKIP
    >>> path = ckpt.save(state)  # doctest: +SKIP
    >>> ckpt.push(hub)  # returns at once  # doctest: +SKIP
    >>> hub.wait()  # at the end: raises the error of the last push  # doctest: +SKIP

    Each push is one commit, so the repository never holds half a checkpoint: its folder `checkpoints` holds the latest
    checkpoint and, with `monitor`, the best one; earlier ones are in the repository's history. The address of the
    Hub is that of huggingface_hub (`HF_ENDPOINT`).

    To continue the run on another machine, pull the repository and restore from it, then save to a directory of the
    run's own (in huggingface_hub's cache, files are shared between runs):

        pulled = ll.checkpoint_io(huggingface_hub.snapshot_download("me/tiny-lm") + "/checkpoints")
        ckpt = ll.checkpoint_io("runs/tiny-lm")
        state = ckpt.restore(pulled.restore(ll.init_state(model, optimizer)))  # its own checkpoints come first

    All ranks call this, and the first one pushes. huggingface_hub draws a progress bar for each upload;
    `huggingface_hub.utils.disable_progress_bars()` turns them off.

    Args:
        repo_id: name of the repository, such as "me/tiny-lm".
        card: function that makes the repository's README.md for a pushed `Checkpoint`, the best one if a metric is
            monitored, such as `lambda checkpoint: ll.checkpoint.model_card(checkpoint, ...)`. It replaces the
            README.md that is there. It is called in the background.
        private: if True, create a private repository; None is the default of your account.
        token: access token; None is the one that huggingface_hub has stored, or that of `HF_TOKEN`.

    Raises:
        ImportError: huggingface_hub is not installed.
        OSError: the Hub refuses the repository, such as for a token without permission. If the network fails instead,
            a warning names its error, and the first push tries again.
        ValueError: `repo_id` is not a name of a repository.
    """
    check_type("repo_id is", repo_id, str, 'give the name of a repository, such as "me/tiny-lm"')
    check(card is None or callable(card), f"card is {card!r}; give a function of a Checkpoint", TypeError)
    opened = Hub(package().HfApi(token=token, library_name="looplib"), repo_id, card, private)
    ranks = together()
    ranks.meet()
    ranks.on_first(opened.open)
    return opened


class Hub:
    """Repository of the Hugging Face Hub, returned by `hub`, which constructs it from an `api` and its own arguments:
    `repo_id`, `card` and `private`.

    Attributes:
        repo_id: name of the repository.
    """

    def __init__(
        self, api: Any, repo_id: str, card: Callable[[Checkpoint], Any] | None, private: bool | None
    ) -> None:
        self.repo_id = repo_id
        self._api = api
        self._card = card
        self._private = private
        self._exists = False
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="hub")
        self._pushes: list[Future[None]] = []
        self._pushed: set[Stamp] = set()
        self._lock: Lock | None = None

    def open(self) -> None:
        """Create the repository if it does not exist. Used by `hub`. If the network fails, the first push tries again."""
        try:
            self._create()
        except ValueError:  # of a name
            raise
        except Exception as error:
            title = f"{self.repo_id} could not be reached or created at {self._api.endpoint}: {_named(error)}"
            status = getattr(getattr(error, "response", None), "status_code", 500)
            if status < 500 and status not in _LATER:
                raise OSError(title) from error
            warn(f"{title}; the run continues, and the next push tries again")

    def _create(self) -> None:
        if not self._exists:
            self.repo_id = str(self._api.create_repo(self.repo_id, private=self._private, exist_ok=True).repo_id)
            self._api.auth_check(self.repo_id, write=True)  # which create_repo does not ask of one that exists
            self._exists = True

    def wait(self) -> None:
        """Wait until the last push has arrived.

        Raises:
            OSError: the last push did not arrive. The message says why: the error of the network, or steps in the
                repository that are later than the latest one pushed, which belong to a different run. The checkpoints
                in the directory are complete; a further `ckpt.push(hub)` includes them.
        """
        concurrent.futures.wait(self._pushes)  # an interrupt is raised here while the work continues
        pushes, self._pushes = self._pushes, []
        for push in pushes[:-1]:
            _warn_of(push)
        if pushes:
            raised(pushes[-1].exception())
            pushes[-1].result()

    def start(self, folder: Path, lock: Lock, policy: Policy, saving: Future[None] | None) -> None:
        """Push in the background, after a save that is under way. Used by `CheckpointIO.push`.

        A push that has not begun is replaced, since the next one includes what it would have pushed. An error of an
        earlier push is a warning.
        """
        self._lock = lock  # without it, another process could delete what is linked here
        begun = [push for push in self._pushes if not push.cancel()]
        self._pushes = [push for push in begun if not push.done()]
        self._pushes.append(self._pool.submit(self._try_to_push, folder, policy, saving))
        for push in begun:
            if push.done() and push not in self._pushes:
                _warn_of(push)

    def _try_to_push(self, folder: Path, policy: Policy, saving: Future[None] | None) -> None:
        if saving is not None:
            concurrent.futures.wait([saving])  # an error of it is raised by the next save
        try:
            with _staged(folder, policy) as stamps:
                self._push(stamps, policy)
        except Exception as error:
            failure = OSError(
                f"the checkpoints of {folder} could not be pushed to {self.repo_id} at {self._api.endpoint}: "
                f"{_named(error)}; they are complete in their directory, and the next push includes them"
            )
            unheard[failure] = "push"
            raise failure from error

    def _push(self, stamps: dict[Path, Stamp], policy: Policy) -> None:
        """Push staged checkpoints, by path, in one commit. The stamps are those of the original entries."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        self._create()
        checkpoints = sorted(map(describe, stamps), key=lambda checkpoint: checkpoint.step)
        latest = checkpoints[-1]
        there = {path for path in self._api.list_repo_files(self.repo_id) if _step_in(path) is not None}
        self._check_not_later(there, latest.step)
        files = {path: {f"{FOLDER}/{path.name}/{file.name}": file for file in path.iterdir()} for path in stamps}
        deletes = [CommitOperationDelete(name) for name in there.difference(*files.values())]
        new = [path for path, stamp in stamps.items() if stamp not in self._pushed or files[path].keys() - there]
        adds = [CommitOperationAdd(name, file) for path in new for name, file in files[path].items()]
        if self._card is not None:
            best = policy.best(checkpoints) if policy.monitor is not None else None
            adds.append(CommitOperationAdd("README.md", str(self._card(best or latest)).encode()))
        # The Hub leaves out what a .gitignore of the repository matches, and would take half a checkpoint.
        self._api.preupload_lfs_files(self.repo_id, adds, free_memory=False, gitignore_content="# of nothing\n")
        message = f"Checkpoint of step {latest.step}"
        self._api.create_commit(self.repo_id, [*deletes, *adds], commit_message=message)
        self._pushed = {*stamps.values()}

    def _check_not_later(self, there: set[str], latest: int) -> None:
        """Raise ValueError if the repository has files of later steps, as a save does for a directory."""
        later = {step for step in map(_step_in, there) if step is not None and step > latest}
        check(
            not later,
            f"the repository holds later steps ({', '.join(map(str, sorted(later)))}) than the latest here, {latest}: they "
            "are of another run, or this run has continued from an earlier one. Push to another repository, or delete "
            f'them with huggingface_hub.HfApi().delete_folder("{FOLDER}", "{self.repo_id}")',
        )


@contextmanager
def _staged(folder: Path, policy: Policy) -> Iterator[dict[Path, Stamp]]:
    """The latest checkpoint and the best one, linked into a temporary folder, where no later save deletes them.

    Yields paths in this folder, and the stamps of the original entries.
    """
    staging = Path(tempfile.mkdtemp(prefix=PUSHING, dir=folder))
    try:
        while (stamps := _linked(folder, policy, staging)) is None:
            pass  # a save has deleted or replaced an entry in the meantime, so list again
        yield stamps
    finally:
        clear(staging)


def _linked(folder: Path, policy: Policy, staging: Path) -> dict[Path, Stamp] | None:
    """Link the files of the latest and the best checkpoint. None if one of them is removed or replaced meanwhile."""
    checkpoints = Listing(folder).read()
    check(bool(checkpoints), f"there is no complete checkpoint in {folder}")
    best = policy.best(checkpoints) if policy.monitor is not None else None
    stamps: dict[Path, Stamp] = {}
    for path in {checkpoint.path for checkpoint in (best, checkpoints[-1]) if checkpoint is not None}:
        target = staging / path.name
        clear(target)
        try:
            stamp = stamp_of(path)
            target.mkdir()
            for file in filter(Path.is_file, path.iterdir()):
                _link(file, target / file.name)
        except FileNotFoundError:
            return None
        if changed_since(path, stamp):
            return None
        stamps[target] = stamp
    return stamps


def _link(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without hard links
        shutil.copyfile(file, target)


def _step_in(path: str) -> int | None:
    """Step of the checkpoint that a file of a repository belongs to."""
    folder, _, rest = path.partition("/")
    number = number_of(Path(rest.partition("/")[0])) if folder == FOLDER else ()
    return number[0] if number else None


def _named(error: BaseException) -> str:
    """An error and its cause, in one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{text} ({_named(error.__cause__)})" if error.__cause__ is not None else text


def _warn_of(push: Future[None]) -> None:
    if (error := push.exception()) is not None:
        raised(error)
        warn(str(error))


def package() -> Any:
    """Import huggingface_hub, or raise an ImportError that says how to install it."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise ImportError("the Hub needs a package: pip install huggingface_hub") from error
    return huggingface_hub
