"""The c10d backend ``bamboo``: process groups over logical ranks that stay valid across epochs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from ..compat import WORKS_NEED_HOLDING
from ..errors import NotMet, UnsupportedError
from . import p2p, wire
from .c10d import dist, registry
from .cohosted import Cohosted
from .epoch import Epoch
from .inner import GLOO, NCCL, issue, kind_for
from .living import living
from .local import LocalGroup
from .monitored import not_passed, timed_out
from .naming import NAME, making_groups_ours, naming_what_scripts_know, not_asking_for_devices
from .script import Place
from .session import Session, current, group_key
from .work import BambooWork, CompletedWork

Tensors = list[torch.Tensor]
#: So many of the newest works are held where that is needed; nobody starts more before waiting.
_HELD = 256


def register() -> None:
    """Register the backend with torch.distributed. Idempotent; needs no session yet."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
        dist.get_backend = registry.get_backend = naming_what_scripts_know(registry.get_backend)
        dist.monitored_barrier = registry.monitored_barrier = not_asking_for_devices(registry.monitored_barrier)
        # All that makes groups ends in this function, also where `new_group` was imported before.
        registry._new_group_with_tag = making_groups_ours(registry._new_group_with_tag)


def _create(options: Any, _: Any) -> BambooProcessGroup:
    """What ``init_process_group`` and ``new_group`` call for this backend."""
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    return BambooProcessGroup(current(), options.group_id, ranks, options.group_rank, options.timeout)


def init_process_group(session: Session, rank: int, world_size: int, timeout: timedelta | None = None) -> None:
    """Initialise torch.distributed's default group on this backend.

    Args:
        session: attached, or detached for collectives that do nothing.
        rank: this process's logical rank.
        world_size: number of logical ranks (roles).
        timeout: default timeout of the groups; default: the session's.
    """
    register()
    dist.init_process_group(
        backend=NAME,
        store=session.torch_store,
        rank=rank,
        world_size=world_size,
        timeout=timeout or session.timeout,
    )


class _HandleRanks(dict[int, int]):
    """Global rank to group rank of a handle, which also knows the rank that the handle stands for by any other name.

    torch asks for the group rank of the *process* (when it logs a failed call, for one), which need not be a rank
    of the group: the process acts for a role that it has taken over. The handle's own rank is the answer.
    """

    def __init__(self, handle: BambooProcessGroup) -> None:
        super().__init__({rank: index for index, rank in enumerate(handle.ranks)})
        self._own = handle.rank()

    def __contains__(self, rank: object) -> bool:
        return super().__contains__(rank) or rank == registry.get_rank()

    def __missing__(self, rank: int) -> int:
        if rank == registry.get_rank():
            return self._own
        raise KeyError(rank)


def register_handle(handle: BambooProcessGroup, name: str) -> None:
    """Make torch.distributed know a handle that was made outside ``new_group``.

    Raises:
        ValueError: the default group is not initialised, or a group of this name exists in this process.
    """
    # Two handles of one group may live in one process: this one's name for torch tells them apart.
    torch_name = (
        registry.GroupName(f"{name}@{handle.rank()}") if hasattr(registry, "GroupName") else f"{name}@{handle.rank()}"
    )
    world = registry._world
    if torch_name in world.pg_names.values():
        raise ValueError(f"a group handle {torch_name!r} exists already")
    store = dist.PrefixStore(f"{torch_name}/", registry._get_default_store())
    world.pg_map[handle] = (dist.Backend(NAME), store)
    world.pg_names[handle] = torch_name
    world.pg_group_ranks[handle] = _HandleRanks(handle)
    world.pg_backend_config[handle] = str(registry.BackendConfig(dist.Backend(NAME)))
    tag = f"ptd:{torch_name}"
    world.tags_to_pg.setdefault(tag, []).append(handle)
    world.pg_to_tag[handle] = tag
    handle._set_group_name(torch_name)
    registry._register_process_group(torch_name, handle)


