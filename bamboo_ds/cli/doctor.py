"""``bamboo doctor``: what would keep a job on this host from starting or from surviving a loss, and its cure."""

from __future__ import annotations

import http.client
import importlib.metadata
import json
import os
import resource
import secrets
import shutil
import ssl
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Literal

import click
from packaging.requirements import Requirement
from rich.table import Table

from ..config import BLOCK, bamboo_config, load_config
from ..control.registry.access import open_store
from ..errors import BambooError
from ..launchers.network import LOOPBACK, address_towards, free_port
from ..launchers.owning import EMBEDDED
from ..processes import who_has
from ..store.endpoints import ENV_CA, ENV_CERT, ENV_KEY, Endpoint, parse_endpoints
from ..supported import CURE_OF_FAULTS, check_config, fault_of_deepspeed
from .options import variable_option
from .output import console

_TIMEOUT_S = 5.0
#: Seconds of a read: leases of 10 s are refreshed every few seconds, over which etcd may be slow at times.
_SLOW_S = 0.1
#: The date that etcd tells has whole seconds.
_CLOCKS_S = 2.0
_LEAST_FILES = 4096
_LEAST_BYTES = 1 << 30

State = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line; ``cure`` is empty if all is well, or if what is found says it."""

    check: str
    state: State
    found: str
    cure: str = ""


@dataclass(frozen=True)
class Patient:
    """The subject of the examination."""

    store: str
    address: str | None
    config: Path | str | None


Check = Callable[[Patient], Iterator[Finding]]


def versions(_: Patient) -> Iterator[Finding]:
    """Versions of Python and of the package's requirements, and whether torch loads the package."""
    try:
        own = importlib.metadata.distribution("bamboo_ds")
    except importlib.metadata.PackageNotFoundError:
        yield Finding("versions", "problem", "bamboo_ds is not installed", "pip install it: torch finds it by that")
        return
    wrong = []
    shown = [f"Python {sys.version.split()[0]}"]
    for requirement in map(Requirement, own.requires or ()):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} is {version}")
        elif requirement.name in ("torch", "deepspeed", "grpcio"):
            shown.append(f"{requirement.name} {version}")
    if wrong:
        needed = ", ".join(str(each) for each in own.requires or () if "extra ==" not in each)
        yield Finding("versions", "problem", ", ".join(wrong), f"install {needed}")
    else:
        yield Finding("versions", "ok", ", ".join(shown))
        fault = fault_of_deepspeed(importlib.metadata.version("deepspeed"))
        if fault is not None:
            yield Finding("versions", "warning", fault, CURE_OF_FAULTS)
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "0":
        found = "TORCH_DEVICE_BACKEND_AUTOLOAD is 0: torch does not load bamboo_ds"
        yield Finding("versions", "problem", found, "unset TORCH_DEVICE_BACKEND_AUTOLOAD")


def configuration(patient: Patient) -> Iterator[Finding]:
    """The file of ``--config``."""
    if patient.config is None:
        return
    config = load_config(str(patient.config))
    block = bamboo_config(config)
    check_config(config)
    if block is None:
        yield Finding("configuration", "warning", f'{patient.config} has no "{BLOCK}" block', f'add "{BLOCK}": {{}}')
    else:
        yield Finding("configuration", "ok", f"{patient.config}, redundancy {block.redundancy.mode.value}")


def etcd(patient: Patient) -> Iterator[Finding]:
    """etcd: whether it answers, how fast, and what one may do there."""
    if patient.store == EMBEDDED:
        from ..store.embedded import find_etcd

        yield Finding("etcd", "ok", f"the job's own: {find_etcd()}")
        return
    with open_store(patient.store, f"doctor-{secrets.token_hex(4)}", _TIMEOUT_S) as opened:
        seconds = min(opened.ping() for _ in range(3))
        lease = opened.lease(_TIMEOUT_S)
        opened.create("probe", "", lease)
        read = opened.get("probe")
        opened.delete("probe")
        lease.revoke()
    if read is None:
        cure = "check that all addresses of --store are of one cluster"
        yield Finding("etcd", "problem", "a key that was written is not there", cure)
    elif seconds > _SLOW_S:
        cure = "put etcd's data on a fast disk near to the members, or raise bamboo.membership.lease_ttl_s"
        yield Finding("etcd", "warning", f"a read takes {1000 * seconds:.0f} ms", cure)
    else:
        yield Finding("etcd", "ok", f"reads, writes, leases; a read takes {1000 * seconds:.1f} ms")


