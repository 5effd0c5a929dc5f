"""`python -m bench.peers install [NAME...]` sets peers up, `python -m bench.peers list` says what is there."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from bench.peers.base import Peer, folder_of
from bench.peers.registry import chosen


def install(peers: Sequence[Peer]) -> int:
    """Each of them, also after one that fails; how many have failed."""
    num_failed = 0
    for peer in peers:
        began = time.perf_counter()
        try:
            peer.install(folder_of(peer))
        except SystemExit as error:
            num_failed += 1
            print(f"{peer.name}: not installed\n{error}", flush=True)
        else:
            print(f"{describe(peer)} ({time.perf_counter() - began:.0f} s)", flush=True)
    return num_failed


def describe(peer: Peer) -> str:
    """One line: name, version, size."""
    folder = folder_of(peer)
    version = peer.version(folder)
    if version is None:
        return f"{peer.name:16} not installed"
    size = sum(path.lstat().st_size for path in folder.rglob("*")) if folder.is_dir() else 0
    return f"{peer.name:16} {version}, {peer.precision}" + (f", {size / 1e6:,.0f} MB in {folder}" if size else "")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    parser.add_argument("action", choices=("install", "list"))
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    arguments = parser.parse_args()
    peers = chosen(arguments.names)
    if arguments.action == "install":
        raise SystemExit(1 if install(peers) else 0)
    for peer in peers:
        print(describe(peer))


if __name__ == "__main__":
    main()
