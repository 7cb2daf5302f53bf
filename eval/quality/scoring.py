"""Figures of decoded tokens, and intervals over texts or prompts."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


RESAMPLES = 2000
_LEVEL = 95.0

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class TokenScores:
    """One line a text or prompt, one column a scored token.

    Attributes:
        kl: ``[n, S]`` KL(exact || packed), nats.
        dnll: ``[n, S]`` negative log likelihood of the target, packed less exact, nats.
        nll_exact: ``[n, S]`` that of the exact cache.
        same: ``[n, S]`` both caches have the same most likely token.
        right: ``[n, S]`` the packed cache's most likely token is the target.
        right_exact: ``[n, S]`` the exact cache's is.
        counted: ``[n, S]`` False where a line has no token.
    """

    kl: Floats
    dnll: Floats
    nll_exact: Floats
    same: Bools
    right: Bools
    right_exact: Bools
    counted: Bools


def compare(exact: Tensor, packed: Tensor, targets: Tensor, counted: Tensor) -> TokenScores:
    """Compare two caches' logits.

    Args:
        exact: ``[n, S, V]`` logits, fp32.
        packed: likewise.
        targets: ``[n, S]`` int64.
        counted: ``[n, S]`` bool.

    Differences of nearly equal distributions are what is measured, so the sums are in fp64.
    """
    exact_log, packed_log = exact.double().log_softmax(-1), packed.double().log_softmax(-1)
    kl = (exact_log.exp() * (exact_log - packed_log)).sum(-1)
    index = targets.unsqueeze(-1)
    nll_exact, nll_packed = (-log.gather(-1, index).squeeze(-1) for log in (exact_log, packed_log))
    top_exact, top_packed = exact.argmax(-1), packed.argmax(-1)

    def floats(tensor: Tensor) -> Floats:
        return tensor.cpu().numpy()

    return TokenScores(
        kl=floats(kl),
        dnll=floats(nll_packed - nll_exact),
        nll_exact=floats(nll_exact),
        same=(top_exact == top_packed).cpu().numpy(),
        right=(top_packed == targets).cpu().numpy(),
        right_exact=(top_exact == targets).cpu().numpy(),
        counted=counted.cpu().numpy(),
    )


def joined(parts: list[TokenScores], axis: int) -> TokenScores:
    """Parts as one: more lines (axis 0) or more tokens of the same lines (axis 1)."""
    return TokenScores(
        **{name: np.concatenate([getattr(part, name) for part in parts], axis=axis) for name in vars(parts[0])}
    )


def line_means(values: Floats | Bools, counted: Bools) -> Floats:
    """``[n]`` mean of each line's counted tokens."""
    means: Floats = np.where(counted, values, 0.0).sum(1) / counted.sum(1)
    return means


def all_right(right: Bools, counted: Bools) -> Floats:
    """``[n]`` 1 where every token of the answer is the most likely one, else 0.

    With the right answer fed back this is what greedy decoding of the answer's length scores: up to its first mistake
    greedy decoding feeds the same tokens.
    """
    whole: Bools = np.all(right | ~counted, axis=1)
    return whole.astype(np.float64)


def interval(values: Floats, seed: int) -> tuple[float, float]:
    """Percentile bootstrap of the mean of ``[n]`` texts or prompts, 95 %."""
    rng = np.random.default_rng(seed)
    means = values[rng.integers(len(values), size=(RESAMPLES, len(values)))].mean(1)
    low, high = np.percentile(means, [(100 - _LEVEL) / 2, (100 + _LEVEL) / 2])
    return float(low), float(high)


def summary(scores: TokenScores, seed: int, answers: bool) -> dict[str, object]:
    """The figures of a row, means over texts or prompts with their intervals.

    Args:
        scores: all tokens.
        seed: of the resamples.
        answers: lines are answers, which are right or wrong.
    """
    counted = scores.counted
    kl, dnll, same = (line_means(values, counted) for values in (scores.kl, scores.dnll, scores.same))
    right, right_exact = all_right(scores.right, counted), all_right(scores.right_exact, counted)
    return {
        "kl": float(kl.mean()),
        "kl_p99": float(np.percentile(scores.kl[counted], 99)),
        "dnll": float(dnll.mean()),
        "top1": float(same.mean()),
        "score": float(right.mean()) if answers else None,
        "score_exact": float(right_exact.mean()) if answers else None,
        "nll_exact": float(line_means(scores.nll_exact, counted).mean()),
        "kl_interval": interval(kl, seed),
        "dnll_interval": interval(dnll, seed),
        "top1_interval": interval(same, seed),
        "score_difference_interval": interval(right - right_exact, seed) if answers else None,
        "n": len(kl),
        "tokens": int(counted.sum()),
    }
