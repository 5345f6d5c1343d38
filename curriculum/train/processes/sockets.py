"""Sockets between the processes of a run."""

from __future__ import annotations

import socket

# A machine that is gone closes no connection: after 10 s of silence it gets three probes, 5 s apart.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


def listening(host: str, port: int) -> socket.socket:
    """A listening socket: on a loopback address only there, otherwise on all addresses of the machine."""
    if _is_loopback(host):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def free_port(host: str) -> int:
    with listening(host, 0) as server:
        return server.getsockname()[1]


def written(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):  # Linux only
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