def clock(patient: Patient) -> Iterator[Finding]:
    """Against etcd's hosts. Members do without equal clocks; times of events and logs do not."""
    if patient.store == EMBEDDED:
        return
    for endpoint in parse_endpoints(patient.store.split(","), None):
        if endpoint.path or endpoint.own:
            continue
        try:
            ahead = _ahead_s(endpoint)
        except (OSError, http.client.HTTPException) as error:
            yield Finding("clock", "warning", f"{endpoint} does not tell the time: {error}", "look at its log")
            continue
        if abs(ahead) > _CLOCKS_S:
            found = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} {endpoint}"
            yield Finding("clock", "warning", found, "run chrony or ntpd on all hosts: times of events differ")
        else:
            yield Finding("clock", "ok", f"as that of {endpoint}, to {_CLOCKS_S:.0f} s")


def _ahead_s(endpoint: Endpoint) -> float:
    connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=_TIMEOUT_S)
    if endpoint.secure:
        context = ssl.create_default_context(cafile=os.environ.get(ENV_CA))
        if ENV_CERT in os.environ:
            context.load_cert_chain(os.environ[ENV_CERT], os.environ.get(ENV_KEY))
        connection = http.client.HTTPSConnection(endpoint.host, endpoint.port, timeout=_TIMEOUT_S, context=context)
    try:
        begin = time.time()
        connection.request("GET", "/version")
        date = connection.getresponse().headers["Date"]
        now = (begin + time.time()) / 2
    finally:
        connection.close()
    if date is None:
        raise http.client.HTTPException("its answer has no date")
    return now - parsedate_to_datetime(date).timestamp() - 0.5


def address(patient: Patient) -> Iterator[Finding]:
    """The one that members advertise: of this host, with free ports, and no loopback where etcd is elsewhere."""
    own, cure = patient.address, "say --address (BAMBOO_ADDRESS), an IP address of this host that the others reach"
    if own is None:
        own = LOOPBACK if patient.store == EMBEDDED else address_towards(patient.store)
    try:
        free_port(own)
    except OSError as error:
        yield Finding("address", "problem", f"one cannot listen at {own}: {error.strerror or error}", cure)
        return
    alone = patient.store == EMBEDDED or all(e.loopback for e in parse_endpoints(patient.store.split(","), None))
    if Endpoint(own, 0, False).loopback and not alone:
        yield Finding("address", "problem", f"members of other hosts do not reach {own}", cure)
    else:
        yield Finding("address", "ok", f"{own}, ports are free; whether others reach it only they can tell")


def compiler_locks(_: Patient) -> Iterator[Finding]:
    """Locks of C++ extensions: a build that was stopped leaves one, at which every later process waits for ever."""
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR", Path.home() / ".cache" / "torch_extensions"))
    held: list[Path] = []
    left: list[Path] = []
    for lock in folder.rglob("lock") if folder.is_dir() else ():
        (held if who_has(lock) else left).append(lock)
    for lock in left:
        found = f"no process of this user has {lock} open: a build that was stopped has left it"
        yield Finding("compiler locks", "problem", found, f"unless another host builds there now: rm {lock}")
    if not left:
        yield Finding("compiler locks", "ok", f"{len(held)} builds under way in {folder}")


def disk(_: Patient) -> Iterator[Finding]:
    """Disks of logs, sockets, shared memory and, mostly, checkpoints."""
    places = {Path.cwd(), Path(tempfile.gettempdir()), Path("/dev/shm")}
    for place in sorted(place for place in places if place.is_dir()):
        free = shutil.disk_usage(place).free
        found = f"{free / (1 << 30):.1f} GiB free in {place}"
        if not os.access(place, os.W_OK):
            yield Finding(
                "disk", "problem", f"{place} cannot be written", "change its rights, or the working directory"
            )
        elif free < _LEAST_BYTES:
            yield Finding("disk", "warning", found, "make room: checkpoints and events need it")
        else:
            yield Finding("disk", "ok", found)


