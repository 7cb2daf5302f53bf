"""README shows no figure without a source, and everything that it tells people to type works.

Snippets run in the order of the page, in an empty folder, with these substitutions: every model is a tiny random MoE
with a tokenizer of letters; what an id on the Hub is only a config for is that config in this project; texts, contexts
and samples are small; nothing is pushed (how that goes is tested in tests/cli/test_publish.py), and what a launcher
starts is read and not run (tests/distributed starts it). Commands of the other pages are read by the parsers that they
go to, and not run.
"""

import importlib
import importlib.util
import json
import re
import shlex
import sys
from collections.abc import Iterator
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import click
import pytest
import typer
from typer.testing import CliRunner

from hf_subbyte_moe import cli
from support.models import tiny_model
from support.tokens import letter_tokenizer


ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
OTHER_PAGES = (
    ROOT / "eval" / "README.md",
    ROOT / "kernels" / "README.md",
    *(ROOT / "model_cards").glob("*/README.md"),
)
MARKED = re.compile(r"<!-- report: (\w+) -->\n.*?<!-- end report -->", re.DOTALL)
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# numbers that no measurement gives: what things are called, defaults, limits of what is supported
ALLOWED = (
    "16 bits, and every step reads them all",
    "about two and a half bits",
    "Qwen2 and 3, Gemma 2 and 3, Phi, Mixtral",
    "Qwen2-MoE and Qwen3-MoE, OLMoE, gpt-oss, Granite-MoE, DeepSeek V2 and V3",
    "the default, 2.5 `bits`",
    "3.25 `bits`",
    "all that counts: 2.25",
    "| 2.5 | average bits",
    "above 4.5 bits of entropy",
    "above 2.5",
    "| 128, 4 | recent tokens (up to 127 more",
    "a multiple of 128",
    "head dimensions 64 and 128, fp16 and bf16",
    "fastest bf16 attention",
    "(packing `fp8` needs",
    "at 2.5 bits:",
    "up to 16 rows of them",
    "Below about 2,000 tokens",
    "Python 3.10 and newer, PyTorch 2.8 and newer, Transformers 5.17 to 5.x",
    "Apache-2.0",
    "two documents: (1)",
    "compression, (2)",
)


def prose(page: str) -> str:
    """A page without what is rendered, without code, links and headings of nothing but names."""
    text = FENCED.sub("", MARKED.sub("", page))
    text = re.sub(r"\]\([^)]*\)", "]", text)
    text = re.sub(r"^\d+\. ", "", text, flags=re.MULTILINE)  # a numbered list
    return re.sub(r"\s+", " ", text)


def test_every_figure_has_a_source() -> None:
    text = prose(README.read_text(encoding="utf-8"))
    for words in ALLOWED:
        assert words in text, f"README says {words!r} no longer: take it out of ALLOWED"
        text = text.replace(words, "")
    text = re.sub(r"`[^`]*`", "", text)
    left = re.findall(r".{0,40}\d+.{0,20}", text)
    assert not left, f"figures between no report marks and not in ALLOWED: {left}"


def test_a_figure_without_a_source_is_noticed() -> None:
    page = "a\n<!-- report: demo -->\n| 17 |\n<!-- end report -->\n```\n18\n```\nIt is 19 times faster.\n| a | 20 |\n"
    assert re.findall(r"\d+", prose(page)) == ["19", "20"]


# ------------------------------------------------------------------ snippets


def commands(block: str) -> Iterator[list[str]]:
    """Words of every command of a shell block; comments and line ends escaped are gone."""
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while "&&" in words:
            cut = words.index("&&")
            yield words[:cut]
            words = words[cut + 1 :]
        if words:
            yield words


def parse(words: list[str], command: Any) -> None:
    """Have a command read its words; an unknown option is an error."""
    context = click.Context(command, ignore_unknown_options=command.ignore_unknown_options)
    while isinstance(command, click.Group):
        if not words or words[0].startswith("-"):
            break
        command, words = command.commands[words[0]], words[1:]
        context = click.Context(command, ignore_unknown_options=command.ignore_unknown_options)
    command.make_parser(context).parse_args(list(words))


