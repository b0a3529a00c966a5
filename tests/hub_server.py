"""A Hub on loopback: the part of the Hugging Face Hub's HTTP interface that pushing and loading models takes.

Every commit is kept, so that a test can look at each. Files are taken as plain uploads, of any size.
"""

import base64
import hashlib
import json
import re
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread

import yaml

USER = "tester"


class Hub(ThreadingHTTPServer):
    """`commits` holds for each repository its commits, oldest first: each an id, a message, and all files by path."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.commits = {}
        self.lock = Lock()

    def commit(self, repo, message, changes):
        """Add a commit; a change is a path and its bytes, or None where the file is deleted."""
        with self.lock:
            files = dict(self.commits[repo][-1][2]) if self.commits[repo] else {}
            for path, content in changes:
                files[path] = content
            files = {path: content for path, content in files.items() if content is not None}
            oid = hashlib.sha1(f"{repo} {message} {len(self.commits[repo])}".encode()).hexdigest()
            self.commits[repo].append((oid, message, files))
            return oid


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.route("GET")

    def do_HEAD(self):
        self.route("GET")

    def do_POST(self):
        self.route("POST")

    def route(self, method):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.partition("?")[0]
        for wanted, pattern, answer in ROUTES:
            match = re.fullmatch(pattern, path)
            if wanted == method and match:
                return answer(self, body, **match.groupdict())
        return self.fail(404, "EntryNotFound")

    def send(self, content, status=200, **headers):
        if not isinstance(content, bytes):
            content = json.dumps(content).encode()
            headers["Content-Type"] = "application/json"
        self.send_response(status)
        for name, value in {"Content-Length": len(content), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def fail(self, status, code):
        self.send({"error": code}, status, X_Error_Code=code, X_Error_Message=code)

    def files(self, repo, revision="main"):
        """The commit that a revision names; None after an answer that there is none."""
        if repo not in self.server.commits:
            return self.fail(404, "RepoNotFound")
        for oid, _, files in reversed(self.server.commits[repo]):
            if revision in ("main", oid):
                return oid, files
        return self.fail(404, "RevisionNotFound")

    def who_am_i(self, body):
        self.send({"type": "user", "name": USER, "orgs": []})

    def create(self, body):
        wanted = json.loads(body)
        repo = f"{wanted.get('organization') or USER}/{wanted['name']}"
        if repo in self.server.commits:
            return self.send({"error": "exists", "url": f"{self.server.endpoint}/{repo}"}, 409)
        self.server.commits[repo] = []
        self.server.commit(repo, "initial commit", [(".gitattributes", b"*.safetensors filter=lfs")])
        return self.send({"url": f"{self.server.endpoint}/{repo}", "name": repo, "id": repo})

    def validate_yaml(self, body):
        parts = json.loads(body)["content"].split("---\n")
        try:
            problems = [] if isinstance(yaml.safe_load(parts[1]), dict) else ["metadata must be a mapping"]
        except (IndexError, yaml.YAMLError) as error:
            problems = [str(error)]
        self.send({"errors": [{"message": problem} for problem in problems], "warnings": []}, 400 if problems else 200)

    def preupload(self, body, repo, revision):
        files = [
            {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
            for file in json.loads(body)["files"]
        ]
        self.send({"files": files})

    def commit(self, body, repo, revision):
        lines = [json.loads(line) for line in body.splitlines()]
        (header,) = (line["value"] for line in lines if line["key"] == "header")
        changes = [
            (line["value"]["path"], base64.b64decode(line["value"]["content"]))
            for line in lines
            if line["key"] == "file"
        ]
        changes += [(line["value"]["path"], None) for line in lines if line["key"] == "deletedFile"]
        assert len(changes) == len(lines) - 1, {line["key"] for line in lines}
        oid = self.server.commit(repo, header["summary"], changes)
        self.send({"commitUrl": f"{self.server.endpoint}/{repo}/commit/{oid}", "commitOid": oid, "hookOutput": ""})

    def info(self, body, repo, revision="main"):
        if found := self.files(repo, revision or "main"):
            oid, files = found
            siblings = [{"rfilename": path} for path in files]
            self.send({"id": repo, "modelId": repo, "sha": oid, "private": False, "tags": [], "siblings": siblings})

    def tree(self, body, repo, revision, folder=""):
        if found := self.files(repo, revision):
            entries = [
                {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for path, content in found[1].items()
                if path.startswith(folder or "")
            ]
            self.send(entries)

    def refs(self, body, repo):
        if found := self.files(repo):
            branch = {"name": "main", "ref": "refs/heads/main", "targetCommit": found[0]}
            self.send({"branches": [branch], "converts": [], "tags": [], "pullRequests": []})

    def resolve(self, body, repo, revision, path):
        if not (found := self.files(repo, revision)):
            return None
        oid, files = found
        if path not in files:
            return self.fail(404, "EntryNotFound")
        etag = f'"{hashlib.sha1(files[path]).hexdigest()}"'
        return self.send(files[path], ETag=etag, X_Repo_Commit=oid, Accept_Ranges="none")


REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"
REVISION = r"(?P<revision>[^/]+)"
ROUTES = [
    ("GET", "/api/whoami-v2", Handler.who_am_i),
    ("POST", "/api/repos/create", Handler.create),
    ("POST", "/api/validate-yaml", Handler.validate_yaml),
    ("POST", f"/api/models/{REPO}/preupload/{REVISION}", Handler.preupload),
    ("POST", f"/api/models/{REPO}/commit/{REVISION}", Handler.commit),
    ("GET", f"/api/models/{REPO}(/revision/{REVISION})?", Handler.info),
    ("GET", f"/api/models/{REPO}/tree/{REVISION}(/(?P<folder>.+))?", Handler.tree),
    ("GET", f"/api/models/{REPO}/refs", Handler.refs),
    ("GET", f"/{REPO}/resolve/{REVISION}/(?P<path>.+)", Handler.resolve),
]


@contextmanager
def running_hub():
    """A Hub in a thread of this process."""
    with Hub() as hub:
        thread = Thread(target=hub.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
