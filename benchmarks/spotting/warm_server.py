"""The fork server of the tests, whose agents fork their workers although they have threads by then.

Those of agents that join are the threads of their client of etcd, of which a worker makes no use.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import NoReturn

ROOT = str(Path(__file__).resolve().parents[2])

if __name__ == "__main__":
    sys.path.append(ROOT)
    from tests.support import fork_server

    sys.path.remove(ROOT)
    serve = fork_server.serve

    def serve_all(control: socket.socket) -> NoReturn:
        """Imports are made, and have started no threads."""
        fork_server._threads = lambda: 1
        serve(control)

    fork_server.serve = serve_all
    fork_server.main()
