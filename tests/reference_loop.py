"""The documented rules as a plain loop over one row, with which solves are compared to the last bit."""

import math

import torch
from hypothesis import Phase, settings

import deqseq as dq

# the same examples in every run; phases: without the slow explanation of a failure
PROPERTY = settings(deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate, Phase.shrink))


def one_row(f, start, block, window, stop, solver):
    """Values, statistics of each token, status, and the last committed point, of ``f(z, tokens, committed point)``."""
    length, every, tiny = len(start), stop.check_every, torch.finfo(start.dtype).tiny
    z = begun = start
    value, status, last, limit = z.clone(), dq.Status.CONVERGED, None, 0.0
    steps, entered, forced = torch.zeros(3, length, dtype=torch.int64)
    residual, forced = torch.full((length,), math.inf).double(), forced.bool()
    bound = torch.full((length,), math.nan).double()
    first = since = count = 0  # the first token of the window, the evaluation at which it came there, and evaluations
    while first < length:
        end, count = min(first + block * window, length), count + 1
        here, age = slice(first, end), count - since
        fz = f(z[here], here, last)
        going = torch.cat([z[:first], solver.step(z[here], fz, None)[0], z[end:]])
        late = age >= stop.max_steps
        due = age % every == 0 or late
        if due or (age == 1 and stop.has_tolerance):
            d, s = (torch.linalg.vector_norm(y, dim=-1) for y in (fz - z[here], fz))
            if stop.norm == "row":  # one number for each token of a block
                d, s = (torch.cat([y.norm().expand(len(y)) for y in x.split(block)]) for x in (d, s))
            if age == 1 or not limit:
                scale = torch.cat([d, s]).max().clamp_min(1)
                limit = max(limit, -1.0 if scale.isinf() else stop.divergence * scale.item())
            bound[here] = torch.where(bound[here].isnan(), stop.rtol * s, bound[here]).maximum(d / 2)
        if due:
            passed = [
                bool(one.all()) for one in (d <= stop.atol + torch.minimum(stop.rtol * s, bound[here])).split(block)
            ]
            leaving = min(block * [*passed, False].index(False), end - first)
            lost = not bool((d <= limit).all())
            spent = late and leaving == 0 and not lost
            whole = first + leaving == end and (age == 1 or end == length)
            if every == 1 and block * window > 1 and count % 2 and not late and not whole:
                leaving = 0  # windows of several tokens move after every second evaluation
            leaving = end - first if lost else min(block, end - first) if spent else leaving
            out = slice(first, first + leaving)
            value[out] = z[out] if solver.returns_point and not spent else fz[:leaving]
            value[out] = value[out] if not lost else (z if z[here].isfinite().all() else begun)[out]
            residual[out] = (d / s.clamp_min(tiny)).nan_to_num(nan=torch.inf)[:leaving]
            steps[out], forced[out] = count - entered[out], spent or lost
            if lost:
                forced[first:] = True
                return value, steps, residual, forced, dq.Status.DIVERGED, None
            if leaving:
                status = max(status, dq.Status.MAX_STEPS_REACHED) if spent else status
                last, begun = z[first + leaving - 1], going
                entered[end : end + leaving] = since = count
                first += leaving
        z = going
    return value, steps, residual, forced, status, last
