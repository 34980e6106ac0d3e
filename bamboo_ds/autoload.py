"""Entry point of group ``torch.backends``: torch calls :func:`autoload` on ``import torch``.

It costs microseconds: it registers an import hook and, but for tasks of Slurm's ``srun``, nothing else. The hook
patches modules when (and if) they are imported:

* ``deepspeed.comm.comm``: ``init_distributed`` builds the process groups of a bamboo job on the ``bamboo``
  backend;
* ``deepspeed.runtime.engine``: constructing a ``PipelineEngine`` with a ``"bamboo"`` block in its
  configuration gives a :class:`~bamboo_ds.engine.BambooPipelineEngine`;
* ``deepspeed.runtime.pipe.module``: a model that the job's ranks cannot compute is refused with the numbers that could;
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
from collections.abc import Sequence
from types import ModuleType

from .patching import MEGATRON

#: By the module that is imported: the module of this package that patches it, and its function.
_PATCHES: dict[str, tuple[str, str]] = {
    "deepspeed.comm.comm": ("hooks", "patch_comm"),
    "deepspeed.runtime.engine": ("hooks", "patch_engine"),
    "deepspeed.runtime.pipe.module": ("hooks", "patch_pipe"),
    "torch.utils.cpp_extension": ("compiling", "patch"),
    **dict.fromkeys(MEGATRON, ("megatron", "patch")),
}


def _patch(module: ModuleType) -> None:
    where, function = _PATCHES[module.__name__]
    getattr(importlib.import_module(f"{__package__}.{where}"), function)(module)


class _PatchingLoader(importlib.abc.Loader):
    """Executes a module through its own loader, then patches it."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _patch(module)


class _PatchingFinder(importlib.abc.MetaPathFinder):
    """Finds the modules of ``_PATCHES`` through the other finders and wraps their loaders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        spec.loader = _PatchingLoader(spec.loader)
        return spec


def _adopt_slurm() -> None:
    """Gives a task of ``srun`` in a bamboo job the variables that scripts ask for before they build process groups."""
    from . import config, variables
    from .launchers import ranks

    path = config.config_path_from_argv()
    if variables.ENV_LAUNCH in os.environ or (path is not None and config.has_block(path)):
        ranks.adopt_slurm(os.environ)


def autoload() -> None:
    """Installs the import hook. Idempotent."""
    if any(isinstance(finder, _PatchingFinder) for finder in sys.meta_path):
        return
    if "SLURM_PROCID" in os.environ:
        _adopt_slurm()
    for module in filter(None, map(sys.modules.get, _PATCHES)):
        _patch(module)
    sys.meta_path.insert(0, _PatchingFinder())
