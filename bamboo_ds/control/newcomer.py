"""Old name; see the imports."""

from __future__ import annotations

from .registry.vacancies import find_vacancy as find_vacancy
from .registry.vacancies import is_over as is_over
