"""Asynchronous checkpoints: the job waits for a copy to host memory, a thread does the rest.

A save from the view of the job's main thread, on every member that owns a role::

    saver.begin(save)
    saver.add(rank, files)          for every role that it owns
    (all agree that the save takes place)
    saver.submit()                  the thread begins to write
    …                               training
    saver.poll()                    once in a while: calls on_complete or on_failed

and what can come in between: :meth:`~CheckpointSaver.follow` when members were lost, another ``begin`` or
:meth:`~CheckpointSaver.abort` when the save has to be repeated, :meth:`~CheckpointSaver.close`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from . import publish
from .checkpoints import CheckpointError, Location
from .places import KnownFolder, SaveRefused
from .writer import HostFile, Save, SaveAborted, SaveResult, check_lineage, perform

logger = logging.getLogger("bamboo_ds")

THREAD = "bamboo-checkpoint"
_INTERRUPT_POLL_S = 0.05  # how often a waiting main thread looks whether it is needed elsewhere
_EXIT_TIMEOUT_S = 10.0

#: How many complete checkpoints of a job's own are kept: the newest may turn out to be damaged.
_OWN_KEPT = 2

Callback = Callable[[SaveResult], None]


class CheckpointSaver:
    """Writes the checkpoints of one worker, one after the other, in a thread of its own.

    No method raises because a checkpoint could not be written: that is logged as an error and given to ``on_failed``
    by the next :meth:`poll` (which ``begin``, ``wait`` and ``close`` call). Methods are for one thread, the job's
    main thread, except :meth:`follow` and :meth:`abort`, which any thread may call.

    Args:
        job: name of the job; only its checkpoints are pruned, only its abandoned saves are removed.
        member: this member, as it occurs among the owners of roles.
        keep: how many complete checkpoints to keep in a folder; 0: all.
        on_complete: called when a checkpoint is complete, on the member that leads.
        on_failed: called when a save has failed or was aborted, on the member that has noticed.
        timeout_s: a save fails after so many seconds without any change in its folder.
    """

    def __init__(
        self,
        job: str,
        member: str,
        *,
        keep: int = 0,
        on_complete: Callback | None = None,
        on_failed: Callback | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self._job, self._member = publish.check_id(job), member
        self._keep, self._timeout_s = keep, timeout_s
        self._on_complete, self._on_failed = on_complete, on_failed
        self._changed = threading.Condition()
        # All below is guarded by it. A save is open (begun), then queued, then running.
        self._open: Save | None = None
        self._queue: deque[tuple[Save, float]] = deque()
        self._running: Save | None = None
        self._last: Save | None = None
        self._used: set[str] = set()
        self._aborted: dict[str, str] = {}
        self._beyond: str | None = None
        self._results: list[SaveResult] = []
        self._folders: dict[Location, KnownFolder] = {}
        self._given_up: list[Save] = []
        self._thread: threading.Thread | None = None
        self._closing = False
        # When the thread was last seen between two calls of the operating system.
        self._alive_at = time.monotonic()
        self._pid = os.getpid()

    # -- a save -------------------------------------------------------------------------------------------

    def begin(self, save: Save, interrupt: Callable[[], None] | None = None) -> bool:
        """Begins to collect a checkpoint. Nothing touches the file system before :meth:`submit`.

        A save that was begun and not submitted is forgotten. One of the same tag and step that is still being written
        is aborted: this one repeats it. So is one of the job's own. While another one is being written this one waits
        for it: the iteration is as slow as the disk then, and no checkpoint of the script's is left out.

        Args:
            save: which, without files. Its id is different for every attempt, also of an earlier run of the same job;
                such as a random number of the run, the epoch and the number of the operation.
            interrupt: called every 50 ms while waiting; may raise to end the wait.

        Returns:
            Whether the caller should collect files. ``False``: the writer hangs in an earlier save (a dead network
            file system), so this one is left out; reported as failed.

        Raises:
            CheckpointError: its tag or id cannot be used, or the saver is closed.
        """
        record = save.record
        publish.check_tag(record.tag)
        publish.check_id(record.save_id)
        with self._changed:
            if self._closing:
                raise CheckpointError("the saver is closed")
            if record.save_id in self._used:
                raise CheckpointError(f"save id {record.save_id} was used before: a repeated save needs another one")
            self._open = None
            for each in self._active():
                again = (each.folder, each.record.tag, each.record.step) == (save.folder, record.tag, record.step)
                if again or each.own:
                    self._give_up(each, "superseded by a newer save")
        if not self.wait(interrupt=interrupt):
            with self._changed:
                self._results.append(replace(save.result, error="left out: the writer hangs in an earlier save"))
            self.poll()
            return False
        with self._changed:
            save.leads, save.known = save.owners[0] == self._member, self._folders.get(save.folder)
            save.timeout_s = self._timeout_s
            self._open = save
        return True

    def add(self, rank: int, files: Sequence[HostFile]) -> None:
        """The files of one role; roles that write nothing are added with an empty list."""
        with self._changed:
            self._opened().files[rank] = list(files)

    def submit(self) -> None:
        """Hands the collected files to the writer."""
        with self._changed:
            save, self._open = self._opened(), None
            self._used.add(save.record.save_id)
            self._queue.append((save, time.monotonic()))
            self._alive_at = time.monotonic()
            self._thread = self._thread or _started(self._work)
            self._changed.notify_all()

    def skip(self) -> None:
        """A save takes place without this member, which owns no role: earlier ones have ended where they are led."""
        with self._changed:
            self._open = self._last = None

    def _opened(self) -> Save:
        if self._open is None:
            raise CheckpointError("no save was begun, or it was aborted")
        return self._open

    # -- what others do meanwhile -------------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        """Gives up the save that is going on, so that it can be done again; not one that is about to get its name.

        Does not wait.
        """
        with self._changed:
            self._open = None
            for save in self._active():
                self._give_up(save, reason)

    def give_way(self) -> None:
        """Gives up what is being written of the job's own. Does not wait."""
        with self._changed:
            for save in self._active():
                if save.own:
                    self._give_up(save, "it is not needed any more")

    def follow(self, members: Collection[str]) -> None:
        """Only ``members`` are left of those that own roles.

        Roles whose files the others have completely written still count; if one is missing the save fails. The first
        surviving owner leads from now on: it completes the current save, or the last one, which its predecessor may
        have completed already.
        """
        with self._changed:
            for save in self._unfinished():
                gone = {rank for rank, owner in enumerate(save.owners) if owner not in members}
                save.gone.update(gone)
                heir = next((owner for owner in save.owners if owner in members), None)
                if gone and heir == self._member and not save.leads:
                    save.leads = True
                    if save is self._last and save not in self._active():
                        self._alive_at = time.monotonic()
                        self._queue.append((save, time.monotonic()))
                        self._thread = self._thread or _started(self._work)
            self._changed.notify_all()

    @property
    def busy(self) -> bool:
        """Whether a submitted save is going on."""
        with self._changed:
            return bool(self._active())

    @property
    def owes(self) -> bool:
        """Whether one of the script's is."""
        with self._changed:
            return not all(save.own for save in self._active())

    # -- results ------------------------------------------------------------------------------------------

    def poll(self) -> list[SaveResult]:
        """Logs and reports saves that have ended since the last call; returns them, too."""
        with self._changed:
            results, self._results = self._results, []
        for result in results:
            if result.error is not None:
                # One that was given up is written again, or the member that leads tells of it.
                level = logging.WARNING if result.aborted else logging.ERROR
                logger.log(level, "checkpoint %s of step %d: %s", result.tag, result.step, result.error)
            if result.path is not None and self._on_complete is not None:
                self._on_complete(result)
            if result.error is not None and self._on_failed is not None:
                self._on_failed(result)
        return results

    def wait(self, timeout_s: float | None = None, interrupt: Callable[[], None] | None = None) -> bool:
        """Waits until nothing is being written; then as :meth:`poll`.

        Returns:
            Whether that is so; ``False`` after ``timeout_s`` seconds, or if the writer hangs: if the operating system
            has not finished one of its calls for longer than the saver's ``timeout_s``.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            if interrupt is not None:
                interrupt()
            with self._changed:
                idle, now = not self._active(), time.monotonic()
                if not idle and (deadline is None or now < deadline) and now < self._alive_at + self._timeout_s:
                    self._changed.wait(_INTERRUPT_POLL_S)
                    continue
            self.poll()
            return idle

    def close(self, timeout_s: float | None = None) -> None:
        """Waits for the current save (aborts it after ``timeout_s`` seconds) and ends the thread."""
        done = self.wait(timeout_s)
        if not done:
            self.abort("not written in time when the job ended")
        self._stop(None if done else _EXIT_TIMEOUT_S)
        with self._changed:
            given_up, self._given_up = self._given_up, []
        for each in given_up:  # all know it by now
            with contextlib.suppress(OSError, CheckpointError):
                each.place.forget(each.record)
        self.poll()

    def stop(self) -> None:
        """Aborts the current save and ends the thread, within seconds; unfinished files stay behind.

        A process that ends must not leave a thread in native code. Does nothing in a forked child, nor after
        :meth:`close`.
        """
        if os.getpid() == self._pid:
            self.abort("the process ends")
            self._stop(_EXIT_TIMEOUT_S)
            self.poll()

    def _stop(self, timeout_s: float | None) -> None:
        with self._changed:
            self._closing, self._open = True, None
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    # -- the thread ---------------------------------------------------------------------------------------

    def _active(self) -> list[Save]:
        running = [self._running] if self._running is not None else []
        return running + [save for save, _ in self._queue]

    def _unfinished(self) -> list[Save]:
        """Saves that this member may have to complete.

        The last one only if no newer one was submitted: a save is submitted only after its predecessor has ended on
        the member that leads.
        """
        saves = self._active() or ([self._last] if self._last is not None else [])
        return saves + ([self._open] if self._open is not None else [])

    def _give_up(self, save: Save, reason: str) -> None:
        save_id = save.record.save_id
        if self._beyond != save_id:
            self._aborted.setdefault(save_id, reason)
            self._changed.notify_all()

    def _work(self) -> None:
        # Training has the cores first.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        while True:
            with self._changed:
                while not self._queue and not self._closing:
                    self._changed.wait()
                if not self._queue:
                    return
                self._running, begin = self._queue.popleft()
                save = self._running
            result = replace(self._run(save), size=save.written, seconds=time.monotonic() - begin)
            with self._changed:
                written = result.path is None and result.error is None
                if written and save.leads:
                    self._queue.appendleft((save, begin))  # it came to lead in the last moment
                else:
                    save.files.clear()
                    self._aborted.pop(save.record.save_id, None)
                    self._results.append(result)
                    self._last = save if written else None
                self._running, self._beyond = None, None
                self._changed.notify_all()

    def _run(self, save: Save) -> SaveResult:
        """Carries out ``save``; any exception becomes the result's error."""
        result = save.result
        try:
            if save.all_written and (path := save.place.completed(save.record)) is not None:
                return self._inherited(save, result, path)
            path = perform(save, self)
        except SaveAborted as error:
            return replace(result, error=_joined(f"aborted: {error}", _remove_partial(save)), aborted=True)
        except Exception as error:  # told as `checkpoint_failed`; training goes on
            if save.leads and (path := _completed(save)) is not None:
                return self._inherited(save, result, path)
            logger.debug("checkpoint %s failed", result.tag, exc_info=True)
            text = f"{type(error).__name__}: {error}" if not isinstance(error, OSError) else str(error)
            if save.leads and not isinstance(error, SaveRefused):
                self._tell_others(save)
            return replace(result, error=_joined(text, _remove_partial(save)))
        if path is None:
            return result
        return replace(result, path=path, total=save.total, error=self._tidy(save, path))

    def _inherited(self, save: Save, result: SaveResult, path: Location) -> SaveResult:
        """A member that led before has completed ``save``, and may have died before it tidied up."""
        try:
            total = sum(file.size for file in save.place.manifest(path).files.values())
        except CheckpointError as error:  # its file system has gone since
            return replace(result, path=path, error=str(error))
        return replace(result, path=path, total=total, error=self._tidy(save, path))

    def _tidy(self, save: Save, path: Location) -> str | None:
        """``latest`` and ``keep``; an error here does not make the checkpoint less complete."""
        try:
            known = save.place.known(path)
            if known is not None:
                with self._changed:
                    self._folders[save.folder] = known
            check_lineage(save)
            if save.latest:
                save.place.point_latest(save.record)
            keep = _OWN_KEPT if save.own else self._keep
            if keep:
                save.place.prune(self._job, keep, path)
        except (OSError, CheckpointError) as error:
            return f"complete, but the folder could not be tidied up: {error}"
        return None

    def _tell_others(self, save: Save) -> None:
        """Members that have yet to enter the save learn that it will not be there any more."""
        try:
            save.place.give_up(save.record)
        except (OSError, CheckpointError) as error:  # no room, say, or no folder at all
            logger.warning("other members will wait for checkpoint %s: %s", save.record.tag, error)
            return
        with self._changed:
            self._given_up.append(save)

    # -- what the running save asks (see writer.Control) ---------------------------------------------------

    def check(self, save: Save) -> None:
        """Raises :class:`SaveAborted` if the save was given up."""
        with self._changed:
            self._alive_at = time.monotonic()
            reason = self._aborted.get(save.record.save_id)
        if reason is not None:
            raise SaveAborted(reason)

    def pause(self, save: Save, seconds: float) -> None:
        """Waits until something is asked of the saver or ``seconds`` have passed; then as :meth:`check`."""
        with self._changed:
            if save.record.save_id not in self._aborted:
                self._changed.wait(seconds)
        self.check(save)

    def point_of_no_return(self, save: Save) -> None:
        """Does as :meth:`check`; from now on :meth:`abort` leaves the save alone."""
        with self._changed:
            self.check(save)
            self._beyond = save.record.save_id


def _started(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, name=THREAD, daemon=True)
    thread.start()
    return thread


def _completed(save: Save) -> Location | None:
    """The checkpoint if another member has completed the save that has just failed here."""
    try:
        return save.place.completed(save.record)
    except (OSError, CheckpointError) as error:
        logger.debug("whether checkpoint %s is complete is not known: %s", save.record.tag, error)
        return None


def _remove_partial(save: Save) -> str | None:
    """Free the space at once; files that cannot be removed now are removed at the next save."""
    try:
        if save.leads:
            save.place.discard(save.record)
    except (OSError, CheckpointError) as error:
        return f"its files could not be removed: {error}"
    return None


def _joined(text: str, more: str | None) -> str:
    return text if more is None else f"{text}; {more}"
