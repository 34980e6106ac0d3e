"""The pipeline engine that survives the loss of its neighbours."""

from .bamboo import BambooPipelineEngine

__all__ = ["BambooPipelineEngine"]
