"""etcd through ``etcd3``: the only way in which the control plane's processes share state.

:mod:`.embedded` costs no import of gRPC, the others do.
"""
