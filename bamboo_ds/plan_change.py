"""Old name; see the imports."""

from __future__ import annotations

from .worker.plan_changes import PlanView as PlanView
from .worker.plan_changes import begin as begin
from .worker.plan_changes import listen as listen
from .worker.plan_changes import tell as tell
from .worker.plan_changes import view_of as view_of