class BambooProcessGroup(dist.ProcessGroup):  # type: ignore[misc]
    """A handle on a group of logical ranks.

    Collectives run in the session's current epoch over the distinct owners of the ranks; the inner group is
    built by the first collective of each epoch. Sends and receives run over the epoch's links, so they need
    nobody but the two; sends are eager. While the session is detached everything succeeds without effect on
    others.

    Every operation, and every ``wait`` on a handle, raises ``EpochChanged`` once the epoch has ended, and
    ``PeerLost`` if a connection broke before. The collectives that the script itself calls between two operations of
    its engine do not (see :mod:`.script`).

    Args:
        session: this process's data plane.
        name: key of the group, equal on all members.
        ranks: logical ranks, in group order.
        rank: index in ``ranks`` for which this handle stands.
        timeout: default timeout of sends and receives.
    """

    def __init__(
        self,
        session: Session,
        name: str,
        ranks: tuple[int, ...],
        rank: int,
        timeout: timedelta | None = None,
    ) -> None:
        super().__init__(rank, len(ranks))
        self.ranks = ranks
        self._session = session
        #: Equal on all members of the group.
        self.key = group_key(name, ranks)
        #: ``gloo`` or ``nccl`` where the script has asked for a group of it.
        self.asked: str | None = None
        #: Default timeout of sends and receives, and of the script's collectives.
        self.timeout = timeout or session.timeout
        self._index = rank
        self._coalescing: list[Any] | None = None
        self._held: deque[Any] = deque(maxlen=_HELD)
        self._names = {"name": name, "desc": "undefined"}

    # -- identity ----------------------------------------------------------------------------------------
    def rank(self) -> int:
        """The group rank that this handle stands for; of the default group that of the role that is acted for."""
        acting = self._session.acting
        return acting.rank if acting is not None and registry._world.default_pg is self else super().rank()

    def getBackendName(self) -> str:
        """``bamboo``."""
        return NAME

    # torch keeps these in the inner backends of a group, of which this one has none of its own.
    def getGroupName(self) -> str:
        """The name by which torch knows this handle."""
        return self._names["name"]

    def setGroupName(self, name: str) -> None:
        """Called by torch, once."""
        self._names["name"] = name

    def getGroupDesc(self) -> str:
        """The description that the creator gave."""
        return self._names["desc"]

    def setGroupDesc(self, description: str) -> None:
        """Called by torch, once."""
        self._names["desc"] = description

    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    def __repr__(self) -> str:
        return f"BambooProcessGroup({self.key!r}, rank={self._index})"

    def _get_backend(self, device: torch.device) -> Any:
        """Stands for the inner group of the epoch that is current when it is used."""
        kind = kind_for(torch.device(device))

        def inner() -> Any:
            epoch = self._session.current
            return epoch.group(self._meant[0], self._owners(epoch), kind, self.timeout)

        return _Inner(inner, kind)

    def shutdown(self) -> None:
        """Nothing to do: inner groups end with their epoch."""

    def abort(self) -> None:
        """End the current epoch for the whole process."""
        self._session.abort(f"abort() of group {self.key}")

    def set_timeout(self, timeout: timedelta) -> None:
        """Default timeout of sends and receives from now on."""
        self.timeout = timeout

    _set_default_timeout = set_timeout

    # -- where operations run ----------------------------------------------------------------------------
    @property
    def _meant(self) -> tuple[str, tuple[int, ...]]:
        """Key and ranks of the group that operations are for: for layers of another stage, its slices."""
        slices = self._session.slices
        if slices is not None and self.ranks in (slices.home, slices.ranks):
            return slices.key, slices.ranks
        return self.key, self.ranks

    def _owners(self, epoch: Epoch) -> tuple[str, ...]:
        """The distinct owners of the ranks, in the ranks' order."""
        return tuple(dict.fromkeys(epoch.plan.owners[rank] for rank in self._meant[1]))

    def _collective(self, operation: str, device: torch.device | None, *arguments: Any) -> Any:
        """Run ``operation`` of the inner group (named as in torch's ``Backend``)."""
        return self._coalesced(self._start(operation, device, arguments))

    def _start(self, operation: str, device: torch.device | None, arguments: tuple[Any, ...]) -> Any:
        acting = self._session.acting
        if acting is not None:
            acting.answer(self.ranks, operation, arguments)
            return CompletedWork()
        place = self._place
        if place == "script":
            assert self._session.script is not None
            return self._session.script.start(self, operation, device, arguments)
        if self._session.detached or place == "replay":
            return getattr(LocalGroup(self._index, len(self.ranks), each=True), operation)(*arguments)
        if self._session.in_pass and len(self.ranks) > 1:
            raise UnsupportedError(
                f"a layer or the loss function calls a collective in a pass, {operation} over ranks "
                f"{list(self.ranks)}: redundant passes, and those of a takeover, run when no other rank does the same. "
                "Leave it out (torch.nn.SyncBatchNorm, averages over the pipelines); tensor slices may communicate in "
                "their group"
            )
        epoch = self._session.current
        owners = self._owners(epoch)
        if len(owners) == 1 or epoch.member not in owners:
            # A member that owns none of the ranks (a standby) has no part in it: the others do not wait for it.
            return getattr(LocalGroup(self._index, len(self.ranks)), operation)(*arguments)
        kind = GLOO if device is None else kind_for(device)
        key, ranks = self._meant
        inner = epoch.group(key, owners, kind, self.timeout)
        finish: Callable[[], None] | None = None
        with epoch.calling(operation):
            if len(owners) == len(ranks):
                work = issue(inner, operation, arguments)
            else:
                hosts = [owners.index(epoch.plan.owners[rank]) for rank in ranks]
                work, finish = getattr(Cohosted(inner, hosts, self._index), operation)(*arguments)
        return BambooWork(epoch, work, operation, owners, finish, kind == GLOO, self.timeout)

    @property
    def _place(self) -> Place:
        script = self._session.script
        return "engine" if script is None else script.place

    def _peer(self, epoch: Epoch, index: int) -> str | None:
        """Whom to send to, or to receive from, for rank ``index`` of the group; ``None``: nobody, in silence."""
        if self._place == "script":
            assert self._session.script is not None
            return self._session.script.peer(epoch, self, index)
        return epoch.plan.owners[self._meant[1][index]]

    def _peers(self, epoch: Epoch) -> tuple[str, tuple[str, ...]]:
        """Among whom messages go, and the key of their inner group."""
        if self._place == "script":
            assert self._session.script is not None
            return f"script/{self.key}", self._session.script.members(epoch, self)
        return self._meant[0], self._owners(epoch)

    # -- collectives -------------------------------------------------------------------------------------
    def broadcast(self, tensors: Tensors, opts: Any) -> Any:
        """From group rank ``opts.rootRank``."""
        return self._collective("broadcast", tensors[0].device, tensors, opts)

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Any:
        """In place."""
        return self._collective("allreduce", tensors[0].device, tensors, opts or registry.AllreduceOptions())

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Any:
        """In place, several tensors."""
        options = opts or registry.AllreduceCoalescedOptions()
        return self._collective("allreduce_coalesced", tensors[0].device, tensors, options)

    def reduce(self, tensors: Tensors, opts: Any) -> Any:
        """To group rank ``opts.rootRank``."""
        return self._collective("reduce", tensors[0].device, tensors, opts)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        """To a list of tensors, one per rank."""
        return self._collective("allgather", inputs[0].device, outputs, inputs, opts or registry.AllgatherOptions())

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        """As :meth:`allgather`, several tensors."""
        options = opts or registry.AllgatherOptions()
        return self._collective("allgather_coalesced", inputs[0].device, outputs, inputs, options)

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        """To one tensor."""
        return self._collective("_allgather_base", tensor.device, output, tensor, opts or registry.AllgatherOptions())

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        """As :meth:`_allgather_base`, several tensors."""
        options = opts or registry.AllgatherOptions()
        return self._collective("allgather_into_tensor_coalesced", inputs[0].device, outputs, inputs, options)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> Any:
        """To group rank ``opts.rootRank``."""
        return self._collective("gather", inputs[0].device, outputs, inputs, opts)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> Any:
        """From group rank ``opts.rootRank``."""
        return self._collective("scatter", outputs[0].device, outputs, inputs, opts)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> Any:
        """From a list of tensors, one per rank."""
        options = opts or registry.ReduceScatterOptions()
        return self._collective("reduce_scatter", outputs[0].device, outputs, inputs, options)

    def _reduce_scatter_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        """From one tensor."""
        options = opts or registry.ReduceScatterOptions()
        return self._collective("_reduce_scatter_base", output.device, output, tensor, options)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        """As :meth:`_reduce_scatter_base`, several tensors."""
        options = opts or registry.ReduceScatterOptions()
        return self._collective("reduce_scatter_tensor_coalesced", outputs[0].device, outputs, inputs, options)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        """Lists of tensors, one per rank."""
        return self._collective("alltoall", outputs[0].device, outputs, inputs, opts or registry.AllToAllOptions())

    def alltoall_base(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> Any:
        """Rows of one tensor; empty splits mean equal parts."""
        options = opts or registry.AllToAllOptions()
        return self._collective(
            "alltoall_base", output.device, output, tensor, list(output_splits), list(input_splits), options
        )

    all_to_all_single = alltoall_base

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all."""
        options = opts or registry.BarrierOptions()
        device = options.device if getattr(options, "device", None) is not None else None
        return self._collective("barrier", device, options)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier with its own timeout. A lost member raises ``PeerLost``, which names it.

        Raises:
            RuntimeError: with gloo's words, naming the first rank that has not come, or all of them.
        """
        limit = self.timeout if timeout is None else timeout
        if not limit:
            if self.rank() == 0 and len(self.ranks) > 1:
                raise timed_out(limit)
            limit = self.timeout  # as gloo: the other ranks wait for rank 0
        script, place = self._session.script, self._place
        try:
            if place != "engine" or self._session.detached or self._session.acting is not None:
                self.barrier().wait(limit)
                return
            epoch = self._session.current
            if epoch.member in self._owners(epoch):
                epoch.meet("monitoredBarrier", self._meant[0], self._owners(epoch), limit)
        except NotMet as error:
            plan = self._session.current.plan
            if place == "script" and script is not None:
                runs: Sequence[str | None] = living(plan, self.ranks, script.absent).of_rank
            else:
                runs = [plan.owners[rank] for rank in self._meant[1]]
            late = [index for index, member in enumerate(runs) if member in error.members]
            raise not_passed(self.rank(), late, limit, wait_all_ranks) from error

    def _start_coalescing(self, device: torch.device) -> None:
        """Collect the works of the collectives that follow."""
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> Any:
        """One work for all since :meth:`_start_coalescing`."""
        works, self._coalescing = self._coalescing or [], None
        return _All(works)

    # -- point to point ----------------------------------------------------------------------------------
    def send(self, tensors: Tensors, destination: int, tag: int) -> Any:
        """To group rank ``destination``. Completes when the tensor may be changed."""
        tensor = p2p.check(tensors, tag)
        if self._session.detached or self._place == "replay":
            return CompletedWork(tensors)
        epoch = self._session.current
        peer = self._peer(epoch, destination)
        if peer is None:
            return CompletedWork(tensors)
        if kind_for(tensor.device) == NCCL and peer != epoch.member:
            return self._nccl(epoch, "send", tensors, peer, tag)
        key = self._stream(destination, tag)
        with p2p.profiled("send", tensor):
            if peer == epoch.member:
                return self._coalesced(p2p.deliver_here(epoch, key, self._index, tensor))
            ticket = epoch.links.send(peer, wire.encode(key, self._index, tensor))
        return self._coalesced(p2p.SendWork(epoch, peer, ticket, tensor, self.timeout))

    def recv(self, tensors: Tensors, source: int, tag: int) -> Any:
        """From group rank ``source``."""
        tensor = p2p.check(tensors, tag)
        if self._session.detached or self._place == "replay":
            return CompletedWork(tensors, source)
        epoch = self._session.current
        peer = self._peer(epoch, source)
        if peer is None:
            return CompletedWork(tensors, source)
        if kind_for(tensor.device) == NCCL and peer != epoch.member:
            return self._nccl(epoch, "recv", tensors, peer, tag)
        return self._coalesced(
            p2p.RecvWork(epoch, self._stream(self._index, tag), tensor, source, [peer], self.timeout)
        )

    def recv_anysource(self, tensors: Tensors, tag: int) -> Any:
        """From whoever sends first; ``source_rank()`` of the work tells."""
        tensor = p2p.check(tensors, tag)
        if self._session.detached or self._place == "replay":
            return CompletedWork(tensors, self._index)
        epoch = self._session.current
        others = [member for member in self._peers(epoch)[1] if member != epoch.member]
        return self._coalesced(p2p.RecvWork(epoch, self._stream(self._index, tag), tensor, None, others, self.timeout))

    def _stream(self, destination: int, tag: int) -> bytes:
        return f"p2p/{self._meant[0]}/{destination}/{tag}".encode()

    def _nccl(self, epoch: Epoch, operation: str, tensors: Tensors, peer: str, tag: int) -> Any:
        key, members = self._peers(epoch)
        inner = epoch.group(key, members, NCCL, self.timeout)
        with epoch.calling(operation, peer):
            work = getattr(inner, operation)(tensors, members.index(peer), tag)
        return self._coalesced(BambooWork(epoch, work, operation, [peer]))

    def _coalesced(self, work: Any) -> Any:
        if self._coalescing is not None:
            self._coalescing.append(work)
        if WORKS_NEED_HOLDING:
            self._held.append(work)
        return work


class _Inner:
    """An inner group, which ``build`` builds, collectively, when something of it is needed.

    Torch asks it whether it sends several tensors as one, also on members that use it alone.
    """

    def __init__(self, build: Callable[[], Any], kind: str) -> None:
        self._build = build
        self.supports_coalescing = kind == NCCL

    def __getattr__(self, name: str) -> Any:
        return getattr(self._build(), name)


class _All(CompletedWork):
    """Several works as one."""

    def __init__(self, works: list[Any]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for all, in order."""
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        """Whether all are completed."""
        return all(work.is_completed() for work in self._works)
