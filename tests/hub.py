"""A model hub on loopback: what huggingface_hub, transformers and datasets ask huggingface.co for.

    hub = Hub()
    hub.add("openai/gsm8k", folder, kind="datasets")     # serves the folder's files
    environment = {"HF_ENDPOINT": hub.url, "HF_HOME": empty_folder}

Repositories may be gated (`hub.gated`), files may break off in mid-download (`hub.broken`), and
adding a repository again is a new commit of it. Requests are noted in `hub.requests`.
"""

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

ADDRESS = re.compile(
    r"/(?:(?P<api>api)/)?(?:(?P<kind>models|datasets)/)?(?P<name>[\w.-]+(?:/[\w.-]+)?)"
    r"(?:/(?P<verb>resolve|tree|revision|paths-info)/(?P<revision>[\w.-]+)(?:/(?P<path>.*))?)?"
)


class Hub:
    """Serves repositories until `close`."""

    def __init__(self) -> None:
        self.commits: dict[tuple[str, str], dict[str, Path]] = {}  # oldest first: commit -> folder
        self.aliases: dict[tuple[str, str], str] = {}  # gpt2 is openai-community/gpt2
        self.gated: set[str] = set()
        self.broken: set[str] = set()  # names of files of which only the first half is sent
        self.requests: list[str] = []
        handler = type("Handler", (Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def add(self, name: str, folder: Path, kind: str = "models") -> str:
        """Serve the files of a folder as the newest commit of a repository; returns the commit."""
        commits = self.commits.setdefault((kind, name), {})
        commit = hashlib.sha1(f"{name} {len(commits)}".encode()).hexdigest()
        commits[commit] = folder
        return commit

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def entry(folder: Path, path: Path) -> dict:
    """What the hub says of a file or a folder of a repository."""
    about = {"path": str(path.relative_to(folder)), "oid": hashlib.sha1(b"").hexdigest()}
    if path.is_dir():
        return about | {"type": "directory", "size": 0}
    content = path.read_bytes()
    return about | {"type": "file", "size": len(content), "oid": hashlib.sha1(content).hexdigest()}


class Handler(BaseHTTPRequestHandler):
    """Answers one connection's requests."""

    hub: ClassVar[Hub]
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **headers: object) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def answer_json(self, value: object) -> None:
        self.answer(200, json.dumps(value).encode(), Content_Type="application/json")

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        self.hub.requests.append(f"{self.command} {self.path}")
        found = ADDRESS.fullmatch(unquote(address.path))
        if not found:
            return self.answer(404)
        kind = found["kind"] or "models"
        name = self.hub.aliases.get((kind, found["name"]), found["name"])
        if (kind, name) not in self.hub.commits:
            return self.answer(401, X_Error_Code="RepoNotFound", X_Error_Message="no repository")
        # a gated repository's name is public
        closed = name in self.hub.gated and "Authorization" not in self.headers
        if closed and found["verb"] in ("resolve", "tree"):
            return self.answer(401, X_Error_Code="GatedRepo", X_Error_Message="is gated")
        commits = self.hub.commits[kind, name]
        newest = list(commits)[-1]
        commit = newest if found["revision"] in (None, "main") else found["revision"]
        if commit not in commits:
            return self.answer(404, X_Error_Code="RevisionNotFound")
        folder = commits[commit]
        if found["verb"] == "resolve":
            return self.file(folder / found["path"], commit)
        if found["verb"] == "paths-info":
            paths = [folder / path for path in self.wanted_paths()]
            return self.answer_json([entry(folder, p) for p in paths if p.exists()])
        if found["verb"] == "tree":
            recursive = "true" in parse_qs(address.query).get("recursive", ["false"])[0].lower()
            place = folder / (found["path"] or "")
            if not place.is_dir():
                return self.answer(404, X_Error_Code="EntryNotFound")
            paths = sorted(place.rglob("*") if recursive else place.iterdir())
            return self.answer_json([entry(folder, path) for path in paths])
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        names = [{"rfilename": str(path.relative_to(folder))} for path in files]
        about = {"id": name, "sha": commit, "private": False, "siblings": names, "tags": []}
        about["gated"] = "manual" if name in self.hub.gated else False
        return self.answer_json(about | {"lastModified": "2026-01-01T00:00:00.000Z"})

    do_HEAD = do_POST = do_GET

    def wanted_paths(self) -> list[str]:
        """The paths in the form or the JSON of a POST request."""
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if "json" in self.headers.get("Content-Type", ""):
            paths = json.loads(body)["paths"]
            return paths if isinstance(paths, list) else [paths]
        return parse_qs(body)["paths"]

    def file(self, path: Path, commit: str) -> None:
        """A file, or the range of it that is asked for."""
        if not path.is_file():
            return self.answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
        content = path.read_bytes()
        about = {
            "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
            "X_Repo_Commit": commit,
            "Accept_Ranges": "bytes",
        }
        if path.name in self.hub.broken and self.command == "GET":
            self.close_connection = True
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2])
            return None
        if given := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start = int(given[1])
            end = min(int(given[2] or len(content) - 1), len(content) - 1)
            place = f"bytes {start}-{end}/{len(content)}"
            return self.answer(206, content[start : end + 1], Content_Range=place, **about)
        return self.answer(200, content, **about)
