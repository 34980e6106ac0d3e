"""The c10d backend ``bamboo``: process groups over logical ranks that stay valid across epochs."""

from __future__ import annotations

import inspect
import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from ..compat import WORKS_NEED_HOLDING
from ..errors import NotMet, PeerLost, UnsupportedError
from . import p2p
from .attachment import Attachment, current, group_key
from .c10d import dist, registry
from .calls.collectives import alone, start
from .calls.messages import ScriptMessages
from .calls.monitored import not_passed, timed_out
from .calls.naming import NAME, making_groups_ours, naming_what_scripts_know, not_asking_for_devices
from .calls.participants import Participants, founding, owning, surviving
from .calls.script import calling_place
from .calls.table import COLLECTIVES, Collective
from .epoch import Epoch
from .inner import kind_for
from .work import BambooWork, CompletedWork, Several

Tensors = list[torch.Tensor]
#: So many of the newest works are held where that is needed; no caller starts more before waiting.
_HELD = 256


def register() -> None:
    """Registers the backend with torch.distributed. Idempotent; needs no session yet."""
    if NAME.upper() not in dist.Backend._plugins:
        # Asks no device. What torch 2.6 has in torch.accelerator fails where its devices are not there.
        devices = sorted({"cpu", "cuda", torch._C._get_accelerator().type})
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=devices)
        dist.get_backend = registry.get_backend = naming_what_scripts_know(registry.get_backend)
        dist.monitored_barrier = registry.monitored_barrier = not_asking_for_devices(registry.monitored_barrier)
        # All that makes groups ends in this function, also where `new_group` was imported before.
        registry._new_group_with_tag = making_groups_ours(registry._new_group_with_tag)


