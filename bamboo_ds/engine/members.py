"""Attributes that the parts of the engine share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..comm.transport import Transport
from ..config import BambooConfig, RedundancyMode
from ..schedule import Decision
from ..topology import Layout, Plan, Role
from .accounts import Accounts
from .bubbles import IdleTimes
from .commit import Committed
from .data import Batches, Dataset
from .doubts import Doubts
from .exactness import ExactCheck
from .history import History
from .lanes import Lanes
from .layers import Changes
from .learning import Learner, Snapshots
from .runtime import RuntimeBinding, StageRuntime
from .saving import Saves
from .schedulers import Pristine, Standing

if TYPE_CHECKING:
    from ..launch import Job


class EngineState:
    """What :class:`~.bamboo.BambooPipelineEngine` keeps besides DeepSpeed's attributes.

    Attributes:
        _job: this process's job.
        _settings: the ``"bamboo"`` block.
        _mode: its redundancy mode.
        _retain: whether boundary tensors are kept until commit.
        _layout: the logical world.
        _plan: the plan of the current epoch.
        _agreed: members of the plan by which all have agreed last on how to go on.
        _binding: the runtimes, and which one is bound.
        _pristine: the script's own learning-rate scheduler as it was, if it has brought one.
        _stood: where the scheduler of the home role stood when the iteration began.
        _home: the runtime of the role that this member's script runs as; bound between operations. It may be a
            role that others own now; then it only carries the counters that the script looks at.
        _transport, _lanes: the current epoch's streams.
        _batches: micro-batches of the current operation.
        _dataset: the ``training_data`` of ``deepspeed.initialize``, if it was given.
        _tied_stages: stages that hold weights of other stages, too.
        _consumed: micro-batches of each pipeline that committed iterations have used.
        _learners: copies that this member makes.
        _doubts: replicas that differed when they were last compared.
        _differing: of this member's replicas that do: the names of the tensors, if they are known.
        _flags: settings that decide how tensors are computed, equal on all members.
        _exact: the check of the first steps, as long as it goes on.
        _compiled_with: how the script has had the modules compiled, if it has.
        _budget: bytes that redundant forwards may keep; ``None``: any number.
        _exhausted: a redundant pass of this iteration has exhausted the memory.
        _snapshots: states that it offers to learners.
        _saves: its checkpoints.
        _accounts: what committed iterations have consumed, for the ledger.
        _switch_due: all members know of a newer plan that waits for the next boundary.
        _idle: measured idle times.
        _seed: seed of the generators of passes and steps, equal on all members.
        _changed: names of parameters, buffers and numbers of the home role that the script has changed since the last
            iteration began; their holders elsewhere get them with that iteration's end.
        _known_changes: what the scripts had changed of all roles when the plan began.
        _sequence: operations (iterations, evaluations, saves) committed so far, equal on all members.
        _committed_steps: iterations committed so far.
        _entered: everything that the current operation's commit needs of this member is there.
        _vector: sum of the last commit all-reduce.
        _committed: the same, decoded, for the current iteration.
        _interrupted: the current operation was interrupted and resumed.
        _pending: decision of a recovery that the operation about to run carries out.
        _history: what the script has done.
        _joining: this member waits to be admitted.
        _evaluating: an evaluation runs.
        _loading: micro-batch that is being loaded.
        _last_beat, _longest_beat: when the last instruction ended, and how long the longest took.
        _bubble_begin: begin of waits that are in progress, by place.
    """

    #: DeepSpeed's: logits of an evaluation.
    outputs: Any
    _job: Job
    _settings: BambooConfig
    _mode: RedundancyMode
    _retain: bool
    _layout: Layout
    _plan: Plan
    _agreed: tuple[str, ...]
    _binding: RuntimeBinding
    _pristine: Pristine | None
    _stood: Standing
    _home: StageRuntime
    _transport: Transport
    _lanes: Lanes
    _batches: Batches
    _dataset: Dataset | None
    _tied_stages: frozenset[int]
    _consumed: int
    _learners: dict[Role, Learner]
    _doubts: Doubts
    _differing: dict[Role, list[str]]
    _flags: dict[str, str]
    _exact: ExactCheck | None
    _compiled_with: dict[str, Any] | None = None
    _budget: float | None
    _exhausted: bool
    _snapshots: Snapshots
    _saves: Saves
    _accounts: Accounts
    _switch_due: bool
    _idle: IdleTimes
    _seed: int
    _changed: set[str]
    _known_changes: dict[Role, Changes]
    _sequence: int
    _committed_steps: int
    _entered: bool
    _vector: tuple[float, ...] | None
    _committed: Committed | None
    _interrupted: bool
    _pending: Decision | None
    _history: History
    _joining: bool
    _dataset_iterator: Any
    _evaluating: bool
    _loading: int
    _last_beat: float
    _longest_beat: float
    _bubble_begin: dict[tuple[Any, ...], float]
