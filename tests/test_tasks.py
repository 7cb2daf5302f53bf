"""The tasks that need no download: lengths in the model's tokens, documents that nothing outside moves."""

import math
import random
from pathlib import Path
from typing import Any

import pytest

from support.tokens import letter_tokenizer


pytest.importorskip("datasets", reason="pip install 'hf-subbyte-moe[eval]'")

from hf_subbyte_moe.tasks import FOLDER, texts


NAMES = ("needle", "multikey", "recall")


@pytest.fixture(scope="module")
def haystack(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("texts") / "hay.txt"
    path.write_text(" ".join(f"word{number}" for number in range(3000)))
    return str(path)


def documents(name: str, **options: Any) -> list[dict[str, Any]]:
    given = {"tokenizer": letter_tokenizer(), "max_seq_lengths": [1500], "num_samples": 4, **options}
    return list(getattr(texts, name)(**given)["test"])


def prompt_of(document: dict[str, Any]) -> str:
    between = "" if document["gen_prefix"].startswith("\n") else " "
    return str(document["input"] + between + document["gen_prefix"])


@pytest.mark.parametrize("name", NAMES)
def test_prompts_have_the_length_asked_for_and_hold_their_answer_once(name: str, haystack: str) -> None:
    for document in documents(name, haystack_file=haystack, max_seq_lengths=[1200, 1500], depths=4):
        prompt = prompt_of(document)
        assert document["max_length"] - 8 <= len(prompt) <= document["max_length"]
        assert document["prompt_tokens"] == len(prompt)
        assert prompt.count(document["outputs"][0]) == 1
        place = prompt.index(document["outputs"][0]) / len(prompt)
        assert place == pytest.approx(document["depth"], abs=0.3)
        assert texts.score_answer(document, [f" {document['outputs'][0]}.\nMore"]) == {
            "string_match": 1,
            str(document["max_length"]): 1,
        }
        assert texts.score_answer(document, ["12"])["string_match"] == 0
    assert [document["depth"] for document in documents(name, depths=4)] == [0.125, 0.375, 0.625, 0.875]


def test_documents_depend_on_their_seed_alone(haystack: str) -> None:
    random.seed(1)
    first = documents("needle", haystack_file=haystack, max_seq_lengths=[1200, 1500])
    random.seed(2)
    state = random.getstate()
    assert documents("needle", haystack_file=haystack)[:4] == first[4:]
    assert random.getstate() == state
    assert documents("needle", haystack_file=haystack, data_seed=1)[0] != first[4]


def test_a_start_token_is_given_where_asked_for(haystack: str) -> None:
    (document, *_) = documents("needle", haystack_file=haystack, bos=True)
    assert document["input"].startswith("\0Some special")


def test_texts_are_cut_into_context_and_what_follows(haystack: str) -> None:
    whole = Path(haystack).read_text()
    made = documents("text", haystack_file=haystack, scored_tokens=100, num_samples=3)
    assert len({document["input"] for document in made}) == 3
    for document in made:
        assert document["input"] + document["outputs"][0] in whole
        assert not document["input"][-1].isspace()
        assert len(document["outputs"][0]) == document["scored_tokens"]
        score = texts.score_text(document, [(-2.0 * document["scored_tokens"], False)])
        assert score == {"nll": 2, "perplexity": 2, "1500": 2}
    assert texts.perplexity([1.0, 3.0]) == pytest.approx(math.exp(2))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("needle", {"max_seq_lengths": [10]}, "max_seq_lengths=10 is not possible"),
        ("needle", {"max_seq_lengths": ["4k"]}, "max_seq_lengths='4k' is not possible"),
        ("needle", {"max_seq_lengths": [200]}, "length 200 is too short"),
        ("needle", {"num_samples": 0}, "num_samples=0 is not possible"),
        ("needle", {"tokenizer": None}, "give metadata tokenizer"),
        ("needle", {"haystack_file": "nowhere.txt"}, "there is no such file"),
        ("recall", {"num_pairs": 500}, "num_pairs=500 is not possible: at most 121"),
        ("text", {}, "give metadata haystack_file"),
    ],
)
def test_wrong_options_are_named(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        documents(name, **options)


def test_every_task_has_its_file() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == {f"subbyte_{name}" for name in (*NAMES, "text")}
