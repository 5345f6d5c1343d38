"""Connections between processes, and messages over them: JSON objects, which may hold numpy arrays."""

import base64
import json
import socket
import struct
from typing import Any

_LONGEST_BYTES = 1 << 31
# A machine that is gone closes no connection: after 10 s of silence it gets three probes, 5 s apart.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


def listening(host: str, port: int) -> socket.socket:
    """A listening socket: on a loopback address only there, otherwise on all addresses of the machine."""
    if is_loopback(host):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def free_port(host: str) -> int:
    with listening(host, 0) as server:
        return server.getsockname()[1]


def address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):  # Linux only
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def has_ended(connection: socket.socket) -> bool:
    """Whether the other side has closed a connection from which nothing is waited for."""
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def frame(message: dict[str, Any]) -> bytes:
    """The bytes of a message: its length in 8 bytes, then its JSON. Raises TypeError for what JSON cannot hold."""
    content = json.dumps(message, default=_array_to_json).encode()
    return struct.pack("!Q", len(content)) + content


def read_message(connection: socket.socket) -> dict[str, Any]:
    """The next message. Raises OSError if the connection has ended, ValueError if this is no message."""
    (num_bytes,) = struct.unpack("!Q", _exactly(connection, 8))
    if num_bytes > _LONGEST_BYTES:
        raise ValueError(f"a message of {num_bytes} bytes")
    message = json.loads(_exactly(connection, num_bytes), object_hook=_array_of_json)
    if not isinstance(message, dict):
        raise ValueError("no object")
    return message


def _exactly(connection: socket.socket, num_bytes: int) -> bytes:
    parts = bytearray()
    while len(parts) < num_bytes:
        part = connection.recv(min(num_bytes - len(parts), 1 << 20))
        if not part:
            raise ConnectionResetError("the connection was closed")
        parts += part
    return bytes(parts)


def _array_to_json(array: Any) -> dict[str, Any]:
    if not hasattr(array, "dtype"):
        raise TypeError(f"{type(array).__name__} does not go from process to process")
    return {"__array__": base64.b64encode(array.tobytes()).decode(), "dtype": array.dtype.str, "shape": array.shape}


def _array_of_json(found: dict[str, Any]) -> Any:
    if "__array__" not in found:
        return found
    import numpy as np

    array = np.frombuffer(base64.b64decode(found["__array__"]), np.dtype(found["dtype"]))
    return array.reshape(found["shape"]).copy()
