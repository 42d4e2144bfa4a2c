"""A stand-in for the Hugging Face Hub: repositories in memory, in place of the two calls in which huggingface_hub sends
something there, a new repository and a commit. All else is the library's own code."""

from pathlib import Path

import huggingface_hub
from huggingface_hub import CommitInfo, HfApi, RepoUrl, constants


class Repo:
    """Attributes: `files` at the head, path -> content; and the messages of the `commits`."""

    def __init__(self):
        self.files, self.commits = {}, ["initial commit"]


class Hub:
    """Attributes: `repos` by name."""

    def __init__(self, patch, folder):
        self.repos, self.folder = {}, folder
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # whose uploads do not go through create_commit
        patch.setattr(HfApi, "create_repo", lambda api, *given, **named: self.create_repo(*given, **named))
        patch.setattr(HfApi, "create_commit", lambda api, *given, **named: self.create_commit(*given, **named))
        for name in ("create_repo", "upload_folder"):  # those of the functions that are not called on an HfApi
            patch.setattr(huggingface_hub, name, getattr(HfApi(), name))
        patch.setattr(huggingface_hub, "snapshot_download", self.snapshot_download)

    def create_repo(self, repo_id, *, exist_ok=False, **_):
        assert exist_ok or repo_id not in self.repos
        self.repos.setdefault(repo_id, Repo())
        return RepoUrl(f"{constants.ENDPOINT}/{repo_id}")

    def create_commit(self, repo_id, operations, *, commit_message, **_):
        repo = self.repos[repo_id]
        for operation in operations:
            with operation.as_file() as file:
                repo.files[operation.path_in_repo] = file.read()
        repo.commits.append(commit_message)
        return CommitInfo(f"{constants.ENDPOINT}/{repo_id}/commit/{len(repo.commits)}", commit_message, "", "0" * 40)

    def snapshot_download(self, repo_id):
        for path, content in self.repos[repo_id].files.items():
            target = Path(self.folder, repo_id, path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        return str(self.folder / repo_id)
