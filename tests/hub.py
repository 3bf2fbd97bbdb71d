"""A model hub on loopback: what huggingface_hub, transformers and datasets ask huggingface.co for.

    hub = Hub()
    hub.add("openai/gsm8k", folder, kind="datasets")     # serves the folder's files
    environment = {"HF_ENDPOINT": hub.url, "HF_HOME": empty_folder}

Repositories may be gated (`hub.gated`), files may break off in mid-download (`hub.broken`), and
adding a repository again is a new commit of it. Requests are noted in `hub.requests`.

`stock(hub, folder)` adds a tiny repository under each name that the scripts and the docs use, of
the real one's family and with files like its own.
"""

import hashlib
import json
import re
import shutil
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

import datasets
import tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification as classifier
from transformers import AutoTokenizer, BertConfig, BertModel, PreTrainedModel, RobertaConfig

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

    def answer(self, status: int, body: bytes | list | dict = b"", **headers: object) -> None:
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
            headers["Content_Type"] = "application/json"
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET" and self.path.endswith(tuple(self.hub.broken)):
            self.close_connection = True
            body = body[: len(body) // 2]
        if self.command != "HEAD":
            self.wfile.write(body)

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
            form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
            paths = [folder / path for path in form["paths"]]
            return self.answer(200, [entry(folder, p) for p in paths if p.exists()])
        if found["verb"] == "tree":
            recursive = "true" in parse_qs(address.query).get("recursive", ["false"])[0].lower()
            place = folder / (found["path"] or "")
            if not place.is_dir():
                return self.answer(404, X_Error_Code="EntryNotFound")
            paths = sorted(place.rglob("*") if recursive else place.iterdir())
            return self.answer(200, [entry(folder, path) for path in paths])
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        names = [{"rfilename": str(path.relative_to(folder))} for path in files]
        about = {"id": name, "sha": commit, "private": False, "siblings": names, "tags": []}
        about["gated"] = "manual" if name in self.hub.gated else False
        return self.answer(200, about | {"lastModified": "2026-01-01T00:00:00.000Z"})

    do_HEAD = do_POST = do_GET

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
        if given := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start = int(given[1])
            end = min(int(given[2] or len(content) - 1), len(content) - 1)
            place = f"bytes {start}-{end}/{len(content)}"
            return self.answer(206, content[start : end + 1], Content_Range=place, **about)
        return self.answer(200, content, **about)


# ------------------------------------------------------------------------------- what is on it


def stock(hub: Hub, out: Path) -> None:
    """Serve tiny repositories under the names of the scripts and the docs, made in a folder."""
    gsm8k, math, tldr, redteam = (tiny.MODELS / name for name in tiny.MAKERS)
    neox = tiny.make_model("gpt_neox", tldr / "model", out / "neox")
    neox_judge = save(classifier.from_pretrained(neox, num_labels=1), neox, out / "neox-judge")
    qwen = tiny.make_model("qwen2", math / "model", out / "qwen")
    gpt2 = tiny.make_model("gpt2", redteam / "model", out / "gpt2")
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"intermediate_size": 192, "vocab_size": 502, "pad_token_id": 1}
    config = RobertaConfig(**shape, id2label={0: "nothate", 1: "hate"})
    roberta = save(classifier.from_config(config), gpt2, out / "roberta")
    bert = save(BertModel(BertConfig(**shape)), gpt2, out / "bert")

    def model(name: str, source: Path, **form: object) -> None:
        hub.add(name, write_model(source, out / name, **form))

    model("realtreetune/rho-1b-sft-GSM8K", gsm8k / "model", shards=2)
    for size in ("410m", "1b", "2.8b"):
        model(f"mnoukhov/pythia{size}-sft-tldr", neox)
        model(f"mnoukhov/pythia{size}-rm-tldr6.9b", neox_judge, extra=["training_args.bin"])
    model("EleutherAI/pythia-6.9b-deduped", neox, shards=2)
    model("Qwen/Qwen2.5-7B", qwen, shards=2)
    model("Qwen/Qwen2.5-0.5B-Instruct", qwen)
    for name in ("Llama-3.2-1B", "Llama-3.1-8B-Instruct", "Llama-Guard-3-8B"):
        extra = ["original/consolidated.00.pth", "original/params.json"]
        model(f"meta-llama/{name}", redteam / "victim", shards=2, extra=extra)
        hub.gated.add(f"meta-llama/{name}")
    extra = ["onnx/model.onnx", "pytorch_model.bin", "rust_model.ot", "tf_model.h5"]
    model("openai-community/gpt2", gpt2, extra=extra)
    hub.aliases["models", "gpt2"] = "openai-community/gpt2"
    extra += ["1_Pooling/config.json", "openvino/openvino_model.bin"]
    model("sentence-transformers/all-MiniLM-L6-v2", bert, extra=extra)
    # until 2023 buffers were saved, too
    one = torch.ones(1)
    layer = "gpt_neox.layers.0.attention"
    old = {f"{layer}.{name}": one for name in ("bias", "masked_bias", "rotary_emb.inv_freq")}
    name = "cleanrl/EleutherAI_pythia-6.9b-deduped__reward__tldr"
    model(name, neox_judge, shards=2, tokenizer=False, old=old)
    old = {"transformer.h.0.attn.bias": one, "transformer.h.0.attn.masked_bias": one}
    model("vicgalle/gpt2-alpaca", gpt2, old=old)
    old = {"roberta.embeddings.position_ids": one}
    model("facebook/roberta-hate-speech-dynabench-r4-target", roberta, old=old)

    def data(name: str, source: Path, files: list[str], readme: str = "") -> None:
        """Each file has rows of the split in its name."""
        for file in map((out / name).joinpath, files):
            split = re.search("train|test|validation", file.name)[0]
            lines = (source / "data" / f"{split}.jsonl").read_text().splitlines()[:24]
            file.parent.mkdir(parents=True, exist_ok=True)
            if file.suffix == ".jsonl":
                file.write_text("\n".join(lines))
            else:
                datasets.Dataset.from_list(list(map(json.loads, lines))).to_parquet(file)
        if readme:
            (out / name / "README.md").write_text(readme)
        hub.add(name, out / name, "datasets")

    parquet = "{}/{}-00000-of-00001.parquet".format
    readme = "configs:"
    for name in ("main", "socratic"):
        readme += f"\n- config_name: {name}\n  data_files:"
        readme += "".join(f"\n  - split: {s}\n    path: {name}/{s}-*" for s in ("train", "test"))
    files = [parquet(name, s) for name in ("main", "socratic") for s in ("train", "test")]
    data("openai/gsm8k", gsm8k, files, f"---\n{readme}\n---\n")
    name = "vwxyzjn/summarize_from_feedback_tldr_3_filtered_oai_preprocessing_1706381144"
    data(name, tldr, [parquet("data", "train"), parquet("data", "validation")])
    files = [parquet("data", "train"), parquet("data", "test")]
    data("DigitalLearningGmbH/MATH-lighteval", math, files)
    data("HuggingFaceH4/MATH-500", math, ["test.jsonl"], "Problems.\n")


