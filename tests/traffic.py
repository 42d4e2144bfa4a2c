"""The bytes that a process has written to its TCP connections, as the kernel counts them (Linux).

What gloo sends to the other ranks is all there, its own headers too; what goes to torch's store (the rendezvous, its
keys and heartbeats) is left out by its port, which torchrun sets as `MASTER_PORT`.
"""

from __future__ import annotations

import os
import socket
import struct

# Offsets in `struct tcp_info` of linux/tcp.h, which only ever grows at its end.
_NOT_SENT, _SENT, _SENT_AGAIN = 144, 200, 208


def bytes_sent() -> int:
    """So far, by the connections that are open now: to be called twice, for the difference.

    Bytes that wait in the kernel count and those that it sends again do not, so the number is what was written.
    """
    store = int(os.environ.get("MASTER_PORT", "0"))
    total, seen = 0, set()
    for name in os.listdir("/proc/self/fd"):
        try:
            kind = os.readlink(f"/proc/self/fd/{name}")  # "socket:[inode]"
        except FileNotFoundError:  # the descriptor of this listing, which is closed by now
            continue
        if not kind.startswith("socket:") or kind in seen:
            continue
        seen.add(kind)
        connection = socket.socket(fileno=os.dup(int(name)))
        with connection:
            internet = connection.family in (socket.AF_INET, socket.AF_INET6)
            if not internet or connection.type != socket.SOCK_STREAM:
                continue
            try:
                ports = connection.getsockname()[1], connection.getpeername()[1]
            except OSError:  # it listens
                continue
            if store in ports:
                continue
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            (waiting,) = struct.unpack_from("I", info, _NOT_SENT)
            sent, again = struct.unpack_from("QQ", info, _SENT)
            total += sent - again + waiting
    return total
