"""The interval of a job's own checkpoints: Young's, from the fatal losses that it has seen. Pure.

A checkpoint that costs C seconds of training every T seconds, and a loss that takes the job back to it, by T / 2
seconds on average, every M seconds, cost C / T + T / (2 M) of the time together. The least is at T = sqrt(2 C M):
J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17 (1974). J. T. Daly, "A higher
order estimate of the optimum checkpoint interval for restart dumps", FGCS 22 (2006), adds terms of C and of the
restart, which are small where C is much smaller than M, as that of a copy to host memory is.
"""

from __future__ import annotations

import math

from pydantic import BaseModel, ConfigDict, Field

#: Seconds between two checkpoints, at least.
SHORTEST_S = 60.0
#: Before it has seen anything a job expects one fatal loss in so many seconds.
PRIOR_S = 3600.0
#: Between two checkpoints there is at least this many times the duration of writing one.
_WRITTEN = 2.0


class LossRate(BaseModel):
    """The fatal losses that a job has seen: those that it has been started again for.

    Attributes:
        seconds: in which it has seen them.
        fatal: how many.
    """

    model_config = ConfigDict(frozen=True)

    seconds: float = Field(0.0, ge=0)
    fatal: int = Field(0, ge=0)

    def plus(self, seconds: float, fatal: int) -> LossRate:
        """The rate of a job that has seen ``fatal`` more in ``seconds`` more."""
        return LossRate(seconds=self.seconds + seconds, fatal=self.fatal + fatal)

    @property
    def mtbf_s(self) -> float:
        """Mean seconds between two of them: of those seen, and of one more in :data:`PRIOR_S` seconds."""
        return (PRIOR_S + self.seconds) / (1 + self.fatal)


def young_daly_s(pause_s: float, between_s: float) -> float:
    """Seconds between checkpoints that each stop training for ``pause_s``, where work is lost every ``between_s``."""
    return math.sqrt(2 * pause_s * between_s)


def interval_s(pause_s: float, written_s: float, mtbf_s: float) -> float:
    """Seconds from the beginning of one checkpoint to that of the next.

    Args:
        pause_s: for which training waits for the copy; 0 where that was not measured yet.
        written_s: that writing takes in the background, which the interval is twice as long as at least.
        mtbf_s: mean seconds between two fatal losses.
    """
    return max(SHORTEST_S, _WRITTEN * written_s, young_daly_s(pause_s, mtbf_s))
