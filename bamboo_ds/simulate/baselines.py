"""Simulated jobs without this package: checkpoint and restart, and sample dropping, as good as they can be made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ..observe import events as ev
from ..schedule import timeline
from ..state.intervals import young_daly_s
from ..topology import Layout
from ..topology.memory import StateBytes
from .market import Market
from .profile import Layer, Profile
from .terms import Terms
from .training import Run, SimulatedTraining


@dataclass(frozen=True)
class Arrangement:
    """Pipelines and stages of a stock job, the seconds of an iteration, and the samples in it."""

    pipelines: int
    stages: int
    seconds: float
    batch: float

    @property
    def size(self) -> int:
        """Members that it takes."""
        return self.pipelines * self.stages

    @property
    def speed(self) -> float:
        """Samples per second."""
        return self.batch / self.seconds


class Stock:
    """The speed of stock DeepSpeed: 1F1B, pipelines that meet in a reduction, no replicas.

    Args:
        profile: of the model.
        terms: what is assumed.
        shape: most pipelines, and the stages of each; ``None``: any.
    """

    def __init__(self, profile: Profile, terms: Terms, shape: tuple[int, int] | None = None) -> None:
        self.profile, self.terms, self._shape = profile, terms, shape
        self._pipelines: dict[tuple[int, int], float] = {}
        self._best: dict[int, Arrangement | None] = {0: None}

    def _state(self, pipelines: int) -> StateBytes:
        return StateBytes(self.profile.precision, self.profile.optimizer, self.profile.zero, pipelines)

    def need(self, pipelines: int, stages: int, micro_batches: int) -> float:
        """Bytes of the member that needs most."""
        need, owned = 0.0, self._state(pipelines).owner
        for stage, layers in enumerate(self._parts(stages)):
            kept = sum(layer.kept_bytes + layer.boundary_bytes for layer in layers)
            state = sum(layer.parameters for layer in layers) * owned
            need = max(need, state + min(stages - stage, micro_batches) * kept)
        return need + self.profile.workspace_bytes

    def arrangement(self, pipelines: int, stages: int, micro_batches: int | None = None) -> Arrangement | None:
        """The job of so many pipelines and stages; ``None``: it does not fit into the devices' memory.

        Where pipelines cannot share the samples evenly, all wait for those that have a micro-batch more.
        """
        profile = self.profile
        count = micro_batches or math.ceil(profile.global_batch / profile.micro_batch / pipelines)
        if profile.memory_bytes is not None and self.need(pipelines, stages, count) > profile.memory_bytes:
            return None
        seconds = self._pipeline_s(stages, count) + self._epilogue_s(pipelines, stages)
        samples = min(profile.global_batch, count * profile.micro_batch * pipelines)
        return Arrangement(pipelines, stages, seconds, float(samples))

    def _epilogue_s(self, pipelines: int, stages: int) -> float:
        """Seconds of the reduction and of the update."""
        parts = self._parts(stages)
        size = max(sum(layer.parameters for layer in part) for part in parts) * self.profile.gradient_bytes
        reduced = 2 * (pipelines - 1) / pipelines * size / (self.terms.network_gb_s * 1e9)
        update = max(sum(layer.update_s for layer in part) for part in parts)
        return reduced + 2 * (pipelines - 1) * self.terms.message_ms / 1000 + update

    def _least_s(self, pipelines: int, stages: int) -> float:
        """No job of so many pipelines and stages takes less: each stage waits for those before it, twice."""
        count = math.ceil(self.profile.global_batch / self.profile.micro_batch / pipelines)
        before, least, message_s = 0.0, 0.0, self._message_s(stages)
        for part in self._parts(stages):
            own = sum(layer.forward_s + layer.backward_s for layer in part)
            least = max(least, before + count * own)
            before += own + 2 * message_s
        return least + self._epilogue_s(pipelines, stages)

    def _parts(self, stages: int) -> list[tuple[Layer, ...]]:
        return [self.profile.each[begin:end] for begin, end in self.profile.partition(stages)]

    def _message_s(self, stages: int) -> float:
        boundary = max((part[-1].boundary_bytes for part in self._parts(stages)[:-1]), default=0)
        return self.terms.message_ms / 1000 + boundary / (self.terms.network_gb_s * 1e9)

    def _pipeline_s(self, stages: int, micro_batches: int) -> float:
        """Seconds of a pipeline's passes. Beyond the first ones each micro-batch takes as long as the last one."""
        few, more = 2 * stages, 3 * stages
        if micro_batches <= more:
            return self._played_s(stages, micro_batches)
        first, second = self._played_s(stages, few), self._played_s(stages, more)
        return second + (micro_batches - more) * (second - first) / (more - few)

    def _played_s(self, stages: int, micro_batches: int) -> float:
        key = stages, micro_batches
        if key not in self._pipelines:
            parts = self._parts(stages)
            times = {
                "F": [sum(layer.forward_s for layer in part) for part in parts],
                "B": [sum(layer.backward_s for layer in part) for part in parts],
            }
            layout, members = Layout(1, stages), tuple((f"m{stage}",) for stage in range(stages))
            played = timeline(
                layout,
                members,
                micro_batches,
                lambda role, kind, begin, end, member: times[kind][role.stage],
                message_s=self._message_s(stages),
            )
            self._pipelines[key] = played.seconds
        return self._pipelines[key]

    def best(self, members: int) -> Arrangement | None:
        """The fastest job of ``members`` or fewer that fits, or ``None``."""
        profile = self.profile
        for count in range(len(self._best), members + 1):
            best = self._best[count - 1]
            most = min(count, len(profile.each))
            shapes = [(count // stages, stages) for stages in range(1, most + 1) if count % stages == 0]
            if self._shape is not None:
                shapes = [shape for shape in shapes if shape[0] <= self._shape[0] and shape[1] == self._shape[1]]
            able = [shape for shape in shapes if shape[0] * profile.micro_batch <= profile.global_batch]
            for least_s, shape in sorted((self._least_s(*shape), shape) for shape in able):
                if best is not None and profile.global_batch / least_s <= best.speed:
                    break
                found = self.arrangement(*shape)
                if found is not None and (best is None or found.speed > best.speed):
                    best = found
            self._best[count] = best
        return self._best[members]

    def copy_s(self, pipelines: int, stages: int) -> float:
        """Seconds to copy a member's state to host memory."""
        return self.share(pipelines, stages) / (self.terms.host_gb_s * 1e9)

    def load_s(self, pipelines: int, stages: int) -> float:
        """Seconds to load a member's state."""
        return self.share(pipelines, stages) / (self.terms.storage_gb_s * 1e9)

    def write_s(self, members: int) -> float:
        """Seconds to write a checkpoint, each member an equal share."""
        whole = StateBytes(self.profile.precision, self.profile.optimizer).copied
        return self.profile.parameters * whole / members / (self.terms.storage_gb_s * 1e9)

    def share(self, pipelines: int, stages: int) -> float:
        """Bytes of a member's state, without gradients."""
        parameters = max(sum(layer.parameters for layer in part) for part in self._parts(stages))
        return parameters * self._state(pipelines).copied


class _StockJob(SimulatedTraining):
    """The common part of both jobs of stock DeepSpeed."""

    def __init__(self, market: Market, stock: Stock, terms: Terms, seed: int) -> None:
        super().__init__(market, stock.profile, terms, seed)
        self.stock = stock
        self.now: Arrangement | None = None

    def _arranged(self, now: Arrangement, members: Sequence[str], lost: Sequence[str] = ()) -> None:
        """Trains like this from now on."""
        self.now, self.iteration_s, self.batch = now, now.seconds, now.batch
        self.epoch += 1
        self._emit_plan(members, members, lost=lost)
        self._enter(members)
        self.faster(len(members), now.seconds * self.profile.global_batch / now.batch)

    def _stop(self, lost: Sequence[str]) -> None:
        self._emit_losses(lost)
        self._emit(ev.Fatal, stages=[], members=list(lost), checkpoint=self.saved.path)
        self._enter([member for member in self.members if member not in lost])

    def _save(self, whole: bool = False) -> Run:
        assert self.now is not None
        copied_s = self.stock.copy_s(self.now.pipelines, self.now.stages)
        yield from self._checkpoint(copied_s, self.stock.write_s(self.now.size), self.members, whole)


class CheckpointRestart(_StockJob):
    """Asynchronous checkpoints at the interval of Young and Daly; every loss is a restart on the members at hand.

    The checkpoints are universal: a restart takes the fastest arrangement of pipelines and stages that there is. Nodes
    that come are taken in with the next restart, or with one of their own where that pays until the next loss. The mean
    time between losses, by which both go, is that of the whole trace, as if it were known.
    """

    @cached_property
    def _between_losses_s(self) -> float:
        return self.market.seconds / max(1, self.market.losses)

    def _interval_s(self) -> float:
        """The interval of Young and Daly; at least the time to write a checkpoint."""
        now = self.now
        assert now is not None
        optimum = young_daly_s(self.stock.copy_s(now.pipelines, now.stages), self._between_losses_s)
        return max(optimum, self.stock.write_s(now.size), now.seconds)

    def _recover(self) -> Run:
        self._commit_segment()
        yield from self._hold(self.terms.detection_s)
        self._stop(self._absent())
        yield from self._gather()

    def _restart(self) -> Run:
        while (best := self._best) is None:
            self.outcome.idle = self._lacking()
            yield from self._wait()
        restart_s = self.terms.restart_s + self.stock.load_s(best.pipelines, best.stages)
        yield from self._start_again(restart_s, best.size)

    @property
    def _best(self) -> Arrangement | None:
        return self.stock.best(len(self.ready))

    def _lacking(self) -> str | None:
        return None if self._best else "the states of its stages do not fit on the members that there are"

    def _go(self) -> None:
        assert self._best is not None
        self._arranged(self._best, list(self.ready)[: self._best.size])

    def _boundary(self) -> Run:
        now = self.now
        assert now is not None
        best = self._best
        saved_s = self.stock.copy_s(now.pipelines, now.stages) + self.stock.write_s(now.size)
        pause_s = saved_s + self.terms.restart_s + self.stock.load_s(now.pipelines, now.stages)
        if best is not None and (best.speed - now.speed) * self._between_losses_s > now.speed * pause_s:
            self._stop([])
            yield from self._save(whole=True)
            yield from self._gather()
        else:
            yield from self._save_if_due()


class SampleDropping(_StockJob):
    """A pipeline that loses a member is left out, its samples are dropped, until it has members again.

    Survivors of pipelines that are left out and nodes that come make new pipelines, with states from another one; if
    there is none left the job starts again from a checkpoint.
    """

    def __init__(self, market: Market, stock: Stock, terms: Terms, seed: int, pipelines: int, stages: int) -> None:
        super().__init__(market, stock, terms, seed)
        self._most, self._stages = pipelines, stages
        self._whole: list[tuple[str, ...]] = []
        self._building: dict[tuple[str, ...], bool] = {}  # pipelines, and whether they are complete

    def _arrangement(self, pipelines: int) -> Arrangement | None:
        return self.stock.arrangement(pipelines, self._stages, self.profile.micro_batches(self._most))

    def _arrange(self, lost: Sequence[str] = ()) -> None:
        now = self._arrangement(len(self._whole))
        assert now is not None
        self._arranged(now, [member for pipeline in self._whole for member in pipeline], lost)

    def _restart(self) -> Run:
        restart_s = self.terms.restart_s + self.stock.load_s(self._most, self._stages)
        yield from self._start_again(restart_s, self._most * self._stages)

    @property
    def _able(self) -> int:
        """Pipelines that there are members for."""
        return min(self._most, len(self.ready) // self._stages)

    def _lacking(self) -> str | None:
        if self._arrangement(max(1, self._able)) is None:
            return "its stages do not fit on members"
        return None if self._able else f"there are not {self._stages} members"

    def _go(self) -> None:
        nodes = list(self.ready)
        self._building.clear()
        self._whole = [tuple(nodes[d * self._stages : (d + 1) * self._stages]) for d in range(self._able)]
        self._arrange()

    def _boundary(self) -> Run:
        yield from self._save_if_due()
        self._building = {p: done for p, done in self._building.items() if all(node in self.ready for node in p)}
        complete = [pipeline for pipeline, done in self._building.items() if done]
        if complete:
            for pipeline in complete:
                del self._building[pipeline]
            self._whole += complete
            self._arrange()
            yield self.env.timeout(self.terms.switch_s)
        busy = {node for pipeline in (*self._whole, *self._building) for node in pipeline}
        spare = [node for node in self.ready if node not in busy]
        while len(spare) >= self._stages and len(self._whole) + len(self._building) < self._most:
            pipeline, spare = tuple(spare[: self._stages]), spare[self._stages :]
            self._building[pipeline] = False
            self.env.process(self._build(pipeline))

    def _build(self, pipeline: tuple[str, ...]) -> Run:
        share = self.stock.share(len(self._whole), self._stages)
        yield self.env.timeout(share / (self.terms.network_gb_s * 1e9))
        if pipeline in self._building:
            self._building[pipeline] = True
            self.tell()

    def _recover(self) -> Run:
        """Finishes the interrupted iteration without the pipelines that have lost members."""
        done, within = self._within()
        whole = self.now.seconds if self.now else 0.0
        # Of an iteration that a loss has interrupted before, only the rest was under way.
        left = (self._segment[1] if self._segment is not None and not done else whole) - within
        self._commit_segment()
        began = self._step_began if done or within else self.env.now
        while True:
            yield from self._hold(self.terms.detection_s)
            lost = self._absent()
            self._whole = [p for p in self._whole if not any(node in self.gone for node in p)]
            # With ZeRO-1 fewer pipelines keep more each.
            if not self._whole or self._arrangement(len(self._whole)) is None:
                self._stop(lost)
                yield from self._gather()
                return
            if lost:
                self._arrange(lost)
            if not (yield from self._hold(self.terms.rebuild_s)) and not self._absent():
                break
        self._step_began = began
        try:
            yield from self._train_rest(left)
        except self._simpy.Interrupt:
            yield from self._recover()

    def _train_rest(self, left_s: float) -> Run:
        self._segment = self.env.now, left_s
        yield self.env.timeout(left_s)
        self._commit_segment()
