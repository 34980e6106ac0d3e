"""The start of an engine in the job: into its first epoch with all others, or on the way into a running job."""

from __future__ import annotations

import gc
import logging
import secrets
from typing import TYPE_CHECKING

from ..errors import EpochChanged, ProtocolError
from ..observe import logs
from ..state.storage.client import check_stores
from ..worker import plan_changes as plan_change
from .joining.loading import newest_whole
from .recovery.reports import StartReport
from .script.flags import compare_flags, uncertain

if TYPE_CHECKING:
    from .parts import Parts

logger = logging.getLogger("bamboo_ds")


def start(parts: Parts, exact: int) -> None:
    """Takes part in the job.

    Args:
        parts: of this member's engine.
        exact: the number of first steps to be checked, as this member's configuration has it.

    Raises:
        ConfigError: members compute with different settings.
        ProtocolError: the plan is for another logical world.
    """
    _take_part(parts, exact)
    # What is imported and built stays. Python would look through all of that every few seconds, which takes longer than
    # a recovery.
    gc.collect()
    gc.freeze()


def _take_part(parts: Parts, exact: int) -> None:
    job, role = parts.job, parts.binding.local.role
    logs.set_context(role=str(role))
    first = not job.channel.joiner and job.channel.restart_from is None
    check_stores(parts.settings.checkpoint.stores, start=first)
    if job.channel.joiner:
        _connect_local(parts)
        job.at_finish = parts.leave
        parts.replay.join(parts.flags)
        return
    parts.supply.needs.tell_all()
    plan = job.channel.wait_plan(job.session.epoch, job.session.timeout.total_seconds())
    parts.recovery.agreed = plan.members
    parts.recovery.enter(plan)
    plan_change.begin(plan)
    job.lost_at = None
    if plan.world != parts.layout:
        raise ProtocolError(f"the plan is for {plan.world}, this engine has {parts.layout}")
    _connect_local(parts)
    parts.supply.connect({})
    agreed = _agree(parts, exact)
    try:
        parts.copies.copy_state(parts.layout.roles)
        parts.copies.tell_replicas()
    except EpochChanged as error:
        # Others may be in their first operation already. This member's recovers, with the copies that are complete.
        logger.info("interrupted at the end of building: %s", error)
    job.at_finish = parts.leave
    if agreed.resumed is not None:
        parts.replay.resume(*agreed.resumed)


def _connect_local(parts: Parts) -> None:
    """Gives the script's own stage groups whose names are equal on all members."""
    role = parts.binding.local.role
    parts.groups.install(role, parts.ds.grid)
    parts.groups.connect_ties(parts.ds.module, role)


def _agree(parts: Parts, exact: int) -> StartReport:
    """Tells all others how this member would begin, and begins as the one that leads does."""
    plan = parts.epoch.plan
    mine = StartReport(
        seed=parts.progress.seed,
        nonce=secrets.token_hex(4),
        resumed=newest_whole(parts.epoch, parts.places, parts.settings.checkpoint.dir) if parts.epoch.leads else None,
        checksums=parts.job.settings.observe.checksums,
        exact=exact,
        flags=parts.flags,
        device=parts.epoch.device_name,
    )
    texts = parts.epoch.agreement.exchange(mine.model_dump_json())
    reports = {member: StartReport.model_validate_json(text) for member, text in texts.items()}
    leads = plan.owners[0]
    agreed = reports[leads]
    parts.epoch.note_devices(report.device for report in reports.values())
    compare_flags({member: report.flags for member, report in reports.items()}, leads)
    unsure = uncertain(parts.ds.device, parts.flags)
    if unsure and parts.epoch.leads and parts.job.settings.redundancy.mode.replicas:
        logger.warning(
            "on this %s kernels may give other bits each time, so that after a loss the results may differ in the last "
            "ones. For equal bits set: %s",
            parts.ds.device.type,
            "; ".join(unsure),
        )
    parts.flags.clear()
    parts.flags.update(agreed.flags)
    parts.recovery.adopt(agreed)
    return agreed
