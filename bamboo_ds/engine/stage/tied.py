"""Weights that several stages of a pipeline hold: DeepSpeed's ``TiedLayerSpec``.

Every one of these stages has a copy of the weight and computes a part of its gradient. Before gradients are averaged
over the pipelines the parts are summed over the stages of each pipeline, so that all copies make the same step::

    stage 0   embedding   part 0 --+--> sum --> average over pipelines --> step
    ...                            |
    stage 3   head        part 3 --+--> sum --> average over pipelines --> step

A member that owns several of the stages sums its parts up itself and takes part in the collective once (see
:class:`~..iteration.reduction.Reduction`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from deepspeed.runtime.pipe.module import TiedLayerSpec
from deepspeed.runtime.state_dict_factory import SDLoaderFactory

from ...bare import bare


def ties(module: Any) -> dict[str, list[int]]:
    """The stages that hold each tied layer of a ``PipelineModule``, by its key, in the order of the keys."""
    found: dict[str, set[int]] = {}
    for index, spec in enumerate(module._layer_specs):
        if isinstance(spec, TiedLayerSpec):
            found.setdefault(spec.key, set()).add(module.stage_owner(index))
    return {key: sorted(found[key]) for key in sorted(found)}


def tied_stages(module: Any) -> frozenset[int]:
    """Stages whose gradients are summed with those of other stages."""
    return frozenset(stage for stages in ties(module).values() if len(stages) > 1 for stage in stages)


def tied_weights(module: Any) -> Iterator[tuple[str, str, torch.nn.Parameter]]:
    """Key, name of the attribute, and weight, of what other stages hold, too."""
    for key, comm in module.tied_comms.items():
        for attribute in comm["weight_attr"] if len(comm["ranks"]) > 1 else ():
            yield key, attribute, attrgetter(attribute)(module.tied_modules[key])


@contextmanager
def loading_alone(module: Any, checkpoint: dict[str, Any], folder: str, checkpoint_engine: Any) -> Iterator[None]:
    """The body loads the state of ``module``, a stage, without the collectives that DeepSpeed has for tied weights.

    Args:
        checkpoint: holds the weights itself, or its ``module`` is not a dictionary.
        folder: of the checkpoint.
        checkpoint_engine: DeepSpeed's, to read files with.
    """
    module._synchronize_tied_weights = lambda: None
    try:
        yield
    finally:
        del module._synchronize_tied_weights
    if not isinstance(checkpoint["module"], dict):
        _load_tied_weights(module, folder, checkpoint_engine)


def _load_tied_weights(module: Any, folder: str, checkpoint_engine: Any) -> None:
    """Loads tied weights that ``module`` has no file of, from the file of the stage that has.

    DeepSpeed writes no file for a tied layer with a ``forward_fn``. Where it loads, its stages broadcast the weights;
    here every role is loaded for itself, after its own files.
    """
    for key, comm in module.tied_comms.items():
        specs = enumerate(module._layer_specs)
        saved = [i for i, s in specs if isinstance(s, TiedLayerSpec) and s.key == key and s.forward_fn is None]
        if not saved or module._local_start <= saved[0] < module._local_stop:
            continue
        files = module.ckpt_layer_path_list(folder, saved[0] - module._local_start)
        loader = SDLoaderFactory.get_sd_loader(files, version=2.0, checkpoint_engine=checkpoint_engine)
        size, rank = module._grid.get_slice_parallel_world_size(), module._grid.get_slice_parallel_rank()
        _, state, _ = loader.load(size, rank, module_key=None, is_pipe_parallel=True)
        names = {id(p): name for name, p in comm["module"].named_parameters()}
        for attribute in comm["weight_attr"]:
            weight = attrgetter(attribute)(comm["module"])
            with torch.no_grad():
                if names[id(weight)] in state:  # frozen parameters may have been left out
                    bare(weight).copy_(state[names[id(weight)]])
