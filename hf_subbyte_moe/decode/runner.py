"""A model's ``forward`` that sends single tokens of our cache through a captured graph.

It takes the place of ``model.forward``, so ``generate()`` stays what it is: sampling, streamers and stopping criteria
see the same outputs. Calls that are no single-token step go to the model's own forward. A step that cannot be captured
does so too, and says why, once. Where the reason is that experts are outside the GPU, fused kernels compute the step
all the same, launched one by one.
"""

import inspect
import logging
import weakref
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from hf_subbyte_moe.cache import EntropySubbyteCache, FixedAddressError, count_step, steps_obstacle
from hf_subbyte_moe.compat import CACHE_KW
from hf_subbyte_moe.config import MODEL_WEIGHTS, DecodeConfig
from hf_subbyte_moe.decode.fused import FusedStep, NotNowError, PackedProjections, has_hooks
from hf_subbyte_moe.decode.graph import CaptureError, CaptureRoom, GraphedStep
from hf_subbyte_moe.experts import PlacedExperts


_log = logging.getLogger("hf_subbyte_moe")
_READ = ("input_ids", "position_ids", CACHE_KW)  # what a step reads
_NOT_READ = ("attention_mask", "use_cache", "return_dict", "logits_to_keep", "cache_position")
_GRAPHED = ("cuda",)  # devices that capture
_UNGRAPHED: tuple[str, ...] = ()  # devices that take the same steps without a graph: tests add the CPU
_DIVIDED = "the cache stores keys divided by factors"
_PLACED = "the host decides which of its experts are on the GPU (experts.placement)"


class StepRunner:
    """In place of one model's forward.

    Attributes:
        options: the section ``decode``.
        refused: why steps ran without a graph, each reason once.
    """

    def __init__(self, model: PreTrainedModel, options: DecodeConfig) -> None:
        """``model``: is not kept alive."""
        self._model = weakref.ref(model)
        self.__signature__ = inspect.signature(model.forward)
        self.__name__, self.__doc__ = "forward", type(model).forward.__doc__
        self._room: CaptureRoom | None = None
        self.reset(options)

    def reset(self, options: DecodeConfig) -> None:
        """Begin anew: the model's parts may be others now than those that steps were captured with."""
        self.options = options
        self.refused: list[str] = []
        self._steps: weakref.WeakKeyDictionary[EntropySubbyteCache, GraphedStep] = weakref.WeakKeyDictionary()
        self._obstacles: weakref.WeakKeyDictionary[EntropySubbyteCache, str] = weakref.WeakKeyDictionary()
        self._obstacle: str | None = None  # the model's own
        self._weights: int | None = None  # where they lay when a step was prepared
        self._copies = None if options.projections == MODEL_WEIGHTS else PackedProjections()

    def __deepcopy__(self, memo: dict[int, Any]) -> "StepRunner":
        """For a copy of the model."""
        model = memo.get(id(self.model), self.model)
        copied = StepRunner.__new__(StepRunner)
        copied.__dict__.update(vars(self))
        copied._model, copied._room = weakref.ref(model), None
        copied.reset(self.options)
        return copied

    @property
    def model(self) -> PreTrainedModel:
        """The model."""
        model = self._model()
        assert model is not None
        return model

    def graphed(self, cache: EntropySubbyteCache) -> GraphedStep | None:
        """What computes a cache's steps, once one was taken."""
        return self._steps.get(cache)

    def __call__(self, *args: Any, **kwargs: Any) -> ModelOutput:
        """The model's forward."""
        model = self.model
        if len(args) == 1:
            return self(input_ids=args[0], **kwargs)
        ids, cache = kwargs.get("input_ids"), kwargs.get(CACHE_KW)
        if args or not isinstance(cache, EntropySubbyteCache) or not isinstance(ids, Tensor):
            return self._plain(*args, **kwargs)
        if ids.shape[-1] > 1 or not cache.get_seq_length():
            return self._plain(**kwargs)
        try:
            return self._step(model, cache, ids, kwargs)
        except (CaptureError, FixedAddressError) as problem:
            if isinstance(problem, CaptureError) and not problem.out_of_memory:
                self._obstacle = str(problem)
            else:  # of this cache, or for now
                self._obstacles[cache] = str(problem)
            self._refuse(str(problem))
        except _RefusedError as reason:
            self._refuse(str(reason))
        return self._plain(**kwargs)

    def _plain(self, *args: Any, **kwargs: Any) -> ModelOutput:
        """The model's own forward."""
        model = self.model
        output: ModelOutput = type(model).forward(model, *args, **kwargs)
        return output

    def _step(
        self, model: PreTrainedModel, cache: EntropySubbyteCache, ids: Tensor, kwargs: dict[str, Any]
    ) -> ModelOutput:
        positions = kwargs.get("position_ids")
        if positions is None:
            positions = torch.full_like(ids[:1], cache.get_seq_length())
        weights = next(model.parameters()).data_ptr()
        if weights != self._weights:  # moved, or of another dtype: what was captured reads where they were
            self._steps.clear()
            self._weights = weights
        steps = self._steps.get(cache)
        _check_arguments(kwargs)
        is_new = steps is None or not steps.fits(ids, positions)
        if steps is None or is_new:
            reason = self._obstacle or self._obstacles.get(cache) or model_obstacle(model) or steps_obstacle(cache)
            if reason is not None:
                raise _RefusedError(reason)
            make = self._launched if _places_experts(model) else self._captured
            steps = self._steps[cache] = make(model, cache, ids, positions)
        try:
            output = steps(self._plain, cache, ids, positions, {"use_cache": True, "return_dict": True})
        except (CaptureError, FixedAddressError):
            self._steps.pop(cache, None)
            raise
        if is_new:
            self._say_how(steps, _places_experts(model))
        count_step(cache)
        return output

    def _captured(
        self, model: PreTrainedModel, cache: EntropySubbyteCache, ids: Tensor, positions: Tensor
    ) -> GraphedStep:
        """Steps in a graph, through fused kernels where the model has them."""
        if self._room is None and ids.device.type in _GRAPHED:
            self._room = CaptureRoom(ids.device)
        fused = None
        if self.options.fused:
            try:
                fused = FusedStep(model, len(ids), self._copies)
            except ValueError as reason:
                self._say_unfused(str(reason))
        return GraphedStep(cache, ids, positions, self._room, fused)

    def _launched(
        self, model: PreTrainedModel, cache: EntropySubbyteCache, ids: Tensor, positions: Tensor
    ) -> GraphedStep:
        """Steps through fused kernels that are launched one by one, since experts are placed."""
        if self.options.cuda_graph is True:
            raise _RefusedError(_PLACED)
        try:
            if not self.options.fused:
                raise ValueError("decode.fused is false")
            fused = FusedStep(model, len(ids), self._copies)
        except ValueError as reason:
            obstacle = f"{_PLACED}, and {reason}"
            if not isinstance(reason, NotNowError):
                self._obstacles[cache] = obstacle
            raise _RefusedError(obstacle) from None
        return GraphedStep(cache, ids, positions, None, fused)

    def _say_how(self, steps: GraphedStep, placed: bool) -> None:
        """How a cache's steps are computed, which its first one shows."""
        divided = steps.has_kernels and not steps.is_fused
        if divided:
            self._say_unfused(_DIVIDED)
        if placed:
            reason, how = (f"{_PLACED}, and {_DIVIDED}", "") if divided else (_PLACED, ", through fused kernels")
            self._say_ungraphed(reason, how)

    def _say_unfused(self, reason: str) -> None:
        level = logging.INFO if self._copies is None else logging.WARNING
        _log.log(level, "decode steps run through the model's own modules: %s", reason)

    def _refuse(self, reason: str) -> None:
        if self.options.cuda_graph is True:
            raise ValueError(f"decode.cuda_graph=True is not possible: {reason}")
        self._say_ungraphed(reason)

    def _say_ungraphed(self, reason: str, how: str = "") -> None:
        if reason not in self.refused:
            self.refused.append(reason)
            _log.warning("decode steps run without a CUDA graph%s: %s", how, reason)


