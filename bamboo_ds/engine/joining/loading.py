"""Loading a checkpoint into all roles of all members."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import ProtocolError
from ..checkpoints.kept import keeping_types, load_kept
from ..context.shared import InContext
from ..iteration.replication import Replication
from ..recovery.copies import Copies
from ..stage.answers import ignore
from ..stage.schedulers import SchedulerPosition, settings_of


@dataclass(eq=False)
class Loader(InContext):
    """Loads checkpoints.

    Attributes:
        universal: whether the checkpoint that is loaded may be a universal one.
    """

    copies: Copies
    replication: Replication
    universal: bool = field(default=True, init=False)

    @contextmanager
    def own_checkpoint(self) -> Iterator[None]:
        """What is loaded in the body the job has saved itself, which may have begun with a universal checkpoint."""
        self.universal = False
        try:
            yield
        finally:
            self.universal = True

    def local_position(self) -> SchedulerPosition | None:
        """Position of the script's own scheduler, if it has brought one."""
        self.binding.refresh()
        local = self.binding.local
        return SchedulerPosition.of(local) if local.pristine is not None else None

    def load(self, folder: str, tag: str | None, position: SchedulerPosition | None, *args: Any, **kwargs: Any) -> Any:
        """Load all roles of all members; returns what DeepSpeed does.

        Args:
            folder, tag, args, kwargs: as DeepSpeed's.
            position: that of the script's scheduler, if it has taken steps already.
        """
        # The local runtime counts for the script even where others own its role.
        local = self.binding.local
        for runtime in [*(r for r in self.binding.owned() if r is not local), local]:
            self.binding.use(runtime)
            optimizer = self.ds.basic_optimizer
            if runtime.pristine is not None and position is not None:
                runtime.pristine.renew(self.ds.lr_scheduler, optimizer, self.ds.optimizer)
            keeps = nullcontext() if self.universal or optimizer is None else keeping_types(optimizer)
            with self.groups.acting_for(runtime.role, ignore), keeps:
                result: Any = self.ds.load_checkpoint(folder, tag, *args, **kwargs)
            if position is not None and len(position.groups) == len(settings_of(optimizer)):
                self.binding.refresh()
                position.restore(runtime)
            if not self.universal and tag is not None:  # it goes on from its own checkpoint
                load_kept(runtime, Path(folder, tag), self.layout.rank(runtime.role))
        if result[0] is None and tag is not None:
            raise ProtocolError(f"checkpoint {tag} in {folder} cannot be loaded")
        if self.layout.sharded:
            # Of a universal checkpoint each has brought its own shard up to date only.
            self.replication.exchange_shards()
        self.copies.copy_state(self.layout.roles)
        self.progress.changed.clear()
        return result
