"""Options: frozen, validated, and nothing that is not read.

A wrong key, type or value is a ``ValueError`` that names the key, the value and what is allowed. The same dictionaries
come from ``generate(cache_config=...)``, ``from_pretrained(hf_subbyte_moe=...)`` and config.json.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, TypeVar


CONFIG_VERSION = 1
TILE_TOKENS = 128
TIERS = ("exact", "fp8", "fp6", "vq4", "vq3o", "vq3", "nuq2", "vq2", "vq175")
DEFAULT_BITS = 2.5
BUDGET_POLICIES = ("error", "entropy_rank", "entropy_rank_inverse", "residual_entropy", "random", "uniform")
POLICIES = (*BUDGET_POLICIES, "entropy")  # those that need no sidecar
AUTO, CALIBRATED = "auto", "calibrated"
_WITH_BUDGET = (AUTO, CALIBRATED, *BUDGET_POLICIES)
UNIFORM = "uniform:"
CODEBOOKS = ("universal", "online", "queries", CALIBRATED)
BACKENDS = ("auto", "cuda", "triton", "torch")
WHOLE_PROMPT = "prompt"
ROUTING_MODES = ("native", "soft", "hard")
CLUSTER_SCORES = ("top2", "max")
MODEL_WEIGHTS = "model"
EXPERT_WEIGHTS = (MODEL_WEIGHTS, "int4", "int4-g64", "fp8")
PROJECTIONS = (MODEL_WEIGHTS, "int4")
PLACEMENTS = ("gpu", "offload", "disk")
OFF = "off"
PREDICTORS = ("previous", "gate", "head")
PREFETCHES = (AUTO, OFF, *PREDICTORS)
PRESETS = {"hierarchical": {"mode": "hard", "top_clusters": 4}}  # the first seed document's


def _fail(key: str, value: object, allowed: str) -> ValueError:
    return ValueError(f"{key}={value!r} is not possible: {allowed}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _reject_unknown(section: str, given: Mapping[str, Any], allowed: list[str]) -> None:
    for key in given:
        if key not in allowed:
            raise ValueError(f"unknown key {key!r} in {section}; there are {allowed}")


_SectionT = TypeVar("_SectionT", bound="_Section")


@dataclass(frozen=True)
class _Section:
    """Options under one key."""

    section: ClassVar[str]

    @classmethod
    def from_dict(cls: type[_SectionT], options: Mapping[str, Any], section: str | None = None) -> _SectionT:
        """Read options; missing keys take their defaults.

        Args:
            options: by name.
            section: what messages call them; by default the key that they stand under.

        Raises:
            ValueError: an unknown key, a wrong type or an impossible value.
        """
        section = cls.section if section is None else section
        if not isinstance(options, Mapping):
            raise ValueError(f"{section} must be a dictionary, not {options!r}")
        return cls._read(options, section)

    @classmethod
    def _read(cls: type[_SectionT], options: Mapping[str, Any], section: str) -> _SectionT:
        _reject_unknown(section, options, [field.name for field in fields(cls)])
        return cls(**options)

    def to_dict(self) -> dict[str, Any]:
        """The options that differ from their defaults, as JSON values."""
        return {key: value for key, value in asdict(self).items() if value != getattr(type(self), key)}


@dataclass(frozen=True)
class KVCacheConfig(_Section):
    """How a model's keys and values are cached.

    Attributes:
        default: ``generate`` uses this cache without being told.
        bits: average bits of a packed value, scales and outliers included; None means 2.5, or the least that a small
            head dimension allows. Only with the policies that keep a budget (``BUDGET_POLICIES``, and with a sidecar).
        policy: ``auto`` (``calibrated`` where there is a sidecar, else ``error``), ``calibrated`` (what a tier costs
            the model's predictions, from the sidecar), ``error`` (measured error of each head's output), ``entropy``
            (the seed documents' thresholds), ``entropy_rank`` (their direction under a budget),
            ``entropy_rank_inverse`` (its reverse), ``residual_entropy`` (the reverse, of the entropy without sinks and
            window), ``random`` (seeded), ``uniform`` (the same bits for every head) or ``uniform:<tier>``.
        codebook: ``universal`` (needs no data), ``online`` (k-means on the prompt), ``queries`` (universal entries; a
            key's codes are chosen by what their error costs the prompt's queries) or ``calibrated`` (by what it costs
            the model's predictions, from the sidecar).
        window: recent tokens that stay exact; up to 127 more wait there for their tile.
        sinks: first tokens that stay exact.
        chunk: ``"prompt"``, or tokens that share a choice of tier: a multiple of 128.
        sidecar: file that ``hf-subbyte-moe calibrate`` wrote; None looks into the model's folder or repository.
        backend: what computes decode attention: ``auto`` (the fastest that can), ``cuda``, ``triton`` or ``torch``.
    """

    section: ClassVar[str] = "kv_cache"

    default: bool = True
    bits: float | None = None
    policy: str = AUTO
    codebook: str = "universal"
    window: int = 128
    sinks: int = 4
    chunk: str | int = WHOLE_PROMPT
    sidecar: str | None = None
    backend: str = "auto"

    def __post_init__(self) -> None:
        if not isinstance(self.default, bool):
            raise _fail("default", self.default, "true or false")
        self._check_policy()
        if self.codebook not in CODEBOOKS:
            raise _fail("codebook", self.codebook, f"one of {list(CODEBOOKS)}")
        if not _is_int(self.window) or self.window < 1:
            raise _fail("window", self.window, "a number of tokens, at least 1")
        if not _is_int(self.sinks) or self.sinks < 0:
            raise _fail("sinks", self.sinks, "a number of tokens, at least 0")
        if self.chunk != WHOLE_PROMPT and not (
            isinstance(self.chunk, int) and _is_int(self.chunk) and self.chunk > 0 and self.chunk % TILE_TOKENS == 0
        ):
            raise _fail("chunk", self.chunk, f"{WHOLE_PROMPT!r} or a multiple of {TILE_TOKENS} tokens")
        self._check_sidecar()
        if self.backend not in BACKENDS:
            raise _fail("backend", self.backend, f"one of {list(BACKENDS)}")

    def _check_sidecar(self) -> None:
        if self.sidecar is None:
            return
        if not isinstance(self.sidecar, str) or not self.sidecar:
            raise _fail("sidecar", self.sidecar, "a path")
        if self.policy not in (AUTO, CALIBRATED) and self.codebook != CALIBRATED:
            raise _fail(
                "sidecar", self.sidecar, f"policy {AUTO!r} or {CALIBRATED!r} or codebook {CALIBRATED!r} reads it"
            )

    @property
    def keeps_budget(self) -> bool:
        """Whether ``bits`` means anything."""
        return self.policy in _WITH_BUDGET

    def _check_policy(self) -> None:
        named = (AUTO, CALIBRATED, *POLICIES)
        allowed = f"one of {list(named)} or {UNIFORM}<tier> with a tier of {list(TIERS)}"
        if not isinstance(self.policy, str):
            raise _fail("policy", self.policy, allowed)
        if self.policy not in named and not (
            self.policy.startswith(UNIFORM) and self.policy.removeprefix(UNIFORM) in TIERS
        ):
            raise _fail("policy", self.policy, allowed)
        if self.bits is None:
            return
        if isinstance(self.bits, bool) or not isinstance(self.bits, (int, float)) or not 0 < self.bits <= 16:
            raise _fail("bits", self.bits, "a number of bits a value, above 0 and at most 16")
        if not self.keeps_budget:
            raise _fail(
                "bits",
                self.bits,
                f"policy {self.policy!r} fixes its own bits; a budget goes with {list(_WITH_BUDGET)}",
            )


@dataclass(frozen=True)
class RoutingConfig(_Section):
    """How a model's tokens find their experts.

    Attributes:
        mode: ``native`` (the model's own choice), ``soft`` (a bonus for experts of the favoured clusters) or ``hard``
            (only experts of the best clusters). Weights are the true router's in each.
        clusters: clusters of experts; None means what the cluster file has, the model's own groups, or 8.
        top_clusters: clusters that are favoured (soft) or kept (hard); None means 1 and half of them.
        cluster_score: what ranks clusters in ``hard``: ``top2`` (sum of the two best experts) or ``max``.
        keep: of each token's experts, how many the router chooses alone; ``soft`` only.
        strength: the bonus, in units of the router's logits; ``soft`` only.
        follow: how much the favoured cluster depends on where the token was one layer before, 0 to 1; ``soft`` only.
        batch_aware: bonus for experts that a batch of 2 to 32 tokens needs anyway; ``soft`` only.
        sidecar: file that ``hf-subbyte-moe cluster`` wrote; None looks into the model's folder or repository.
        fused: in mode ``native`` on a GPU, one launch routes up to 16 tokens, where the family's router is known. Sums
            are in fp32 but in another order: logits may differ in their last bit.
    """

    section: ClassVar[str] = "routing"

    mode: str = "native"
    clusters: int | None = None
    top_clusters: int | None = None
    cluster_score: str = "top2"
    keep: int = 1
    strength: float = 0.5
    follow: float = 0.5
    batch_aware: float = 0.0
    sidecar: str | None = None
    fused: bool = True

    def __post_init__(self) -> None:
        if self.mode not in ROUTING_MODES:
            raise _fail("mode", self.mode, f"one of {list(ROUTING_MODES)}")
        for key in ("clusters", "top_clusters"):
            value = getattr(self, key)
            if value is not None and (not _is_int(value) or value < 1):
                raise _fail(key, value, "a number of clusters, at least 1")
        if self.clusters is not None and self.top_clusters is not None and self.top_clusters > self.clusters:
            raise _fail("top_clusters", self.top_clusters, f"there are {self.clusters} clusters")
        if self.cluster_score not in CLUSTER_SCORES:
            raise _fail("cluster_score", self.cluster_score, f"one of {list(CLUSTER_SCORES)}")
        if not _is_int(self.keep) or self.keep < 0:
            raise _fail("keep", self.keep, "a number of experts, at least 0")
        for key, most in (("strength", 40), ("batch_aware", 40), ("follow", 1)):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
                raise _fail(key, value, f"a number from 0 to {most}")
        if self.sidecar is not None and (not isinstance(self.sidecar, str) or not self.sidecar):
            raise _fail("sidecar", self.sidecar, "a path")
        if not isinstance(self.fused, bool):
            raise _fail("fused", self.fused, "true or false")

    @property
    def needs_clusters(self) -> bool:
        """Whether clusters change anything."""
        return self.mode == "hard" or (self.mode == "soft" and self.strength > 0)

    def clusters_kept(self, count: int) -> int:
        """Clusters that are favoured or kept, of ``count``."""
        if self.top_clusters is not None:
            return self.top_clusters
        return (count + 1) // 2 if self.mode == "hard" else 1

    @classmethod
    def _read(cls, options: Mapping[str, Any], section: str) -> "RoutingConfig":
        """``preset`` gives others their values, a key beside it wins."""
        given = dict(options)
        preset = given.pop("preset", None)
        _reject_unknown(section, options, [*(field.name for field in fields(cls)), "preset"])
        if preset is not None and (not isinstance(preset, str) or preset not in PRESETS):
            raise _fail("preset", preset, f"one of {list(PRESETS)}")
        return cls(**{**(PRESETS[preset] if preset else {}), **given})


@dataclass(frozen=True)
class ExpertsConfig(_Section):
    """Where a model's experts live.

    Attributes:
        placement: ``gpu`` (with the rest of the model), ``offload`` (in pinned host memory, some in slots on the GPU)
            or ``disk`` (in files, some in host memory, some of these in slots on the GPU).
        gpu_slots: experts that the GPU holds at a time: a share of all (a fraction, at most 1.0) or a number of them.
        prefetch: what foretells the next layer's experts: ``previous`` (those of the token before), ``gate`` (the next
            layer's norm and router on this layer's state), ``head`` (trained; from the sidecar), ``auto`` (the best
            that there is) or ``off``. Where prefetching turns out not to pay, it stops by itself.
        sidecar: file that ``hf-subbyte-moe calibrate --predictor`` wrote; None looks into the model's folder.
        weights: ``model`` (as they are), ``int4`` (a scale for each 32 values), ``int4-g64`` (for each 64) or ``fp8``:
            packed layer by layer when the model is loaded, and read packed.
        fused: up to 16 tokens on a GPU are computed in two launches, with sums in another order than the model's own
            function takes them; None means where experts stay with the model. Fused steps (:class:`DecodeConfig`)
            compute them so in any case.
    """

    section: ClassVar[str] = "experts"

    placement: str = "gpu"
    gpu_slots: float | int = 0.5
    prefetch: str = AUTO
    sidecar: str | None = None
    weights: str = MODEL_WEIGHTS
    fused: bool | None = None

    def __post_init__(self) -> None:
        if self.placement not in PLACEMENTS:
            raise _fail("placement", self.placement, f"one of {list(PLACEMENTS)}")
        share = isinstance(self.gpu_slots, float) and 0 < self.gpu_slots <= 1
        if not share and not (_is_int(self.gpu_slots) and self.gpu_slots >= 1):
            raise _fail("gpu_slots", self.gpu_slots, "a share of all experts above 0.0 and at most 1.0, or a number")
        if self.prefetch not in PREFETCHES:
            raise _fail("prefetch", self.prefetch, f"one of {list(PREFETCHES)}")
        if self.sidecar is not None and (not isinstance(self.sidecar, str) or not self.sidecar):
            raise _fail("sidecar", self.sidecar, "a path")
        if self.weights not in EXPERT_WEIGHTS:
            raise _fail("weights", self.weights, f"one of {list(EXPERT_WEIGHTS)}")
        if self.fused is not None and not isinstance(self.fused, bool):
            raise _fail("fused", self.fused, "true or false")

    @property
    def moves(self) -> bool:
        """Whether experts are anywhere but with the rest of the model."""
        return self.placement != "gpu"

    @property
    def loads_in_host_memory(self) -> bool:
        """Whether a model is first loaded whole into host memory, or into files."""
        return self.moves or self.weights != MODEL_WEIGHTS

    @property
    def is_fused(self) -> bool:
        """Whether our function computes experts."""
        if self.fused is None:
            return not self.moves or self.weights != MODEL_WEIGHTS
        return self.fused

    @property
    def wants_sidecar(self) -> bool:
        """Whether a sidecar of the model's own would be read."""
        return self.moves and self.sidecar is None and self.prefetch in (AUTO, "head")


@dataclass(frozen=True)
class DecodeConfig(_Section):
    """How single tokens are computed.

    Attributes:
        cuda_graph: ``"auto"`` (the whole step is captured once and replayed, where that is possible), ``True`` (or it
            is an error) or ``False``. With experts outside the GPU it is not possible: ``"auto"`` then launches a
            fused step's kernels one by one.
        fused: such steps go through fused kernels where the model's family has them; ``False`` keeps to its modules,
            whose sums are those of a step without a graph.
        projections: what fused steps read of attention's projections: ``"model"`` (the model's own weights) or
            ``"int4"``, copies with a scale for each 32 values, made when a first step needs them. The model keeps its
            weights, and prompts are computed from them; weights written through ``.data`` need ``apply()`` again.
    """

    section: ClassVar[str] = "decode"

    cuda_graph: bool | str = AUTO
    fused: bool = True
    projections: str = MODEL_WEIGHTS

    def __post_init__(self) -> None:
        if not isinstance(self.cuda_graph, bool) and self.cuda_graph != AUTO:
            raise _fail("cuda_graph", self.cuda_graph, f"{AUTO!r}, true or false")
        if not isinstance(self.fused, bool):
            raise _fail("fused", self.fused, "true or false")
        if self.projections not in PROJECTIONS:
            raise _fail("projections", self.projections, f"one of {list(PROJECTIONS)}")
        if self.projections != MODEL_WEIGHTS and not self.fused:
            raise _fail("projections", self.projections, f"{MODEL_WEIGHTS!r} where fused is false")


_SECTIONS: dict[str, type[Any]] = {
    kind.section: kind for kind in (KVCacheConfig, RoutingConfig, ExpertsConfig, DecodeConfig)
}


@dataclass(frozen=True)
class SubByteConfig:
    """Everything that this package does to one model.

    Attributes:
        kv_cache: the cache, or None to leave it to Transformers.
        routing: how tokens find their experts, or None to leave it to the model.
        experts: where experts live, or None to leave them where they are.
        decode: how single tokens are computed, or None for one launch after the other.
    """

    kv_cache: KVCacheConfig | None = None
    routing: RoutingConfig | None = None
    experts: ExpertsConfig | None = None
    decode: DecodeConfig | None = None

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> "SubByteConfig":
        """Read what ``from_pretrained(hf_subbyte_moe=...)`` and config.json carry.

        Raises:
            ValueError: an unknown section or key, a wrong type, an impossible value, or a newer version.
        """
        if not isinstance(options, Mapping):
            raise ValueError(f"hf_subbyte_moe must be a dictionary, not {options!r}")
        sections = [field.name for field in fields(cls)]
        _reject_unknown("hf_subbyte_moe", options, [*sections, "version"])
        version = options.get("version", CONFIG_VERSION)
        if not _is_int(version) or not 1 <= version <= CONFIG_VERSION:
            raise _fail("version", version, f"this release reads versions 1 to {CONFIG_VERSION}")
        given = {name: options.get(name) for name in _SECTIONS}
        return cls(**{name: None if own is None else _SECTIONS[name].from_dict(own) for name, own in given.items()})

    def to_dict(self) -> dict[str, Any]:
        """What goes into config.json; ``from_dict`` reads it back."""
        sections = {name: getattr(self, name) for name in _SECTIONS}
        return {
            "version": CONFIG_VERSION,
            **{name: section.to_dict() for name, section in sections.items() if section is not None},
        }
