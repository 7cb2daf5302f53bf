"""``hf-subbyte-moe publish``: the repository loads in both worlds, and reaches a Hub over HTTP."""

import base64
import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard, constants
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from hf_subbyte_moe import cli
from hf_subbyte_moe.cache import EntropySubbyteCache
from hf_subbyte_moe.compat import cache_of
from hf_subbyte_moe.experts import engine_of
from hf_subbyte_moe.results import ResultFile
from support.models import prompt, tiny_model
from support.tokens import letter_tokenizer


OPTIONS = '{"kv_cache": {"policy": "uniform:vq2", "window": 16}}'
TOKENS = 400
TOKEN = "Bearer hf_stand_in"
# the same load and the same call where this package cannot be imported
WITHOUT_US = """
import json, sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("hf_subbyte_moe", "subbyte_kernels"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Hidden())
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import DynamicCache

torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
AutoTokenizer.from_pretrained(sys.argv[1])
ids = torch.tensor([json.loads(sys.argv[2])])
out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False,
                     return_dict_in_generate=True)
cache = out["cache"] if "cache" in out else out["past_key_values"]
assert type(cache) is DynamicCache, type(cache)
assert "hf_subbyte_moe" not in sys.modules
print(json.dumps(out.sequences[0].tolist()))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "tiny"
    tiny_model("mixtral").save_pretrained(path)
    letter_tokenizer().save_pretrained(path)
    (path / "routing.safetensors").write_bytes(b"a sidecar")
    (path / "README.md").write_text("---\nlicense: mit\ntags: [small]\n---\nThe model's own card.\n")
    config = json.loads((path / "generation_config.json").read_text())
    config |= {"cache_implementation": "entropy_subbyte", "cache_config": {"bits": 3}}
    (path / "generation_config.json").write_text(json.dumps(config))
    return path


def run(*arguments: str) -> tuple[int, str, BaseException | None]:
    result = CliRunner().invoke(cli.app, ["publish", *arguments], env={"COLUMNS": "200"})
    return result.exit_code, result.output, result.exception


@pytest.fixture(scope="module")
def published(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("published") / "tiny-packed"
    report = out.parent / "report.json"
    row = {"model": "tiny", "dtype": "float32", "prefill": "chunked", "task": "needle", "length": 4096, "score": 0.75}
    row |= {"stderr": 0.1, "n": 20, "metric": "string_match", "higher_is_better": True, "documents": []}
    ours = {**row, "label": "entropy_subbyte bits=2.5", "cache": "entropy_subbyte", "cache_bytes": 1000, "bits": 2.5}
    ResultFile(report).add([{**row, "label": "dynamic", "cache": "dynamic"}, ours])
    arguments = ["--options", OPTIONS, "--base-model", "owner/tiny", "--results", str(report)]
    code, shown, error = run(str(source), str(out), *arguments)
    assert code == 0, (shown, error)
    return out


def test_the_repository_is_complete_and_names_nothing_that_we_register(published: Path, source: Path) -> None:
    names = {path.name for path in published.iterdir()}
    assert {path.name for path in source.iterdir()} == names
    config = json.loads((published / "config.json").read_text())
    assert config["hf_subbyte_moe"] == {"version": 1, **json.loads(OPTIONS)}
    assert "entropy_subbyte" not in (published / "config.json").read_text()
    assert "entropy_subbyte" not in (published / "generation_config.json").read_text()
    assert (published / "routing.safetensors").read_bytes() == b"a sidecar"


def test_the_card_has_front_matter_results_and_what_was_not_measured(published: Path) -> None:
    card = ModelCard.load(published / "README.md")
    data = card.data.to_dict()
    assert (data["library_name"], data["base_model"], data["license"]) == ("transformers", "owner/tiny", "mit")
    assert {"small", "hf-subbyte-moe", "kv-cache"} <= set(data["tags"])
    (result,) = data["model-index"][0]["results"]
    assert result["metrics"][0]["value"] == 0.75
    assert result["dataset"]["type"] == "needle"
    text = card.text
    for wanted in ("from_pretrained(", "| tiny | chunked | needle | 4,096 | dynamic |", "## Not measured"):
        assert wanted in text


def test_it_loads_without_us_and_uses_the_plain_cache(published: Path) -> None:
    ids = prompt(TOKENS)
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_US, str(published), json.dumps(ids[0].tolist())],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    plain = tiny_model("mixtral").generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, cache_implementation="dynamic"
    )
    assert json.loads(ran.stdout.splitlines()[-1]) == plain[0].tolist()


def test_it_loads_with_us_and_everything_is_on(published: Path) -> None:
    ids = prompt(TOKENS)
    model = AutoModelForCausalLM.from_pretrained(published, dtype=torch.float32)
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, return_dict_in_generate=True
    )
    cache = cache_of(made)
    assert isinstance(cache, EntropySubbyteCache)
    assert cache.kv_config.policy == "uniform:vq2"
    assert cache.packed_layers[0].packed_tokens == 256


def test_a_config_alone_goes_with_the_base_models_weights(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "only"
    code, shown, error = run(str(source), str(out), "--config-only", "--base-model", str(source))
    assert code == 0, (shown, error)
    assert not (out / "model.safetensors").exists()
    assert "Nothing: no result file" in (out / "README.md").read_text()
    model = AutoModelForCausalLM.from_pretrained(source, config=AutoConfig.from_pretrained(out), dtype=torch.float32)
    ids = prompt(TOKENS)
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False, return_dict_in_generate=True
    )
    assert isinstance(cache_of(made), EntropySubbyteCache)


def test_bad_input_is_refused(source: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    for arguments, message in [
        ([str(source), out, "--options", "{bits: 2}"], "is no JSON"),
        ([str(source), out, "--options", '{"kv_cache": {"bit": 2}}'], "unknown key 'bit'"),
        ([str(source), out, "--config-only"], "needs --base-model"),
        ([str(source), str(source)], "own folder"),
        ([str(tmp_path), out], "there is no config.json"),
    ]:
        code, _, error = run(*arguments)
        assert code != 0
        assert message in str(error)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ('{"routing": {"mode": "hard"}}', "routing does not support LlamaForCausalLM"),
        ('{"routing": {"mode": "native"}}', "routing does not support LlamaForCausalLM"),
        ('{"experts": {"placement": "offload"}}', "does not support LlamaForCausalLM"),
        ('{"experts": {"weights": "int4"}}', "LlamaForCausalLM has no experts of a known form"),
    ],
)
def test_options_that_a_dense_model_does_not_load_with_are_refused_and_nothing_is_written(
    options: str, message: str, tmp_path: Path
) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "dense")
    code, _, error = run(str(tmp_path / "dense"), str(tmp_path / "out"), "--options", options)
    assert code != 0
    assert isinstance(error, ValueError)
    assert message in str(error)
    assert not (tmp_path / "out").exists()


def test_options_of_every_part_are_published_for_a_model_of_experts(tmp_path: Path) -> None:
    options = {"routing": {"mode": "soft", "clusters": 2}, "experts": {"placement": "offload", "gpu_slots": 6}}
    tiny_model("mixtral").save_pretrained(tmp_path / "moe")
    code, shown, error = run(str(tmp_path / "moe"), str(tmp_path / "out"), "--options", json.dumps(options))
    assert code == 0, (shown, error)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert engine_of(model) is not None
    few = {"experts": {"placement": "offload", "gpu_slots": 1}}
    code, _, error = run(str(tmp_path / "moe"), str(tmp_path / "few"), "--options", json.dumps(few))
    assert "gpu_slots=1 is not possible" in str(error)
    wrong = {"routing": {"mode": "soft", "keep": 9}}
    code, _, error = run(str(tmp_path / "moe"), str(tmp_path / "wrong"), "--options", json.dumps(wrong))
    assert "keep=9 is not possible" in str(error)


# ------------------------------------------------------------------ a Hub of our own


class Hub(ThreadingHTTPServer):
    """What the Hub does when a folder is uploaded, over HTTP: small files in the commit, large ones through LFS.

    Attributes:
        files: what was committed, by path.
        seen: method, path and token of every request.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.objects: dict[str, bytes] = {}
        self.seen: list[tuple[str, str, str | None]] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None:
        """Stay silent."""

    def answer(self, content: Any, status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def note(self) -> bytes:
        self.server.seen.append((self.command, self.path, self.headers.get("Authorization")))
        return self.body()

    def do_GET(self) -> None:
        self.note()
        if self.headers.get("Authorization") != TOKEN:
            self.answer({"error": "who are you?"}, 401)
            return
        self.answer({"id": "someone/tiny", "sha": "0" * 40, "siblings": [], "private": False})

    def do_PUT(self) -> None:
        body = self.note()
        self.server.objects[hashlib.sha256(body).hexdigest()] = body
        self.answer({})

    def do_POST(self) -> None:
        body = self.note()
        if self.headers.get("Authorization") != TOKEN:
            self.answer({"error": "who are you?"}, 401)
        elif self.path == "/api/repos/create":
            asked = json.loads(body)
            self.answer({"url": f"{self.server.address}/someone/{asked['name']}", "id": f"someone/{asked['name']}"})
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            large = ".safetensors"
            files = [
                {"path": file["path"], "uploadMode": "lfs" if file["path"].endswith(large) else "regular"}
                for file in json.loads(body)["files"]
            ]
            self.answer({"files": [{**file, "shouldIgnore": False, "oid": None} for file in files]})
        elif self.path.endswith("/info/lfs/objects/batch"):
            asked = json.loads(body)["objects"]
            objects = [
                {**wanted, "actions": {"upload": {"href": f"{self.server.address}/put/{wanted['oid']}", "header": {}}}}
                for wanted in asked
            ]
            self.answer({"transfer": "basic", "objects": objects})
        elif "/commit/" in self.path:
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    self.server.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
                elif entry["key"] == "lfsFile":
                    self.server.files[entry["value"]["path"]] = self.server.objects[entry["value"]["oid"]]
            url = f"{self.server.address}/someone/tiny/commit/{'1' * 40}"
            self.answer({"success": True, "commitOid": "1" * 40, "commitUrl": url})
        else:
            self.answer({"error": f"no such place: {self.path}"}, 404)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", "hf_stand_in")
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def test_push_uploads_every_file_over_http(source: Path, tmp_path: Path, hub: Hub) -> None:
    out = tmp_path / "tiny"
    code, shown, error = run(str(source), str(out), "--push", "someone/tiny", "--endpoint", hub.address)
    assert code == 0, (shown, error, hub.seen)
    assert hub.files == {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    assert any(method == "PUT" for method, *_ in hub.seen)
    assert f"pushed to {hub.address}/someone/tiny" in shown
    assert 'from_pretrained("someone/tiny"' in (out / "README.md").read_text()


def test_a_refused_push_is_said(source: Path, tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    code, _, error = run(str(source), str(tmp_path / "tiny"), "--push", "someone/tiny", "--endpoint", hub.address)
    assert code != 0
    assert "the Hub refused someone/tiny" in str(error)
    assert not hub.files


def test_a_model_that_is_nowhere_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["publish", str(tmp_path / "none"), str(tmp_path / "out")])
    assert isinstance(result.exception, ValueError)
    assert str(result.exception).endswith("none' is neither a folder nor on the Hub: there is no such file or folder")
    assert not (tmp_path / "out").exists()