def limits(_: Patient) -> Iterator[Finding]:
    """Limits of descriptors: a worker has connections to every other one, and some files."""
    files, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < _LEAST_FILES:
        cure = f"ulimit -n {_LEAST_FILES}: every worker has connections to all others"
        yield Finding("limits", "warning", f"{files} open files", cure)
    else:
        yield Finding("limits", "ok", f"{files if files != resource.RLIM_INFINITY else 'any number of'} open files")


def devices(_: Patient) -> Iterator[Finding]:
    """The devices that DeepSpeed would compute on, and what reduces their tensors: NCCL, or gloo on the host."""
    import torch

    from ..comm.inner import NCCL
    from ..devices.accelerators import HOST, accelerator

    with redirect_stdout(sys.__stderr__):  # what DeepSpeed says when it is imported is no finding
        own = accelerator()
    kind = own.device_name()
    if kind == HOST.type or not own.is_available():
        if shutil.which("nvidia-smi") is not None and not os.environ.get("DS_ACCELERATOR"):
            cure = f"install a torch for CUDA; this one is {torch.__version__}"
            yield Finding("devices", "problem", "there is an NVIDIA driver, but torch sees no GPU", cure)
        else:
            yield Finding("devices", "ok", "no GPU: processors")
        return
    module = torch.get_device_module(kind)
    names = ", ".join(module.get_device_name(number) for number in range(own.device_count()))
    if own.communication_backend_name() != NCCL:
        yield Finding("devices", "ok", f"{names}; gloo, through host memory")
    elif not torch.distributed.is_nccl_available():
        yield Finding("devices", "problem", f"{names}, but torch has no NCCL", "install a torch with NCCL")
    else:
        version = ".".join(map(str, own.communication_backend_version()))
        yield Finding("devices", "ok", f"{names}; NCCL {version}")


def stores_of_checkpoints(patient: Patient) -> Iterator[Finding]:
    """Whether this host can keep checkpoints at the URLs that the configuration names."""
    block = None if patient.config is None else bamboo_config(str(patient.config))
    if block is None or not block.checkpoint.stores:
        return
    from ..state.storage.client import check_stores  # loads torch

    check_stores(block.checkpoint.stores, start=True)
    for url in block.checkpoint.stores.values():
        yield Finding("stores of checkpoints", "ok", f"{url}: objects are written, listed, read and removed")


CHECKS: tuple[Check, ...] = (
    *(versions, configuration, stores_of_checkpoints, etcd, clock),
    *(address, compiler_locks, disk, limits, devices),
)


def examine(patient: Patient, checks: tuple[Check, ...] = CHECKS) -> Iterator[Finding]:
    """All findings. An error of this package, which names its cure, is one, too."""
    for check in checks:
        try:
            yield from check(patient)
        except BambooError as error:
            yield Finding(check.__name__.replace("_", " "), "problem", str(error))


@click.command()
@variable_option("--store", default=EMBEDDED, show_default=True, help="URLs of etcd, separated by commas.")
@variable_option("--address", help="IP address that others reach this host at.  [default: as a job would choose it]")
@click.option("--config", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="DeepSpeed configuration.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(store: str, address: str | None, config: Path | None, as_json: bool) -> None:
    """Look for what would keep a job on this host from starting or from surviving a loss, and say the cure.

    Exit code 1 if there is a problem. Nothing is changed, but for one key in etcd, and one object in each store of
    checkpoints that --config names, which are written and removed.
    """
    findings = list(examine(Patient(store, address, config)))
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        table = Table(box=None)
        for column in ("check", "", "found", "cure"):
            table.add_column(column, overflow="fold")
        colours = {"ok": "green", "warning": "yellow", "problem": "red"}
        for each in findings:
            table.add_row(each.check, f"[{colours[each.state]}]{each.state}[/]", each.found, each.cure)
        console().print(table)
    sys.exit(any(finding.state == "problem" for finding in findings))