def script(path: Path) -> Any:
    """The command of a script under eval/; None where it reads its words by itself."""
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    if "typer" not in vars(module):
        return None
    app = typer.Typer()
    app.command()(module.main)
    return typer.main.get_command(app)


def check_pip(words: list[str]) -> None:
    """Extras that ``pip install`` names are there."""
    known = metadata("hf-subbyte-moe").get_all("Provides-Extra") or []
    for word in words:
        if match := re.fullmatch(r"(?:\.|hf-subbyte-moe)\[([\w,]+)\]", word):
            assert set(match[1].split(",")) <= set(known), word


@pytest.mark.parametrize("page", OTHER_PAGES, ids=lambda page: "/".join(page.parts[-2:]))
def test_commands_of_other_pages_exist(page: Path) -> None:
    for language, block in FENCED.findall(page.read_text(encoding="utf-8")):
        for words in commands(block) if language == "bash" else ():
            if words[0] == "hf-subbyte-moe":
                parse(words[1:], typer.main.get_command(cli.app))
            elif words[0] == "pip":
                check_pip(words)
            elif words[0] == "python":
                path = ROOT / words[1]
                assert path.is_file(), words
                command = script(path) if path.parent.name == "eval" else None
                if command is not None:
                    parse(words[2:], command)


class Reader:
    """Somebody who types what README says, with the substitutions of this file."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.names = folder, dict[str, Any]()
        self.model = folder / "my-model"
        tiny_model("qwen3_moe", head_dim=64).save_pretrained(self.model)
        letter_tokenizer().save_pretrained(self.model)
        lines = [json.dumps({"text": f"text {number} " * 30}) for number in range(4)]
        (folder / "texts.jsonl").write_text("\n".join(lines), encoding="utf-8")

    def python(self, block: str) -> None:
        """Run a block after those before it."""
        block = block.replace('"Qwen/Qwen3-30B-A3B"', repr(str(self.model))).replace("new_tokens=100", "new_tokens=4")
        exec(compile(block, str(README), "exec"), self.names)

    def shell(self, words: list[str]) -> None:
        """Run a command."""
        if words[0] == "pip":
            check_pip(words)
        elif words[0] == "hf-subbyte-moe":
            parse(words[1:], typer.main.get_command(cli.app))
            result = CliRunner().invoke(cli.app, self.smaller(words[1:]), env={"COLUMNS": "150"})
            assert result.exit_code == 0, (words, result.output, result.exception)
        elif words[0] in ("torchrun", "accelerate"):
            assert words[words.index("-m") + 1] == "hf_subbyte_moe.cli"
            parse(words[words.index("-m") + 2 :], typer.main.get_command(cli.app))
        else:
            assert words == ["pytest"]  # which is what runs this

    def smaller(self, words: list[str]) -> list[str]:
        """The same command on less."""
        swapped = {
            "mistralai/Mixtral-8x22B-v0.1": str(ROOT / "eval" / "configs" / "models" / "mixtral-8x22b.json"),
            "Qwen/Qwen3-30B-A3B": str(self.model),
        }
        words = [swapped.get(word, word) for word in words]
        if "--push" in words:
            cut = words.index("--push")
            del words[cut : cut + 2]
        if words[0] == "eval":
            words[words.index("--lengths") + 1], words[words.index("--limit") + 1] = "500", "1"
            words += ["--model", str(self.model), "--device", "cpu"]
        more = {"demo": ["--context", "700"], "cluster": ["--windows", "4", "--context", "64"]}
        return words + more.get(words[0], [])


def test_every_snippet_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval", reason="pip install 'hf-subbyte-moe[eval]'")
    monkeypatch.chdir(tmp_path)
    reader = Reader(tmp_path)
    ran = []
    for language, block in FENCED.findall(README.read_text(encoding="utf-8")):
        ran.append(language)
        if language == "python":
            reader.python(block)
        elif language == "bash":
            for words in commands(block):
                reader.shell(words)
    assert ran.count("python") >= 4
    assert ran.count("bash") >= 4
    assert set(ran) == {"python", "bash", ""}  # the picture has no language
    assert (tmp_path / "out" / "README.md").is_file()
    assert (tmp_path / "coactivation.png").is_file()
