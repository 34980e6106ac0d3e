"""What a user may do without this package: stock DeepSpeed on demand, or checkpoints and restarts on spot instances."""

from __future__ import annotations

from collections.abc import Iterable

from ..config import BambooConfig
from ..simulate.baselines import Arrangement
from .advice import Alternative, Figures
from .offers import Offer

CHECKPOINT_RESTART = "checkpoint-restart"
#: Of all nodes so many shares are tried as what is rented at most.
_SHARES = 8


def on_demand(offer: Offer, at_least: float) -> Alternative | None:
    """The cheapest job of stock DeepSpeed on demand that does ``at_least`` samples per second, else the fastest one.

    Of as many nodes as there are spot instances at most; ``None`` if the model fits on none of them.
    """
    terms = offer.terms
    found = [each for each in map(offer.stock.best, range(1, offer.most + 1)) if each is not None]
    if not found:
        return None

    def cost(each: Arrangement) -> float:
        return each.size / 3600 * terms.on_demand_price / each.speed * 1e6

    enough = [each for each in found if each.speed >= at_least]
    best = min(enough, key=lambda each: (cost(each), each.size)) if enough else max(found, key=lambda each: each.speed)
    return Alternative(
        policy="on-demand",
        instance=offer.instance.name,
        nodes=best.size,
        pipelines=best.pipelines,
        stages=best.stages,
        fast_enough=bool(enough),
        seeds=1,
        cost_per_million=cost(best),
        samples_per_s=best.speed,
        goodput=1.0,
        restarts=0.0,
        losses=0.0,
        refused=0.0,
        dollars={"productive": cost(best)},
    )


def checkpoint_restart(
    offer: Offer, config: BambooConfig, size: tuple[int, int], nodes: Iterable[int], seeds: int, at_least: float
) -> Alternative | None:
    """The best job with checkpoints and restarts, of several that rent more or fewer nodes.

    The best is the cheapest that does ``at_least`` samples per second, else the fastest one. All are simulated with one
    seed, and the best with all ``seeds``, until one of these is fast enough. ``None``: there are no nodes.

    Args:
        offer: the instance type.
        config: settings of the job of this package that it is compared with.
        size: pipelines and stages of that job.
        nodes: what those jobs rent at most, which is tried besides shares of all nodes.
        seeds: how many.
        at_least: samples per second.
    """
    limits = {round(offer.most * share / _SHARES) for share in range(1, _SHARES + 1)} | set(nodes)
    simulation = offer.simulation(config, *size, offer.most)

    def simulated(limit: int, count: int) -> Alternative:
        simulation.limit = limit
        report, _ = simulation.run([CHECKPOINT_RESTART], count)
        figures = Figures.of(report.policies[CHECKPOINT_RESTART], count)
        enough = figures["samples_per_s"] >= at_least
        return Alternative(
            policy="checkpoint-restart", instance=offer.instance.name, nodes=limit, fast_enough=enough, **figures
        )

    found = sorted((simulated(limit, 1) for limit in sorted(limits) if limit), key=by_cost)
    if seeds == 1 or not found:
        return found[0] if found else None
    sure: list[Alternative] = []
    for each in found:
        sure.append(simulated(each.nodes, seeds))
        if sure[-1].fast_enough or not each.fast_enough:
            break
    return min(sure, key=by_cost)


def by_cost(each: Alternative) -> tuple[bool, float]:
    """The order of alternatives: those that are fast enough by cost, the others by speed."""
    cost = float("inf") if each.cost_per_million is None else each.cost_per_million
    return not each.fast_enough, cost if each.fast_enough else -each.samples_per_s