def save(model: PreTrainedModel, other: Path, out: Path) -> Path:
    """Save a model with another's tokenizer; returns its folder."""
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(other).save_pretrained(out)
    return out


def write_model(
    source: Path, out: Path, shards: int = 1, tokenizer: bool = True,
    extra: Sequence[str] = (), old: dict[str, torch.Tensor] | None = None,
) -> Path:  # fmt: skip
    """Copy a model as a repository with a README; returns its folder.

    `extra` files are of no use to tba.py. With `old` buffers, weights are .bin files.
    """
    out.mkdir(parents=True)
    (out / "README.md").write_text("A model.\n")
    for name in extra:
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("not for PyTorch")
    for file in source.iterdir():
        if file.name == "config.json" or (tokenizer and file.suffix != ".safetensors"):
            shutil.copy(file, out)
    weights = load_file(source / "model.safetensors") | (old or {})
    stem, suffix = ("pytorch_model", "bin") if old else ("model", "safetensors")
    files = {}
    for i in range(shards):
        name = f"{stem}-{i + 1:05}-of-{shards:05}.{suffix}" if shards > 1 else f"{stem}.{suffix}"
        part = dict(list(weights.items())[i::shards])
        files |= dict.fromkeys(part, name)
        if old:
            torch.save(part, out / name)
        else:
            save_file(part, out / name, {"format": "pt"})
    if shards > 1:
        index = {"metadata": {}, "weight_map": files}
        (out / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))
    return out
