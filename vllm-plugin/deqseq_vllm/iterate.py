"""The loop of a solve over the requests of one forward pass, by deqseq's stopping rule."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deqseq import SolveConfig, Status, take
from deqseq.rows import on_device, on_host
from deqseq.windows import Window


class Solved(NamedTuple):
    """The value of each token, ``(tokens, width)``, and arrays ``(requests,)`` of the host."""

    value: Tensor
    iterations: np.ndarray
    status: np.ndarray
    """As :class:`deqseq.Status`."""


def iterate(
    f: Callable[[Tensor], Tensor],
    start: Tensor,
    lengths: np.ndarray,
    config: SolveConfig,
    keep: Callable[[Tensor, Tensor], None],
) -> Solved:
    """Iterate until each request has converged, diverged or spent its budget.

    A request is a row of :func:`deqseq.solve`: it ends when all of its tokens pass in one
    evaluation, or when one of them has diverged. It takes part in no further evaluation.

    Args:
        f: the map of the tokens that are iterated, ``(tokens, width) -> (tokens, width)``, into a
            new tensor.
        start: the states of all tokens, one request after another, ``(tokens, width)``.
        lengths: tokens of each request, ``(requests,)``.
        config: the solver, which has no memory, and the stopping rule.
        keep: called with the places of the requests that go on, among those before, and of their
            tokens: ``f`` is then called with these tokens only.

    Returns:
        Values are those of the last evaluation; of a request that has diverged, its last finite
        point.
    """
    stop, solver, device = config.stop, config.solver, start.device
    window = Window(stop, solver, len(lengths), int(lengths.max()))
    status = np.full(len(lengths), int(Status.MAX_STEPS_REACHED))
    iterations = np.full(len(lengths), stop.max_steps)
    tokens = np.arange(len(start))  # places of those that are iterated
    z, value, before = start, start.clone(), None
    for step in range(1, stop.max_steps + 1):
        fz = f(z)
        last = step == stop.max_steps
        due = last or step % stop.check_every == 0
        if due or (step == 1 and stop.has_tolerance):
            numbers, pair = stop.measure(z, fz, 1, before)
            before = pair if stop.has_tolerance else None
            of_requests = _by_request(on_host(numbers)[..., 0], lengths, window.width)
            passed, sound = window.judge(of_requests, torch.finfo(z.dtype).eps)
        if due:
            passes, diverges = passed.all(axis=1), ~sound.all(axis=1)
            rows, ended = window.rows, passes | diverges | last
            status[rows[passes]], status[rows[diverges]] = Status.CONVERGED, Status.DIVERGED
            iterations[rows[ended]] = step
            if ended.any():
                _to_finite_points(fz, z, start, lengths, diverges)
                tokens_end = np.repeat(ended, lengths)
                places = on_device(np.flatnonzero(tokens_end), device)
                value[on_device(tokens[tokens_end], device)] = fz[places]
            if ended.all():
                break
            if ended.any():
                stay = on_device(np.flatnonzero(~tokens_end), device)
                keep(window.keep(~ended, device), stay)
                z, fz, start, before = take((z, fz, start, before), stay)
                tokens, lengths = tokens[~tokens_end], lengths[~ended]
        z = solver.step(z, fz, None)[0]
    return Solved(value, iterations, status)


def _by_request(numbers: np.ndarray, lengths: np.ndarray, longest: int) -> np.ndarray:
    """Numbers of tokens, ``(numbers, tokens)``, by request, ``(numbers, requests, longest)``.

    Where a request has no token there are zeros, which pass.
    """
    is_token = np.arange(longest) < lengths[:, None]
    result = np.zeros((len(numbers), *is_token.shape), numbers.dtype)
    result[:, is_token] = numbers
    return result


def _to_finite_points(
    fz: Tensor, z: Tensor, start: Tensor, lengths: np.ndarray, diverged: np.ndarray
) -> None:
    """Put the point ``z`` of requests that have ``diverged`` in place of ``fz``, or where it is not
    finite their ``start``.
    """
    ends = lengths.cumsum()
    for row in np.flatnonzero(diverged):
        one = slice(ends[row] - lengths[row], ends[row])
        fz[one] = z[one] if bool(z[one].isfinite().all()) else start[one]
