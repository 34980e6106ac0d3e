"""Worker of gpu/recovery.py: :mod:`transformer`, on one rank under compute-sanitizer, which takes this process's place.

``SANITIZER`` is that program. A loss of this worker would be one of the program, not of what it runs.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("transformer.py")

if os.environ["RANK"] == "0" and os.environ.get("SANITIZER"):
    program = os.environ["SANITIZER"]
    options = ["--tool", "memcheck", "--target-processes", "all", "--error-exitcode", "86"]
    os.execv(program, [program, *options, sys.executable, str(SCRIPT), *sys.argv[1:]])
sys.path.insert(0, str(SCRIPT.parent))
sys.argv[0] = str(SCRIPT)
runpy.run_path(str(SCRIPT), run_name="__main__")
