"""All peers by name, ours first."""

from __future__ import annotations

from collections.abc import Sequence

from bench.peers.base import Peer
from bench.peers.llama_server import LlamaServer
from bench.peers.openvino_pipeline import OpenVino
from bench.peers.ours import Ours
from bench.peers.transformers_serve import TransformersServe
from bench.peers.vllm_cpu import VllmCpu

OURS, OURS_INT8, OURS_W8A8 = "ours", "ours-int8", "ours-w8a8"
_ALL: tuple[Peer, ...] = (
    Ours(OURS),
    Ours(OURS_INT8, "int8", flags=("--quantization", "int8")),
    Ours(OURS_W8A8, "int8", flags=("--quantization", "w8a8")),  # rounds its inputs, as Q8_0 does
    VllmCpu(),
    LlamaServer("llama-server", "bf16", "bf16"),
    LlamaServer("llama-server-q8", "int8", "q8_0"),
    OpenVino(),
    TransformersServe(),
)
PEERS = {peer.name: peer for peer in _ALL}


def chosen(names: Sequence[str]) -> list[Peer]:
    """Those of these names, all for none. Raises SystemExit."""
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise SystemExit(f"no peer {', '.join(unknown)}: there are {', '.join(PEERS)}")
    return [PEERS[name] for name in names] or list(PEERS.values())
