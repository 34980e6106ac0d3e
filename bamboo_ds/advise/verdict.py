"""Whether it is worth it: the best setup against what a user may do without this package, as a sentence."""

from __future__ import annotations

from collections.abc import Sequence

from .advice import Alternative, Ranked, Verdict
from .alternatives import by_cost
from .setups import Rejected

_NAMES = {"on-demand": "stock DeepSpeed on demand", "checkpoint-restart": "checkpoint-restart on spot instances"}


def verdict(best: Ranked | None, alternatives: Sequence[Alternative], rejected: Sequence[Rejected]) -> Verdict:
    """The answer.

    Args:
        best: the first setup; ``None``: no setup trains.
        alternatives: what there is besides.
        rejected: setups that were left out.
    """
    if best is None or best.cost_per_million is None:
        return Verdict(worth_it=False, sentence=f"No: {_why_none(rejected)}")
    told, against = [], []
    for policy, name in _NAMES.items():
        of_it = sorted((each for each in alternatives if each.policy == policy), key=by_cost)
        if not of_it or of_it[0].cost_per_million is None:
            told.append(f"{name} trains nothing at all")
            continue
        other = of_it[0]
        against.append((name, other))
        slow = "" if other.fast_enough else f", too slow with {other.samples_per_s:.3g} samples/s"
        told.append(f"{name} costs {other.cost_per_million:,.2f} $ on {other.instance}{slow}")
    own = f"a million samples cost {best.cost_per_million:,.2f} $ on {best.setup.instance}{_within(best)}"
    figures = "; ".join([own, *told])
    if not best.fast_enough:
        sentence = f"no setup is as fast as was asked for; the fastest does {best.samples_per_s:.3g} samples/s"
        return Verdict(worth_it=False, sentence=f"No: {sentence}; {figures}")
    # What is too slow is no alternative.
    able = sorted(
        ((each.cost_per_million or 0.0, name, each) for name, each in against if each.fast_enough),
        key=lambda found: found[0],
    )
    if not able:
        return Verdict(worth_it=True, sentence=f"Yes: nothing else is as fast as was asked for: {figures}")
    for cost, name, each in able:
        if cost < best.cost_per_million and not _overlap(best, each):
            times = best.cost_per_million / cost
            return Verdict(worth_it=False, sentence=f"No: {name} costs less, by a factor of {times:.2f}: {figures}")
    close = [name for _, name, each in able if _overlap(best, each)]
    if close:
        sentence = f"Too close to call: the ranges of {' and '.join(close)} overlap with that of the best setup"
        sentence += ", which more --seeds may part"
        return Verdict(worth_it=None, sentence=f"{sentence}: {figures}")
    cost, name, _ = able[0]
    times = cost / best.cost_per_million
    return Verdict(worth_it=True, sentence=f"Yes: {name} costs {times:.2f} times as much: {figures}")


def _within(best: Ranked) -> str:
    replicas = "" if best.setup.mode.replicas else ", without replicas"
    if best.cost_range is None:
        why = "of one seed" if best.seeds == 1 else f"some of {best.seeds} seeds have trained nothing"
        return f"{replicas} ({why}: no range)"
    return f"{replicas} ({best.cost_range[0]:,.2f} to {best.cost_range[1]:,.2f})"


def _overlap(best: Ranked, other: Alternative) -> bool:
    """Whether the ranges of two costs overlap; a cost without a range is one of its own."""
    mine, its = (each.cost_range or (each.cost_per_million or 0.0,) * 2 for each in (best, other))
    return mine[0] <= its[1] and its[0] <= mine[1]


def _why_none(rejected: Sequence[Rejected]) -> str:
    needs = sorted((each.need_gib, each.what) for each in rejected if each.need_gib is not None)
    if needs:
        return f"no setup fits; the least is {needs[0][1]}, which needs a device with {needs[0][0]:.1f} GiB"
    why = next((f": {each.what}: {each.why}" for each in rejected), "")
    return f"no setup trains on these nodes{why}"
