"""The pipeline engine that survives the loss of its neighbours.

The engine itself (:mod:`.pipeline_engine`) is what scripts and DeepSpeed see. It delegates to parts, which
:mod:`.parts` puts together; each gets what it needs in its constructor::

    script ---> BambooPipelineEngine <--- DeepSpeed's own methods
                   |                             ^
      script_calls | what the script changes     | deepspeed_adapter  what parts use of DeepSpeed's engine
                   v                             | runtime            which role it computes
    training  evaluation  checkpointing -----+   |
        |  visits (once for each stage)      |   |
        |  what the script calls, replayed   |   |
        |  where the job is ahead of it      v   |
        |          replay <-- joining, resuming, history, loading
        v            |
    takeover <-------+   attempts an operation, recovers, attempts it again, finishes it
        |
        +--> recovery      one recovery: plan, lanes, roles, reports (handshake), decision
        |      +--> announcements  what scripts have changed of their stages
        |      +--> copies --> construction, building --> replica, clones, wrappers
        |      +--> supply --> data
        v
    operation: a program of instructions (bamboo_ds.schedule)
        passes       forwards, backwards, batches       slices, rng, recomputing, layers
        boundaries   activations and gradients          lanes
        redundant    shadows' passes in bubbles         bubbles
        reduction    over tied stages and pipelines     tied, optimizers, sharded
        replication  reduced gradients to shadows       mismatches
        committing   the all-reduce that is the commit  commit
        steps        optimizer steps                    answers, schedulers
        exactness    the check of the first steps       tracing
        recording    what the main thread does          (bamboo_ds.observe.ring)

What parts share is in :mod:`.records`: ``CurrentEpoch``, what holds for an epoch (plan, lanes, transport), and
``Progress``, how far the job is and what is known of the operation under way. All parts belong to the main thread.
"""

from .pipeline_engine import BambooPipelineEngine

__all__ = ["BambooPipelineEngine"]
