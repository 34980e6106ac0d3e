"""Makes ``etcd3`` importable with today's protobuf.

``etcd3`` 0.12.0 ships message code generated for protobuf < 4, which newer versions refuse to run. The
serialized descriptors inside that code are valid for every version, so the modules
``etcd3.etcdrpc.{kv,auth,rpc}_pb2`` are built from them, as protoc's present output does it, and put into
``sys.modules`` before ``etcd3`` is imported. The installed files are parsed, not run.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import StoreError

_PACKAGE = "etcd3.etcdrpc"
#: In the order of their imports of one another.
_MODULES = ("kv_pb2", "auth_pb2", "rpc_pb2")
_CURE = "install them with: pip install 'etcd3==0.12.0' 'protobuf>=4' 'grpcio>=1.60'"


def load_etcdrpc() -> Any:
    """Imports ``etcd3.etcdrpc``, building its message modules first where they need it.

    Idempotent; without effect on an ``etcd3`` that imports by itself. Returns the module (messages and
    gRPC stubs). Raises :class:`StoreError` if it cannot be made to work.
    """
    if _PACKAGE not in sys.modules:
        try:
            _install()
        except StoreError:
            raise
        except Exception as error:  # the files are foreign: whatever goes wrong in them has one cure
            raise StoreError(
                f"cannot build etcd3's messages for protobuf {_protobuf_version()}: {error}; {_CURE}"
            ) from error
    try:
        return importlib.import_module(_PACKAGE)
    except Exception as error:
        raise StoreError(f"etcd3 does not import with protobuf {_protobuf_version()}: {error!r}; {_CURE}") from error


def _protobuf_version() -> str:
    try:
        return str(importlib.import_module("google.protobuf").__version__)
    except ImportError:
        return "(not installed)"


def _install() -> None:
    spec = importlib.util.find_spec("etcd3")
    if spec is None or not spec.submodule_search_locations:
        raise StoreError(f"the package etcd3 is not installed; {_CURE}")
    version = _protobuf_version()
    if int(version.split(".")[0]) < 4:
        return
    folder = Path(next(iter(spec.submodule_search_locations))) / "etcdrpc"
    serialized: dict[str, bytes] = {}
    for name in _MODULES:
        data = _serialized_descriptor(folder / f"{name}.py")
        if data is None:
            return  # written by a newer protoc: imports by itself
        serialized[name] = data

    from google.protobuf import descriptor_pool
    from google.protobuf.internal import builder

    # A pool of its own: names like "rpc.proto" are anybody's in the default one.
    pool = descriptor_pool.DescriptorPool()
    built: dict[str, ModuleType] = {}
    for name, data in serialized.items():
        pool.AddSerializedFile(data)
        module = ModuleType(f"{_PACKAGE}.{name}", "Built by bamboo_ds from the descriptor in the file of this name.")
        module.__file__ = str(folder / f"{name}.py")
        descriptor = pool.FindFileByName(name.replace("_pb2", ".proto"))
        module.__dict__["DESCRIPTOR"] = descriptor
        builder.BuildMessageAndEnumDescriptors(descriptor, module.__dict__)
        builder.BuildTopDescriptorsAndMessages(descriptor, module.__name__, module.__dict__)
        built[module.__name__] = module
    sys.modules.update(built)


def _serialized_descriptor(path: Path) -> bytes | None:
    """The ``serialized_pb`` of an old-style generated file, ``None`` if the file is of a newer style."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "FileDescriptor":
            for keyword in node.keywords:
                if keyword.arg == "serialized_pb":
                    value = keyword.value
                    literal = value.args[0] if isinstance(value, ast.Call) else value
                    text = ast.literal_eval(literal)
                    return text if isinstance(text, bytes) else str(text).encode("latin1")
    return None
