"""How many connections the process's limit on open files leaves room for."""

from __future__ import annotations

import contextlib

_WANTED = 65_536  # more would be nobody's idea of one model's clients
# Of all descriptors; the last quarter is for files, and for connections about to be refused.
HTTP_SHARE, GRPC_SHARE = 0.5, 0.25


def raise_limit() -> None:
    """Allow ourselves as many as the administrator allows us; shells hand on a lower limit for
    the sake of programs that use select(), which none of ours is.
    """
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        unlimited = hard == resource.RLIM_INFINITY
        wanted = _WANTED if unlimited else min(hard, _WANTED)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def most_connections(share: float) -> int:
    """Connections that may take this share of the process's descriptors."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return int(_WANTED * share)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return int((_WANTED if soft == resource.RLIM_INFINITY else min(soft, _WANTED)) * share)
