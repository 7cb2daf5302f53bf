"""Models split by accelerate: every layer packs where its keys are, and tokens are those of one device."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_subbyte_moe.cache import CACHE_NAME
from hf_subbyte_moe.compat import cache_of
from support.models import prompt, tiny_model


accelerate = pytest.importorskip("accelerate")
CACHE = {"window": 8, "sinks": 2, "policy": "uniform:vq4"}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "assisted": {"prompt_lookup_num_tokens": 3},
}
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def answer(model: Any, options: dict[str, Any]) -> Any:
    ids = prompt(280).to(model.device)
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=6,
        do_sample=False,
        cache_implementation=CACHE_NAME,
        cache_config=CACHE,
        return_dict_in_generate=True,
        **options,
    )


@pytest.mark.parametrize("mode", list(MODES))
def test_layers_whose_weights_come_and_go_generate_the_same(mode: str, tmp_path: Path) -> None:
    """Accelerate's hooks on the CPU: the second layer's weights lie on disk between its calls."""
    plain = answer(tiny_model("mixtral"), MODES[mode])
    model = tiny_model("mixtral")
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    places |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    split = accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=tmp_path)
    assert split.model.layers[1].self_attn.q_proj.weight.is_meta
    made = answer(split, MODES[mode])
    assert torch.equal(made.sequences, plain.sequences)
    assert all(layer.has_tiles for layer in cache_of(made).packed_layers.values())


@pytest.mark.gpu
@two_gpus
@pytest.mark.parametrize("mode", list(MODES))
def test_layers_on_two_gpus_generate_the_same(mode: str) -> None:
    plain = answer(tiny_model("mixtral").to("cuda:0"), MODES[mode])
    places = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1}
    places |= {"model.norm": 1, "model.rotary_emb": 0, "lm_head": 1}
    made = answer(accelerate.dispatch_model(tiny_model("mixtral"), places), MODES[mode])
    assert torch.equal(made.sequences, plain.sequences)
    layers = list(cache_of(made).packed_layers.values())
    for index, layer in enumerate(layers):
        held = {tensor.device.index for tensor in layer.rows.window.tensors()}
        held |= {pool.device.index for side in (0, 1) for pool in layer.rows.store.pools(side).values()}
        assert held == {index}
        assert layer.has_tiles
