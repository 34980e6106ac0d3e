"""Entry point of group ``torch.backends``: torch calls :func:`autoload` on ``import torch``.

It costs microseconds: it registers an import hook and, but for tasks of Slurm's ``srun``, nothing else. The hook
patches modules when (and if) they are imported:

* ``deepspeed.comm.comm``: ``init_distributed`` builds the process groups of a bamboo job on the ``bamboo``
  backend;
* ``deepspeed.runtime.engine``: constructing a ``PipelineEngine`` with a ``"bamboo"`` block in its
  configuration gives a :class:`~bamboo_ds.engine.BambooPipelineEngine`;
* ``torch.utils.cpp_extension``: a worker that compiles an extension, or waits for one, says so (:mod:`.compiling`);
* Megatron's that print and write (see :mod:`.megatron`): they ask who speaks for a lost rank. Once more when the engine
  is built: a package that imports torch itself (GPT-NeoX) defines its functions after this hook has looked at it, and
  its modules may have imported them from each other before.

Submodules are hooked rather than ``deepspeed`` itself because DeepSpeed imports torch: by the time that
torch calls this function, ``deepspeed`` is usually half imported already. Without a block everything that
the patched functions do is to look for one.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


def _patch_comm(module: ModuleType) -> None:
    from . import hooks

    hooks.patch_comm(module)


def _patch_engine(module: ModuleType) -> None:
    from . import hooks

    hooks.patch_engine(module, _patch_megatron_again)


def _patch_extensions(module: ModuleType) -> None:
    from . import compiling

    compiling.patch(module)


#: Modules that define what Megatron prints and writes with, in versions of Megatron-DeepSpeed, GPT-NeoX and Megatron's
#: core.
_MEGATRON = (
    "megatron",
    "megatron.utils",
    "megatron.logging",
    "megatron.global_vars",
    "megatron.training",
    "megatron.timers",
    "megatron.mpu.initialize",
    "megatron.core.timers",
    "megatron.core.parallel_state",
)


def _patch_megatron(module: ModuleType) -> None:
    from . import megatron

    megatron.patch(module)


def _patch_megatron_again() -> None:
    from . import megatron

    megatron.patch_everywhere(_MEGATRON)


_PATCHES: dict[str, Callable[[ModuleType], None]] = {
    "deepspeed.comm.comm": _patch_comm,
    "deepspeed.runtime.engine": _patch_engine,
    "torch.utils.cpp_extension": _patch_extensions,
    **dict.fromkeys(_MEGATRON, _patch_megatron),
}


class _PatchingLoader(importlib.abc.Loader):
    """Executes a module through its own loader, then patches it."""

    def __init__(self, loader: importlib.abc.Loader, patch: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._patch = patch

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._patch(module)


class _PatchingFinder(importlib.abc.MetaPathFinder):
    """Finds the modules of ``_PATCHES`` through the other finders and wraps their loaders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        patch = _PATCHES.get(fullname)
        if patch is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        spec.loader = _PatchingLoader(spec.loader, patch)
        return spec


def _adopt_slurm() -> None:
    """Give a task of ``srun`` in a bamboo job the variables that scripts ask for before they build process groups."""
    from . import config, variables
    from .launchers import ranks

    path = config.config_path_from_argv()
    if variables.ENV_LAUNCH in os.environ or (path is not None and config.has_block(path)):
        ranks.adopt_slurm(os.environ)


def autoload() -> None:
    """Install the import hook. Idempotent."""
    if any(isinstance(finder, _PatchingFinder) for finder in sys.meta_path):
        return
    if "SLURM_PROCID" in os.environ:
        _adopt_slurm()
    for name, patch in _PATCHES.items():
        module = sys.modules.get(name)
        if module is not None:
            patch(module)
    sys.meta_path.insert(0, _PatchingFinder())
