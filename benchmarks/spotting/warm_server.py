"""The fork server of the tests, whose agents fork their workers although they have threads by then.

Those of agents that join are the threads of their client of etcd, of which a worker makes no use. An agent has a client
of its own, and gRPC works in no child of a process in which it has begun.
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
    alone = fork_server.may_fork

    def serve_all(control: socket.socket) -> NoReturn:
        """Imports are made, and have started no threads."""
        fork_server.may_fork = lambda words: fork_server.is_script(words) or alone(words)
        serve(control)

    fork_server.serve = serve_all
    fork_server.main()
