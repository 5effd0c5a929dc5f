"""A zygote whose children say `SLOT PID` and then leave with the status that they are told."""

from __future__ import annotations

import argparse
import os
import socket
import sys

from novainfer.transport.zygote import Zygote


def become(slot: int, connection: socket.socket) -> None:
    with connection.makefile("rw") as talk:
        talk.write(f"{slot} {os.getpid()}\n")
        talk.flush()
        os._exit(int(talk.readline() or 9))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--tell-end", action="store_true")
    parser.add_argument("--control", type=int)
    options = parser.parse_args()
    sys.exit(Zygote(socket.socket(fileno=options.control), become, tell_end=options.tell_end).run())
