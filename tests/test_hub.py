"""A name is fetched from the hub without pickles or code, or the reason is said why not."""

import hashlib
import http.server
import json
import threading
from typing import ClassVar

import huggingface_hub
from huggingface_hub import constants
import pytest

from jaxrunner.loading.hub import resolve

SHA = "0123456789abcdef0123456789abcdef01234567"
WANTED = {
    "config.json": b"{}",
    "model-00001-of-00001.safetensors": b"weights",
    "model.safetensors.index.json": b"{}",
    "merges.txt": b"a b",
    "chat_template.jinja": b"{{ messages }}",
}
UNWANTED = {
    "pytorch_model.bin": b"pickle",
    "model.pt": b"pickle",
    "modeling_evil.py": b"raise SystemExit",
    "consolidated.safetensors": b"the weights again",
    "original/params.json": b"{}",
    "onnx/model.safetensors": b"for another runtime",
    ".gitattributes": b"",
}


class Hub(http.server.BaseHTTPRequestHandler):
    """What huggingface_hub asks of a hub, for one model that it may see and one it may not."""

    protocol_version = "HTTP/1.1"
    asked: ClassVar[list[str]] = []
    broken = False

    def do_GET(self):
        files = WANTED | UNWANTED
        url = self.path.partition("?")[0]
        self.asked.append(url)
        if self.broken:
            self.answer(500)
        elif url.startswith("/api/models/acme/closed"):
            self.answer(403, {"X-Error-Code": "GatedRepo"})
        elif url in (
            "/api/models/acme/tiny/revision/main",
            f"/api/models/acme/tiny/revision/{SHA}",
        ):
            siblings = [dict(rfilename=name) for name in files]
            self.json(dict(id="acme/tiny", sha=SHA, siblings=siblings, tags=[]))
        elif url == f"/api/models/acme/tiny/tree/{SHA}":
            kinds = dict(type="file")
            self.json([kinds | dict(path=n, size=len(d), oid=etag(d)) for n, d in files.items()])
        elif url.startswith("/api/models/acme/tiny/revision/"):
            self.answer(404, {"X-Error-Code": "RevisionNotFound"})
        elif url.startswith(f"/acme/tiny/resolve/{SHA}/"):
            data = files[url.removeprefix(f"/acme/tiny/resolve/{SHA}/")]
            self.answer(200, {"ETag": f'"{etag(data)}"', "X-Repo-Commit": SHA}, data)
        else:
            self.answer(404, {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def json(self, value):
        self.answer(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def answer(self, status, headers=None, data=b""):
        self.send_response(status)
        for name, value in (headers or {}).items() | {("Content-Length", str(len(data)))}:
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, format, *args):
        """Says nothing: a test's output is its own."""


def etag(data):
    return hashlib.sha1(data).hexdigest()


@pytest.fixture
def hub(monkeypatch):
    """Runs a hub on this machine, with huggingface_hub allowed to ask it."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.daemon_threads = True
    monkeypatch.setattr(Hub, "asked", [])
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    huggingface_hub.close_session()
    yield server
    huggingface_hub.close_session()
    server.shutdown()
    server.server_close()
    thread.join()


def fetch(hub, tmp_path, name="acme/tiny", **kwargs):
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    return resolve(name, endpoint=endpoint, cache_dir=tmp_path / "cache", **kwargs)


def test_a_name_is_fetched_without_pickles_code_or_subfolders(hub, tmp_path):
    folder = fetch(hub, tmp_path)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == WANTED
    got = {url.rpartition(f"{SHA}/")[2] for url in Hub.asked if "/resolve/" in url}
    assert got <= WANTED.keys()


def test_a_revision_is_asked_for(hub, tmp_path):
    assert fetch(hub, tmp_path, revision=SHA).name == SHA
    with pytest.raises(FileNotFoundError, match=r"revision='v9' is not on the hub, or not open"):
        fetch(hub, tmp_path, revision="v9")


@pytest.mark.parametrize("name", ["acme/gone", "acme/closed"])
def test_a_model_that_we_may_not_see_is_named(hub, tmp_path, name):
    with pytest.raises(FileNotFoundError, match=rf"model='{name}'.* not open to you: correct"):
        fetch(hub, tmp_path, name)


def test_the_cache_serves_when_the_hub_does_not(hub, tmp_path, monkeypatch):
    missing = r"model='acme/tiny' is not all in the cache, and the hub cannot be asked: go online"
    with monkeypatch.context() as broken, pytest.raises(FileNotFoundError, match=missing):
        broken.setattr(Hub, "broken", True)
        fetch(hub, tmp_path)
    folder = fetch(hub, tmp_path)
    monkeypatch.setattr(Hub, "broken", True)
    assert fetch(hub, tmp_path) == folder


def test_offline_mode_asks_nobody(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    huggingface_hub.close_session()
    with pytest.raises(FileNotFoundError, match="not all in the cache, and the hub cannot be"):
        fetch(hub, tmp_path)
    assert not Hub.asked
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    huggingface_hub.close_session()
    folder = fetch(hub, tmp_path)
    Hub.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    huggingface_hub.close_session()
    assert fetch(hub, tmp_path) == folder
    assert not Hub.asked


def test_a_folder_is_returned_as_it_is(tmp_path, monkeypatch):
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve(str(tmp_path)) == resolve(tmp_path) == resolve("~") == tmp_path
    assert resolve("owner/name").samefile(tmp_path / "owner" / "name")


@pytest.mark.parametrize("kind", ["./gone", "../gone", "/gone/model", "~/gone", "~no such user/x"])
def test_a_folder_that_is_not_there_is_not_looked_up_on_the_hub(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"is no folder on this machine: correct it"):
        resolve(kind)


def test_a_path_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"model='.*/gone' is no folder on this machine"):
        resolve(tmp_path / "gone")


def test_a_file_is_no_model(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"model\.gguf' is a file: give the folder that holds it"):
        resolve(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    "name",
    [
        "",
        "gpt2",
        "a/b/c",
        "https://huggingface.co/a/b",
        "a b/c",
        "a/b\n",
        "a\0/b",
        "-a/b",
        "a" * 9999,
    ],
)
def test_a_name_must_be_owner_and_model(name):
    with pytest.raises(ValueError, match="must be a folder, or owner/name as on the Hugging Face"):
        resolve(name)


@pytest.mark.parametrize("name", ["a--b/c", "a/..", "a/b.", "a/b.git", "a/" + "b" * 99])
def test_a_name_that_the_hub_does_not_allow_is_refused(name):
    with pytest.raises(ValueError, match="must be a folder, or owner/name as on the hub: "):
        resolve(name)
