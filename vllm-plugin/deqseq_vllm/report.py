"""How many iterations each request took: a line in the server's log, counters for Prometheus."""

from functools import wraps
from typing import Any

import torch
from prometheus_client import Counter
from torch import Tensor
from vllm.logger import init_logger
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

logger = init_logger("vllm.deqseq")
TOKENS = Counter("deqseq_tokens", "Tokens that were solved for.")
ITERATIONS = Counter("deqseq_iterations", "Iterations of these tokens.")
FAILED = Counter("deqseq_tokens_not_converged", "Tokens whose request spent its budget.")


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

    def add(self, starts: Tensor, iterations: Tensor, done: Tensor) -> None:
        """Add a solve: the starts of the requests, their iterations, and whether they converged."""
        tokens = starts.diff()
        numbers = torch.stack([tokens, tokens * iterations[:-1], tokens * ~done[:-1]], dim=1)
        sums = numbers.sum(dim=0).tolist()
        for counter, number in zip((TOKENS, ITERATIONS, FAILED), sums, strict=True):
            counter.inc(number)
        names = [] if self.runner is None else self.runner.input_batch.req_ids
        for name, new in zip(names, numbers.tolist(), strict=False):  # rows of padding may follow
            earlier = self.requests.get(name, (0, 0, 0))
            self.requests[name] = [a + b for a, b in zip(earlier, new, strict=True)]

    def finish(self, name: str) -> None:
        """Log a request that has ended."""
        tokens, iterations, failed = self.requests.pop(name, (0, 0, 0))
        if tokens:
            message = "request %s: %d tokens, %.1f iterations each, %d not converged"
            logger.info(message, name, tokens, iterations / tokens, failed)
