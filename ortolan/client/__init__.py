"""Clients of a server of Ortolan's, over gRPC: `ortolan.Client` and `ortolan.AsyncClient`."""

from ortolan.optional import require

for _module in ("grpc", "google.protobuf", "google.rpc"):
    require(_module, "client", "talking to a server")
