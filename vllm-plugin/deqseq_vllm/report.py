"""How many iterations each request took: a line in the server's log, counters for Prometheus."""

from functools import wraps
from typing import Any

import numpy as np
from prometheus_client import Counter
from vllm.logger import init_logger
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from deqseq import Status
from deqseq_vllm.iterate import Solved

logger = init_logger("vllm.deqseq")
COUNTERS = (
    Counter("deqseq_tokens", "Tokens that were solved for."),
    Counter("deqseq_iterations", "Iterations of these tokens."),
    Counter("deqseq_tokens_not_converged", "Tokens whose request spent its budget or diverged."),
    Counter("deqseq_tokens_diverged", "Tokens whose request diverged."),
)


class Report:
    """The numbers of the requests that are running.

    vLLM does not tell a model the names of its requests. They are read from its V1 model runner;
    the V2 runner is not watched, and has the counters only.
    """

    def __init__(self) -> None:
        self.requests: dict[str, list[int]] = {}
        self.runner: Any = None
        runners: Any = GPUModelRunner
        execute_model = runners.execute_model

        @wraps(execute_model)
        def watched(runner: Any, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            self.runner = runner
            for name in scheduled.finished_req_ids:
                self.finish(name)
            return execute_model(runner, scheduled, *args, **kwargs)

        runners.execute_model = watched

    def add(self, lengths: np.ndarray, solved: Solved, has_tolerance: bool) -> None:
        """Add a solve of requests with these ``lengths``; without a tolerance none can converge."""
        diverged = solved.status == Status.DIVERGED
        failed = diverged
        if has_tolerance:
            failed = solved.status != Status.CONVERGED
        numbers = [lengths, lengths * solved.iterations, lengths * failed, lengths * diverged]
        for counter, number in zip(COUNTERS, numbers, strict=True):
            counter.inc(int(number.sum()))
        if self.runner is None and failed.any():
            logger.warning("%d of %d requests did not converge", failed.sum(), len(failed))
        names = [] if self.runner is None else self.runner.input_batch.req_ids
        for name, *new in zip(names, *numbers, strict=False):
            earlier = self.requests.get(name, (0, 0, 0, 0))
            self.requests[name] = [a + int(b) for a, b in zip(earlier, new, strict=True)]

    def finish(self, name: str) -> None:
        """Log a request that has ended, as a warning if some of its tokens did not converge."""
        tokens, iterations, failed, diverged = self.requests.pop(name, (0, 0, 0, 0))
        if tokens:
            log = logger.warning if failed else logger.info
            message = "request %s: %d tokens, %.1f iterations each, %d not converged, %d diverged"
            log(message, name, tokens, iterations / tokens, failed, diverged)
