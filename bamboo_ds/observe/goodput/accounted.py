"""The use of members' time: the sums that :mod:`.goodput` makes, as commands, page and metrics tell them."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from .lives import Category, Interval


class MemberAccount(BaseModel):
    """Seconds by category: of one member, or of all."""

    model_config = ConfigDict(frozen=True)

    seconds: float = Field(description="how long the members lived; the sum of all categories")
    goodput: float | None = Field(description="productive share of the seconds; null if there are none")
    categories: dict[Category, float] = Field(description="seconds of each category")

    @classmethod
    def of(cls, categories: dict[Category, float]) -> MemberAccount:
        """The account of seconds by category."""
        seconds = sum(categories.values())
        goodput = categories[Category.PRODUCTIVE] / seconds if seconds else None
        return MemberAccount(seconds=seconds, goodput=goodput, categories=categories)


class Accounted(MemberAccount):
    """The account of all members together; its seconds are member-seconds."""

    wall_seconds: float = Field(description="from the begin of the first member to the end of the last one")
    steps: int = Field(description="committed steps, each once")
    repeated_steps: int = Field(description="committed steps that were done again from a checkpoint")


class GoodputReport(Accounted):
    """The account of a job."""

    steps_per_second: float | None = Field(description="steps by wall_seconds")
    losses: int
    leaves: int
    restarts: int
    members: dict[str, MemberAccount]
    intervals: dict[str, list[Interval]] = Field(exclude=True, description="by member, since the first event")

    def over_time(self, bins: int) -> tuple[list[float], dict[Category, list[float]]]:
        """Middles of ``bins`` equal parts of the time, and the mean number of members per category in each."""
        every = [interval for intervals in self.intervals.values() for interval in intervals]
        begin = min((interval.begin for interval in every), default=0.0)
        width = (max((interval.end for interval in every), default=0.0) - begin) / bins or 1.0
        found = {category: [0.0] * bins for category in Category}
        for each in every:
            last = min(bins - 1, int((each.end - begin) / width))
            for number in range(int((each.begin - begin) / width), last + 1):
                left = begin + number * width
                overlap = min(each.end, left + width) - max(each.begin, left)
                found[each.category][number] += max(0.0, overlap) / width
        return [begin + (number + 0.5) * width for number in range(bins)], found
