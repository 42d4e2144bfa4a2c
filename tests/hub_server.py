"""A stand-in for the Hugging Face Hub: the part of its HTTP interface that uploads and downloads use, in memory.

Files that end in .safetensors go through git LFS's batch interface, the others are part of the commit, as on the Hub.
"""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

from huggingface_hub import constants, hf_api, utils

TOKEN = "hf_test"


def git_oid(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Repo:
    def __init__(self, private):
        self.private = private
        self.commits = []
        self.commit("initial commit", {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"})

    @property
    def files(self):
        """Path -> content, at the head."""
        return self.commits[-1]["files"]

    def commit(self, message, files):
        oid = hashlib.sha1(repr((len(self.commits), message, sorted(files))).encode()).hexdigest()
        self.commits.append({"oid": oid, "message": message, "files": dict(files)})

    def at(self, revision):
        return next((c for c in self.commits if c["oid"] == revision), self.commits[-1])


class HubServer(ThreadingHTTPServer):
    """Attributes: `repos` by name; `requests`, (method, path) of each; `announced`, paths of files that a client has
    announced to upload; `before`, called with a method and a path, may answer a status or "drop".
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos, self.large, self.requests, self.announced = {}, {}, [], []
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.before = lambda method, path: None
        self.lock = threading.Lock()

    def handle_error(self, request, address):  # a client that a test has killed
        pass


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, value=None, status=200, **headers):
        body = value if isinstance(value, bytes) else json.dumps(value or {}).encode()
        self.send_response(status)
        for name, content in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), content)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def handle_any(self):
        path, server = unquote(self.path.partition("?")[0]), self.server
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        server.requests.append((self.command, path))
        status = server.before(self.command, path)
        if status == "drop":
            self.close_connection = True
            self.connection.close()
            return
        if status is not None:
            self.answer({"error": f"the stand-in answers {status}"}, status, X_Error_Message=f"answers {status}")
            return
        writes = self.command in ("POST", "PUT") and "/large/" not in path
        if writes and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer({"error": "Invalid username or password."}, 401)
            return
        for method, pattern, name in ROUTES:
            if method == self.command.replace("HEAD", "GET") and (match := re.fullmatch(pattern, path)):
                with server.lock:
                    getattr(self, name)(body, *match.groups())
                return
        self.answer({"error": f"the stand-in has no {self.command} {path}"}, 404)

    do_GET = do_HEAD = do_POST = do_PUT = handle_any

    def repo(self, name):
        if name not in self.server.repos:
            self.answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
        return self.server.repos.get(name)

    def create(self, body):
        asked = json.loads(body)
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        exists = name in self.server.repos
        if not exists:
            self.server.repos[name] = Repo(asked.get("visibility") == "private" or asked.get("private", False))
        self.answer({"url": f"{self.server.endpoint}/{name}", "name": name}, 409 if exists else 200)

    def validate(self, body):
        self.answer({"warnings": [], "errors": []})

    def info(self, body, name, revision="main"):
        if repo := self.repo(name):
            self.answer({"id": name, "sha": repo.at(revision)["oid"], "private": repo.private, "siblings": []})

    def may_write(self, body, name):
        allowed = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        self.answer({} if allowed else {"error": "Invalid username or password."}, 200 if allowed else 401)

    def tree(self, body, name, revision, folder=""):
        if repo := self.repo(name):
            self.answer([self.entry(path, content) for path, content in repo.at(revision)["files"].items()])

    def entry(self, path, content):
        entry = {"type": "file", "path": path, "size": len(content), "oid": git_oid(content)}
        if path.endswith(".safetensors"):
            entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
        return entry

    def preupload(self, body, name, revision):
        asked = json.loads(body)
        if not (repo := self.repo(name)):
            return
        self.server.announced += [file["path"] for file in asked["files"]]
        ignored = asked.get("gitIgnore", repo.files.get(".gitignore", b"").decode()).split()
        self.answer(
            {
                "files": [
                    {
                        "path": path,
                        "uploadMode": "lfs" if path.endswith(".safetensors") else "regular",
                        "shouldIgnore": any(fnmatch(path, pattern) for pattern in ignored),
                        "oid": self.remote_oid(path, repo.files.get(path)),
                    }
                    for path in (file["path"] for file in asked["files"])
                ]
            }
        )

    def remote_oid(self, path, content):
        if content is None:
            return None
        return hashlib.sha256(content).hexdigest() if path.endswith(".safetensors") else git_oid(content)

    def batch(self, body, name):
        def entry(asked):
            href = f"{self.server.endpoint}/large/{asked['oid']}"
            known = asked["oid"] in self.server.large
            return asked if known else {**asked, "actions": {"upload": {"href": href}}}

        self.answer({"transfer": "basic", "objects": [entry(asked) for asked in json.loads(body)["objects"]]})

    def put(self, body, oid):
        right = hashlib.sha256(body).hexdigest() == oid
        if right:
            self.server.large[oid] = body
        self.answer({}, 200 if right else 400)

    def commit(self, body, name, revision):
        if not (repo := self.repo(name)):
            return
        files, header = dict(repo.files), {}
        for line in map(json.loads, body.splitlines()):
            kind, value = line["key"], line["value"]
            if kind == "header":
                header = value
            elif kind == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif kind == "lfsFile":
                files[value["path"]] = self.server.large[value["oid"]]
            elif kind == "deletedFile":
                del files[value["path"]]
        repo.commit(header["summary"], files)
        oid = repo.commits[-1]["oid"]
        self.answer({"commitUrl": f"{self.server.endpoint}/{name}/commit/{oid}", "commitOid": oid})

    def resolve(self, body, name, revision, path):
        if not (repo := self.repo(name)):
            return
        commit = repo.at(revision)
        if (content := commit["files"].get(path)) is None:
            self.answer({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound")
            return
        self.answer(content, ETag=f'"{self.remote_oid(path, content)}"', X_Repo_Commit=commit["oid"])


NAME = r"([\w.-]+/[\w.-]+)"
ROUTES = [
    ("POST", "/api/repos/create", "create"),
    ("POST", "/api/validate-yaml", "validate"),
    ("GET", f"/api/models/{NAME}", "info"),
    ("GET", f"/api/models/{NAME}/revision/([^/]+)", "info"),
    ("GET", f"/api/models/{NAME}/auth-check/write", "may_write"),
    ("GET", f"/api/models/{NAME}/tree/([^/]+)(?:/(.*))?", "tree"),
    ("POST", f"/api/models/{NAME}/preupload/([^/]+)", "preupload"),
    ("POST", f"/{NAME}.git/info/lfs/objects/batch", "batch"),
    ("PUT", "/large/(.+)", "put"),
    ("POST", f"/api/models/{NAME}/commit/([^/]+)", "commit"),
    ("GET", f"/{NAME}/resolve/([^/]+)/(.+)", "resolve"),
]


@contextmanager
def hub_server():
    """A server in a thread, for as long as the block."""
    server = HubServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def use(patch, endpoint):
    """Point the client at a server, as HF_ENDPOINT does in a new process."""
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, endpoint)
    patch.setattr(constants, "ENDPOINT", endpoint)
    patch.setattr(hf_api.api, "endpoint", endpoint)  # of the functions that are not called on an HfApi
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    patch.setenv("HF_TOKEN", TOKEN)
    utils.disable_progress_bars()