def _create(options: Any, _: Any) -> BambooProcessGroup:
    """Makes a handle for ``init_process_group`` and ``new_group``."""
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    return BambooProcessGroup(current(), options.group_id, ranks, options.group_rank, options.timeout)


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
    """Makes torch.distributed know a handle that was made outside ``new_group``.

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
    """A handle on a group of logical ranks. (Most of its methods are the backend's interface, which torch calls.)

    The collectives are added below, from their table. They run in the session's current epoch over the distinct
    owners of the ranks; the inner group is built by the first collective of each epoch. Sends and receives run over the
    epoch's links, those of tensors on devices as well, so they need only the two; sends are eager. While the
    session is detached everything succeeds without effect on others.

    Every operation, and every ``wait`` on a handle, raises ``EpochChanged`` once the epoch has ended, and
    ``PeerLost`` if a connection broke before. The collectives that the script itself calls between two operations of
    its engine do not (see :mod:`.script`), nor do those among ranks that are all this member's: they need no epoch, and
    the code of a script that calls them is never interrupted there.

    Args:
        attachment: the epoch that this process is in.
        name: key of the group, equal on all members.
        ranks: logical ranks, in group order.
        rank: index in ``ranks`` for which this handle stands.
        timeout: default timeout of sends and receives.
    """

    def __init__(
        self,
        attachment: Attachment,
        name: str,
        ranks: tuple[int, ...],
        rank: int,
        timeout: timedelta | None = None,
    ) -> None:
        super().__init__(rank, len(ranks))
        self.ranks = ranks
        self._attachment = attachment
        #: Equal on all members of the group.
        self.key = group_key(name, ranks)
        #: ``gloo`` or ``nccl`` where the script has asked for a group of it.
        self.asked: str | None = None
        #: Default timeout of sends and receives, and of the script's collectives.
        self.timeout = timeout or attachment.timeout
        self._index = rank
        self._coalescing: list[Any] | None = None
        self._held: deque[Any] = deque(maxlen=_HELD)
        self._names = {"name": name, "desc": "undefined"}

    # -- identity ----------------------------------------------------------------------------------------
    def rank(self) -> int:
        """The group rank that this handle stands for; of the default group that of the role that is acted for."""
        acting = self._attachment.acting
        return acting.rank if acting is not None and registry._world.default_pg is self else super().rank()

    def getBackendName(self) -> str:
        """The backend's name, ``bamboo``."""
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
            epoch, (key, ranks) = self._attachment.current, self._meant
            members = owning(epoch.plan, ranks).members
            return epoch.groups.get(key, members, kind, self.timeout, torch.device(device))

        return _Inner(inner)

    def shutdown(self) -> None:
        """Does nothing: inner groups end with their epoch."""

    def abort(self) -> None:
        """Ends the current epoch for the whole process."""
        epoch = self._attachment.epoch
        if epoch is not None:
            epoch.life.abort(f"abort() of group {self.key}")

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the default timeout of sends and receives."""
        self.timeout = timeout

    _set_default_timeout = set_timeout

    # -- collectives -------------------------------------------------------------------------------------
    @property
    def _meant(self) -> tuple[str, tuple[int, ...]]:
        """Key and ranks of the group that operations are for: for layers of another stage, its slices."""
        slices = self._attachment.slices
        if self._attachment.founders is not None:
            return f"further/{self.key}", self.ranks
        if slices is not None and self.ranks in (slices.own, slices.ranks):
            return slices.key, slices.ranks
        return self.key, self.ranks

    def _among(self, epoch: Epoch) -> Participants:
        """The participants of an operation: for the engine, for the script, or for an engine without the block."""
        script, founders = self._attachment.script, self._attachment.founders
        if founders is not None:
            founders.on_use()
            return founding(epoch.plan, self.ranks, founders.of_rank)
        if script is not None and self._attachment.context == "script":
            return surviving(epoch.plan, self.ranks, script.absent)
        return owning(epoch.plan, self._meant[1])

    def _begin(self, collective: Collective, arguments: tuple[Any, ...]) -> Any:
        if hasattr(arguments[-1], "asyncOp"):
            # Torch waits for the work itself where its caller has not asked for one; NCCL's groups would give none.
            arguments[-1].asyncOp = True
        attachment, acting = self._attachment, self._attachment.acting
        if acting is not None:
            acting.answer(self.ranks, collective.name, arguments)
            return CompletedWork()
        self._check_alone(collective.name)
        if len(self.ranks) == 1:
            return alone(collective, arguments, 0, 1)
        if attachment.founders is not None:
            return self._start(collective, arguments)
        context = attachment.context
        if context == "script":
            assert attachment.script is not None
            return attachment.script.start(self, collective, arguments)
        if attachment.detached or context == "replay":
            return alone(collective, arguments, self._index, len(self.ranks), each=True)
        if attachment.in_pass:
            raise UnsupportedError(
                f"a layer or the loss function calls a collective in a pass, {collective.name} over ranks "
                f"{list(self.ranks)}: redundant passes, and those of a takeover, run when no other rank does the same. "
                "Leave it out (torch.nn.SyncBatchNorm, averages over the pipelines); tensor slices may communicate in "
                "their group"
            )
        work = self._start(collective, arguments)
        if isinstance(work, BambooWork):
            work.deferred = attachment.slices is not None and attachment.slices.passing
        return work

    def _start(self, collective: Collective, arguments: tuple[Any, ...]) -> Any:
        epoch, on_host = self._attachment.entered, self._attachment.on_host
        among = self._among(epoch)
        if among.members != (epoch.member,):  # what this member does alone ends with no epoch
            epoch.life.check("operation")
        return start(epoch, self._meant[0], among, collective, arguments, self._index, self.timeout, on_host)

    def _check_alone(self, operation: str) -> None:
        """Refuses communication with other ranks where the script's code must do without.

        Raises:
            UnsupportedError: this is such a place.
        """
        alone = self._attachment.script_alone
        if alone is not None and len(self.ranks) > 1:
            raise UnsupportedError(
                f"the script communicates {alone.where}: {operation} over ranks {list(self.ranks)}, called at "
                f"{calling_place()}. {alone.cure}"
            )

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
        attachment = self._attachment
        self._check_alone("monitoredBarrier")
        if len(self.ranks) == 1:
            return
        try:
            if attachment.context != "engine" or attachment.detached or attachment.acting is not None:
                self.barrier().wait(limit)
                return
            epoch, (key, ranks) = attachment.current, self._meant
            owners = owning(epoch.plan, ranks).members
            if epoch.member in owners:
                epoch.meet("monitoredBarrier", key, owners, limit)
        except NotMet as error:
            runs = self._among(attachment.current).of_rank
            late = [index for index, member in enumerate(runs) if member in error.members]
            raise not_passed(self.rank(), late, limit, wait_all_ranks) from error

    def _start_coalescing(self, device: torch.device) -> None:
        """Collects the works of the collectives that follow."""
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> Any:
        """One work for all since :meth:`_start_coalescing`."""
        works, self._coalescing = self._coalescing or [], None
        return Several([(work, None) for work in works])

    # -- point to point ----------------------------------------------------------------------------------
    def send(self, tensors: Tensors, destination: int, tag: int) -> Any:
        """Sends to group rank ``destination``. Completes when the tensor may be changed."""
        tensor = p2p.check(tensors, tag)
        self._check_alone("send")
        if self._of_script:
            return self._coalesced(self._messages.send(self, self._index, tensor, destination, tag))
        towards = self._towards(destination)
        if towards is None:
            return CompletedWork(tensors)
        epoch, peer = towards
        key = self._stream(destination, tag)
        with p2p.profiled("send", tensor):
            if peer == epoch.member:
                return self._coalesced(p2p.deliver_here(epoch.links, key, self._index, tensor))
            ticket = epoch.links.send(peer, key, self._index, tensor)
        return self._coalesced(p2p.SendWork(epoch.links, peer, ticket, tensor, self.timeout))

    def recv(self, tensors: Tensors, source: int, tag: int) -> Any:
        """Receives from group rank ``source``."""
        tensor = p2p.check(tensors, tag)
        self._check_alone("recv")
        if self._of_script:
            return self._coalesced(self._messages.receive(self, self._index, tensor, source, tag))
        towards = self._towards(source)
        if towards is None:
            self._note_unheard()
            return CompletedWork(tensors, source)
        epoch, peer = towards
        key = self._stream(self._index, tag)
        return self._coalesced(p2p.RecvWork(epoch.receives, key, tensor, source, [peer], self.timeout))

    def recv_anysource(self, tensors: Tensors, tag: int) -> Any:
        """Receives from the rank that sends first; ``source_rank()`` of the work tells which."""
        tensor = p2p.check(tensors, tag)
        self._check_alone("recv_anysource")
        if self._of_script:
            return self._coalesced(self._messages.receive(self, self._index, tensor, None, tag))
        if self._unheard:
            self._note_unheard()
            return CompletedWork(tensors, self._index)
        epoch = self._attachment.current
        others = [member for member in self._among(epoch).members if member != epoch.member]
        key = self._stream(self._index, tag)
        return self._coalesced(p2p.RecvWork(epoch.receives, key, tensor, None, others, self.timeout))

    @property
    def _unheard(self) -> bool:
        """Whether messages go nowhere, in silence: this process builds its engine alone, or replays."""
        attachment = self._attachment
        return attachment.founders is None and (attachment.detached or attachment.context == "replay")

    def _note_unheard(self) -> None:
        """Notes a receive of a script that replays: the tensor stays as it is, and may be in a batch that is needed."""
        if self._attachment.context == "replay":
            self._messages.note_missed(calling_place())

    @property
    def _of_script(self) -> bool:
        """Whether the script sends or receives, between two operations of its engine or in a thread of its own."""
        attachment = self._attachment
        if attachment.script is None or attachment.detached or attachment.founders or attachment.acting:
            return False
        return attachment.context == "script" or threading.current_thread() is not threading.main_thread()

    @property
    def _messages(self) -> ScriptMessages:
        script = self._attachment.script
        assert script is not None
        return script.messages

    def _towards(self, index: int) -> tuple[Epoch, str] | None:
        """Epoch and member of a message to or from rank ``index`` of the group; ``None`` if it goes nowhere.

        Raises:
            PeerLost: no surviving process runs as that rank.
        """
        if self._unheard:
            return None
        epoch = self._attachment.current
        among = self._among(epoch)
        if not among.speaks(epoch.member, self.rank()):
            return None
        member = among.of_rank[index]
        if member is None:
            raise PeerLost(f"epoch {epoch.number}: no surviving process runs as rank {self.ranks[index]}")
        return epoch, member

    def _stream(self, destination: int, tag: int) -> bytes:
        return f"p2p/{self._meant[0]}/{destination}/{tag}".encode()

    def _coalesced(self, work: Any) -> Any:
        if self._coalescing is not None:
            self._coalescing.append(work)
        if WORKS_NEED_HOLDING:
            self._held.append(work)
        return work


def _method(collective: Collective) -> Callable[..., Any]:
    """The method of a group that torch calls for a collective: with its tensors, and with options or without."""
    count = len(inspect.signature(collective.forms).parameters) - 1

    def call(self: Any, *arguments: Any, opts: Any = None) -> Any:
        options = next(iter(arguments[count:]), opts)
        if options is None:
            options = getattr(registry, collective.options)()
        return self._coalesced(self._begin(collective, (*arguments[:count], options)))

    call.__name__ = collective.name
    return call


for _each in COLLECTIVES.values():
    for _name in (_each.name, *_each.also):
        setattr(BambooProcessGroup, _name, _method(_each))


class _Inner:
    """An inner group, which ``build`` builds, collectively, when something of it is needed.

    Torch asks it whether sends and receives have to be begun together, also on members that use it alone. They do not:
    they run over the epoch's links.
    """

    supports_coalescing = False

    def __init__(self, build: Callable[[], Any]) -> None:
        self._build = build

    def __getattr__(self, name: str) -> Any:
        return getattr(self._build(), name)