class _RefusedError(Exception):
    """A step has to run through the model's own forward."""


def _check_arguments(kwargs: dict[str, Any]) -> None:
    """Refuse what a captured step would not do."""
    if torch.is_grad_enabled():
        raise _RefusedError("gradients are on; use torch.no_grad()")
    for name, value in kwargs.items():
        if name in _READ or name in _NOT_READ or value is None or value is False:
            continue
        raise _RefusedError(f"forward was given {name}")
    if kwargs.get("return_dict") is False or kwargs.get("use_cache") is False:
        raise _RefusedError("the output is asked for as a tuple or without a cache")


def model_obstacle(model: PreTrainedModel) -> str | None:
    """Why a model's steps cannot be taken at fixed addresses, or be captured, as far as that can be seen from outside.

    Placed experts, which rule a graph out, are none: fused kernels compute such a step without one.
    """
    kind = model.device.type
    if kind not in _GRAPHED + _UNGRAPHED:
        return f"the model is on {kind}, not on a CUDA device"
    config = model.config
    if any(getattr(config, f"output_{name}", False) for name in ("hidden_states", "attentions", "router_logits")):
        return "the model's config asks for hidden states, attentions or router logits"
    if getattr(model, "_device_mesh", None) is not None:
        return "its parts lie on several ranks"
    with_model = (module for module in model.modules() if not isinstance(module, PlacedExperts))
    if {weight.device for module in with_model for weight in module.parameters(recurse=False)} != {model.device}:
        return "its weights lie on several devices"
    placed = _places_experts(model)
    for name, module in model.named_modules():
        if hasattr(module, "_hf_hook"):
            return f"accelerate moves the weights of {name or 'the model'}"
        if not placed and has_hooks(module):
            return f"{name or 'the model'} has forward hooks, which a replay would not call"
    return None


def _places_experts(model: PreTrainedModel) -> bool:
    return any(isinstance(module, PlacedExperts) for module in model.modules())


def graph_steps(model: PreTrainedModel, options: DecodeConfig) -> None:
    """Let a model's single-token steps run in a graph, or not, as the options say."""
    if options.cuda_graph is False:
        run_eagerly(model)
        return
    check_forward(model, options)
    runner = vars(model).get("forward")
    if isinstance(runner, StepRunner):
        runner.reset(options)
    else:
        vars(model)["forward"] = StepRunner(model, options)


def check_forward(model: PreTrainedModel, options: DecodeConfig) -> None:
    """Raises ValueError where :func:`graph_steps` can't take the place of a model's forward."""
    runner = vars(model).get("forward")
    if options.cuda_graph is not False and runner is not None and not isinstance(runner, StepRunner):
        raise ValueError(
            f"decode: the forward of this {type(model).__name__} was replaced already (by accelerate, or by hand)"
        )


def run_eagerly(model: PreTrainedModel) -> None:
    """Take :func:`graph_steps` back."""
    if isinstance(vars(model).get("forward"), StepRunner):
        del vars(model)["forward"]
