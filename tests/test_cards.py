"""Every folder of model_cards could be uploaded as it is."""

import json
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from transformers import AutoConfig

from hf_subbyte_moe import EntropySubbyteCache, SubByteConfig


CARDS = Path(__file__).parents[1] / "model_cards"
MODELS = sorted(path.parent.name for path in CARDS.glob("*/config.json"))
CONFIG_ONLY = {"deepseek-v2-lite", "mixtral-8x7b", "qwen3-30b-a3b"}


def test_the_cards_are_those_that_we_promise() -> None:
    assert {*MODELS} == {*CONFIG_ONLY, "subbyte-moe-31m"}


@pytest.mark.parametrize("name", sorted(path.name for path in CARDS.iterdir() if path.is_dir()))
def test_front_matter_and_what_was_measured_and_what_not(name: str) -> None:
    card = ModelCard.load(CARDS / name / "README.md")
    data = card.data.to_dict()
    assert data["library_name"] == "transformers"
    assert data["license"]
    assert "hf-subbyte-moe" in data["tags"]
    assert ("base_model" in data) == (name in CONFIG_ONLY)
    assert "## Measured" in card.text
    assert "## Not measured" in card.text
    assert "```python" in card.text


@pytest.mark.parametrize("name", MODELS)
def test_configs_carry_our_key_and_fit_the_cache(name: str) -> None:
    said = json.loads((CARDS / name / "config.json").read_text())
    assert "entropy_subbyte" not in json.dumps(said)
    options = SubByteConfig.from_dict(said["hf_subbyte_moe"])
    assert options.kv_cache is not None
    config = AutoConfig.from_pretrained(CARDS / name)
    cache = EntropySubbyteCache(config, **options.kv_cache.to_dict())
    assert len(cache.packed_layers) == config.num_hidden_layers
