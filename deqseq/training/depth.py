"""The number of iterations of an update as a random number."""

import math
from dataclasses import dataclass
from random import Random
from typing import Annotated, Literal

from deqseq.arguments import NonNegativeInt, PositiveInt, Within, checked


@checked
@dataclass(frozen=True)
class PoissonLogNormal:
    r"""The log-normal Poisson distribution of iterations that recurrent-depth models train with.

    .. math:: n = 1 + \mathrm{Poisson}(\lambda), \qquad \ln \lambda \sim \mathcal{N}(\ln m -
    \sigma^2 / 2,\ \sigma^2)

    The mean is :math:`m + 1`, the variance :math:`m + m^2 (e^{\sigma^2} - 1)`. A draw depends
    only on the seed and the progress of the run: it is the same in all processes, and a resumed run
    can repeat it without saved state.

    Args:
        mean: :math:`m`, above 0 and at most a million; ``mean_recurrence`` of the published models.
        sigma: standard deviation of :math:`\ln \lambda`, 0 to 2.
        rise: how :math:`m` rises from 1 to ``mean`` when a share :math:`t` of its phase is done:
            ``"linear"``, as :math:`t`, or ``"1-sqrt"``, as :math:`1 - \sqrt{1 - t}`. Default:
            :math:`m` is constant.
        largest: upper limit of the draws. Default: no limit.
        seed: seed of the draws.
        smallest: lower limit of the draws.

    Raises:
        ValueError: ``largest`` is below ``smallest``, or a number is out of its range.

    References:
        Geiping et al., Scaling up Test-Time Compute with Latent Reasoning: A Recurrent Depth
        Approach, NeurIPS 2025, arXiv 2502.05171. McLeish et al., Teaching Pretrained Language
        Models to Think Deeper with Retrofitted Recurrence, 2025, arXiv 2511.07384: the rise.

    Example:
        >>> [PoissonLogNormal(32).draw(step) for step in range(8)]
        [25, 21, 41, 27, 11, 23, 34, 40]
        >>> [PoissonLogNormal(32, rise="linear").draw(step, step / 8) for step in range(8)]
        [2, 5, 13, 15, 7, 17, 29, 37]
    """

    mean: Annotated[float | int, Within("(0, 1e6]")]
    sigma: Annotated[float | int, Within("[0, 2]")] = 0.5
    rise: Literal["linear", "1-sqrt"] | None = None
    largest: PositiveInt | None = None
    seed: NonNegativeInt = 0
    smallest: PositiveInt = 1

    def __post_init__(self) -> None:
        if self.largest is not None and self.largest < self.smallest:
            raise ValueError(
                f"PoissonLogNormal.largest must be at least smallest, {self.smallest}, "
                f"got {self.largest}"
            )

    @checked
    def draw(
        self,
        progress: Annotated[float | int, Within("[0, inf)")],
        done: Annotated[float | int, Within("[0, 1]")] = 1.0,
    ) -> int:
        """The number of iterations of a training step, at least 1.

        Args:
            progress: progress of the run before the step, in any unit; draws at different progress
                are independent.
            done: share of the phase that is done, 0 to 1; a rising mean depends on it.
        """
        chance = Random(f"{self.seed} {float(progress)}")  # Random hashes a text cryptographically
        risen = {None: 1, "linear": done, "1-sqrt": 1 - math.sqrt(1 - done)}[self.rise]
        mean = self.mean if risen == 1 else self.mean * risen + 1 - risen
        rate = chance.lognormvariate(math.log(mean) - self.sigma**2 / 2, self.sigma)
        # count the arrivals of a Poisson process before ``rate``
        steps, arrival = 1, chance.expovariate(1)
        while arrival < rate and steps != self.largest:
            steps += 1
            arrival += chance.expovariate(1)
        return max(steps, self.smallest)
