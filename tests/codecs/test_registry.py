"""Tiers by name and by id."""

from dataclasses import replace

import pytest

from hf_subbyte_moe.codecs import Table, codec_of, codecs, get_codec, register_codec, registry
from hf_subbyte_moe.config import TIERS
from hf_subbyte_moe.ops import Encoding


# ids are written into pages and must never move
IDS = {"exact": 0, "fp8": 1, "fp6": 2, "vq4": 3, "vq3": 4, "vq3o": 5, "nuq2": 6, "vq2": 7, "vq175": 8}


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registering in a test leaves the package's tiers alone."""
    monkeypatch.setattr(registry, "_BY_NAME", dict(registry._BY_NAME))
    monkeypatch.setattr(registry, "_BY_ID", dict(registry._BY_ID))


def test_ids_are_the_published_ones() -> None:
    assert {codec.name: codec.tier_id for codec in codecs()} == IDS


def test_the_options_name_the_registered_tiers() -> None:
    assert sorted(TIERS) == sorted(codec.name for codec in codecs())
    assert tuple(codec.name for codec in codecs()) == TIERS  # most bits first in both


@pytest.mark.parametrize("name", sorted(IDS))
def test_name_and_id_lead_to_the_same_tier(name: str) -> None:
    assert get_codec(name).name == name
    assert codec_of(IDS[name]) is get_codec(name)


def test_tiers_are_listed_from_most_bits_to_fewest() -> None:
    bits = [codec.format.bits_per_value(128) for codec in codecs()]
    assert bits == sorted(bits, reverse=True)


def test_an_unknown_tier_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"unknown tier 'vq5'; there are \['exact', 'fp6', .*'vq4'\]"):
        get_codec("vq5")


@pytest.mark.usefixtures("own_registry")
def test_a_taken_name_is_refused() -> None:
    codec = get_codec("vq2")
    with pytest.raises(ValueError, match="tier 'vq2' is registered already"):
        register_codec(replace(codec, format=replace(codec.format, tier_id=99)))
    assert codec_of(codec.tier_id) is codec


@pytest.mark.usefixtures("own_registry")
def test_a_taken_id_is_refused_and_leaves_no_trace() -> None:
    codec = get_codec("vq2")
    with pytest.raises(ValueError, match="tier 'mine': id 7 belongs to 'vq2'"):
        register_codec(replace(codec, format=replace(codec.format, name="mine")))
    with pytest.raises(ValueError, match="unknown tier 'mine'"):
        get_codec("mine")


@pytest.mark.usefixtures("own_registry")
def test_a_new_tier_can_be_registered() -> None:
    mine = replace(get_codec("vq2"), format=replace(get_codec("vq2").format, name="mine", tier_id=99))
    register_codec(mine)
    assert get_codec("mine") is mine
    assert codec_of(99) is mine
    assert mine in list(codecs())


def test_tables_go_with_encodings() -> None:
    expected = {Encoding.VECTOR: Table.CODEBOOK, Encoding.SCALAR: Table.CENTROIDS}
    for codec in codecs():
        assert codec.table is expected.get(codec.format.encoding, Table.NONE)
        assert (codec.format.entries > 0) == (codec.table is not Table.NONE)


def test_more_bits_of_rotated_vectors_promise_less_error() -> None:
    errors = [get_codec(name).relative_error for name in ("vq175", "vq2", "vq3", "vq3o", "vq4", "fp6", "exact")]
    assert errors == sorted(errors, reverse=True)
    assert len(set(errors)) == len(errors)
