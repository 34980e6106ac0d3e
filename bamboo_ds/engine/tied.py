"""Weights that several stages of a pipeline hold: DeepSpeed's ``TiedLayerSpec``.

Every one of these stages has a copy of the weight and computes a part of its gradient. Before gradients are averaged
over the pipelines the parts are summed over the stages of each pipeline, so that all copies make the same step::

    stage 0   embedding   part 0 --+--> sum --> average over pipelines --> step
    ...                            |
    stage 3   head        part 3 --+--> sum --> average over pipelines --> step

A member that owns several of the stages sums its parts up itself and takes part in the collective once.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.pipe import schedule as stock
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import TiedLayerSpec
from deepspeed.runtime.state_dict_factory import SDLoaderFactory

from ..comm.session import Session
from ..topology import Layout, Role
from .runtime import StageRuntime
from .slices import SlicingExecutor


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


def connect_ties(module: Any, role: Role, layout: Layout, session: Session) -> None:
    """Give ``module``, the stage of ``role``, what DeepSpeed's constructor makes for its tied layers.

    Its groups have names that are equal on all members.
    """
    comms = {}
    for key, stages in ties(module).items():
        if role.stage not in stages:
            continue
        ranks = [layout.rank(Role(role.pipeline, stage)) for stage in stages]
        comms[key] = {
            "ranks": ranks,
            "group": session.logical_group(f"bamboo/tied/{key}/{role.pipeline}", ranks, layout.rank(role)),
            "weight_attr": module.tied_weight_attrs[key],
            "module": module.tied_modules[key],
        }
        for parameter in module.tied_modules[key].parameters():
            # DeepSpeed's optimizers with masters count a tied layer on its first stage.
            parameter.ds_pipe_replicated = role.stage != stages[0]
    module.tied_comms = comms


def tied_weights(module: Any) -> Iterator[tuple[str, str, torch.nn.Parameter]]:
    """Key, name of the attribute, and weight, of what other stages hold, too."""
    for key, comm in module.tied_comms.items():
        for attribute in comm["weight_attr"] if len(comm["ranks"]) > 1 else ():
            yield key, attribute, attrgetter(attribute)(module.tied_modules[key])


def load_tied_weights(module: Any, folder: str, checkpoint_engine: Any) -> None:
    """Load tied weights that ``module`` has no file of, from the file of the stage that has.

    DeepSpeed writes no file for a tied layer with a ``forward_fn``. Where it loads, its stages broadcast the weights;
    here every role is loaded for itself.

    Args:
        module: a stage whose own files are loaded.
        folder: of the checkpoint.
        checkpoint_engine: DeepSpeed's, to read files with.
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
                    weight.copy_(state[names[id(weight)]])


class TyingExecutor(SlicingExecutor):
    """Sums the gradients of tied weights over the stages that hold them."""

    def _local_sums(self, runtime: StageRuntime) -> list[torch.Tensor]:
        """What the bound ``runtime`` gives to the reduction over the pipelines."""
        sums = runtime.optimizer.local()
        if not runtime.tied:
            return sums
        parameters = runtime.trainable()
        found = runtime.optimizer.replaced(sums, {id(parameters[i]): total for i, total in runtime.tied.items()})
        runtime.tied.clear()
        return found

    def _exec_reduce_tied_grads(self) -> None:
        """Sum the gradients of the pipeline's tied weights into ``runtime.tied`` of this member's roles there.

        The roles' own sums stay as they are until the iteration commits: a member lost meanwhile makes the others
        repeat the reduction from them.
        """
        runtime = self._binding.current
        roles = [r for r in self._binding.owned() if r.role.pipeline == runtime.role.pipeline]
        if not self._tied_stages or runtime is not roles[-1]:
            return
        parts: dict[tuple[str, str], list[tuple[StageRuntime, int, torch.Tensor]]] = {}
        for each in roles:
            self._binding.use(each)
            places = {id(p): i for i, p in enumerate(each.trainable())}
            sums = each.optimizer.local() if each.role.stage in self._tied_stages else []
            for key, attribute, weight in tied_weights(self.module):
                place = places.get(id(weight))
                if place is not None:
                    own = each.optimizer.part(sums, weight)
                    parts.setdefault((key, attribute), []).append((each, place, own))
        for (key, _), holders in sorted(parts.items(), key=lambda item: item[0]):
            (first, place, gradient), *others = holders
            total = first.tied[place] = gradient.clone()
            for _, _, addend in others:
                total.add_(addend)
            module: Any = first.module
            dist.all_reduce(total, group=module.tied_comms[key]["group"])
            for each, place, _ in others:
                each.tied[place] = total.clone()

    def load_module_state_dict(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """As DeepSpeed's, without collectives."""
        self.module._synchronize_tied_weights = lambda: None
        try:
            super().load_module_state_dict(checkpoint, *args, **kwargs)
        finally:
            del self.module._synchronize_tied_weights
        if not isinstance(checkpoint["module"], dict):  # else it holds the weights itself
            load_tied_weights(self.module, self._curr_ckpt_path, self.checkpoint_engine)

    _INSTRUCTION_MAP = {**PipelineEngine._INSTRUCTION_MAP, stock.ReduceTiedGrads: _exec_reduce_tied_grads}
