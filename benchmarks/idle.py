"""How many redundant forwards the idle time of an undisturbed 1F1B iteration has room for. Pure."""

from __future__ import annotations

from bamboo_ds.schedule import one_f_one_b

#: Idle time that is this much shorter than a pass (in units of a forward) still counts as room for it.
_TOLERANCE = 0.03


def coverage_bounds(stages: int, micro_batches: int, forward: float, backward: float) -> tuple[float, float]:
    """Upper bounds of the share of redundant forwards that delay nothing; messages take no time in this model.

    A redundant forward of the next stage needs an input that the stage has computed already; the last stage redoes the
    first one, whose inputs are batches.

    Returns:
        The share that fits before a stage's own last backward (on the last stage: before the end of the iteration),
        and the share with the idle time at the end. The latter does not protect: by then the shadowed stage has
        finished, and its shadow holds its reduced gradients.
    """
    orders = [list(one_f_one_b(micro_batches, stages - stage)) for stage in range(stages)]
    ends: dict[tuple[str, int, int], float] = {}
    clock, cursor = [0.0] * stages, [0] * stages
    done = [0] * stages
    progress = True
    while progress:
        progress = False
        for stage in range(stages):
            while cursor[stage] < len(orders[stage]):
                kind, m = orders[stage][cursor[stage]]
                source = stage - 1 if kind == "F" else stage + 1
                if 0 <= source < stages and (kind, source, m) not in ends:
                    break
                arrival = ends.get((kind, source, m), 0.0)
                inputs = sum(k == "F" for k, _ in orders[stage][: cursor[stage]])
                inputs = micro_batches if stage == stages - 1 else inputs
                done[stage] += _room(arrival - clock[stage], forward, inputs - done[stage])
                clock[stage] = max(clock[stage], arrival) + (forward if kind == "F" else backward)
                ends[kind, stage, m] = clock[stage]
                cursor[stage] += 1
                progress = True
    tails = [_room(max(clock) - clock[stage], forward, micro_batches - done[stage]) for stage in range(stages)]
    total = stages * micro_batches
    return (sum(done) + tails[-1]) / total, (sum(done) + sum(tails)) / total


def _room(idle: float, forward: float, available: int) -> int:
    return max(0, min(int(idle / forward + _TOLERANCE), available)) if forward else available
