"""ZeroMQ sockets with the options that every one of ours has. Used by all processes; knows no message."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

import zmq
import zmq.auth.thread

from novainfer.errors import ConfigError
from novainfer.protocol.codec import MAX_MESSAGE_BYTES
from novainfer.transport.addresses import CurveKeys, Endpoint

if zmq.zmq_version_info() < (4, 3, 3):
    raise ConfigError("libzmq 4.3.3 or newer is needed: older ones have remote memory errors")

_ZAP_DOMAIN = "novainfer"
# Arithmetic with the enumerations is slow, and these are wanted several times a turn.
_POLLIN, _SNDMORE = int(zmq.POLLIN), int(zmq.SNDMORE)
_KEEPALIVE_SECONDS = 60

NOBLOCK = int(zmq.NOBLOCK)

S = TypeVar("S", bound="zmq.Socket[bytes]")


def new_keys() -> CurveKeys:
    """Fresh CURVE keys for one server start."""
    server_public, server_secret = zmq.curve_keypair()
    client_public, client_secret = zmq.curve_keypair()
    return CurveKeys(server_public.decode(), server_secret.decode(), client_public.decode(), client_secret.decode())


def bind_router(context: zmq.Context[S], endpoint: Endpoint) -> S:
    """A ROUTER that raises (EHOSTUNREACH) instead of dropping what it cannot route."""
    socket = _configure(context.socket(zmq.ROUTER))
    socket.set(zmq.ROUTER_MANDATORY, 1)
    socket.set(zmq.ROUTER_HANDOVER, 1)  # a restarted peer takes its identity over
    return _bind(socket, endpoint)


def bind_pull(context: zmq.Context[S], endpoint: Endpoint) -> S:
    """The receiving end of one-way reports."""
    return _bind(_configure(context.socket(zmq.PULL)), endpoint)


def bind_rep(context: zmq.Context[S], endpoint: Endpoint) -> S:
    """The end that answers questions, one after another."""
    return _bind(_configure(context.socket(zmq.REP)), endpoint)


def connect_req(context: zmq.Context[S], endpoint: Endpoint) -> S:
    """The end that asks."""
    return _connect(_configure(context.socket(zmq.REQ)), endpoint)


def connect_dealer(context: zmq.Context[S], endpoint: Endpoint, identity: bytes) -> S:
    """A DEALER with a fixed identity; reconnects by itself, so it may start before its peer."""
    socket = _configure(context.socket(zmq.DEALER))
    socket.set(zmq.IDENTITY, identity)
    return _connect(socket, endpoint)


def connect_push(context: zmq.Context[S], endpoint: Endpoint) -> S:
    """The sending end of one-way reports; lingers a second so that a last word is heard."""
    socket = _configure(context.socket(zmq.PUSH))
    socket.set(zmq.LINGER, 1000)
    return _connect(socket, endpoint)


def has_message(socket: zmq.Socket[bytes], timeout_ms: int = 0) -> bool:
    """Whether one can be received at once, or comes in time; -1: wait for it. The socket's own `poll` and its option
    for that make several objects each time.
    """
    return bool(zmq.zmq_poll([(socket, _POLLIN)], timeout_ms))


def send_frames(socket: zmq.Socket[bytes], frames: Sequence[bytes], flags: int = 0) -> None:
    """Send one or more as one message, as `send_multipart` does, which takes several times as long: it looks at all of
    them before it sends one. A frame that is not bytes leaves half a message in the socket.
    """
    for frame in frames[:-1]:
        socket.send(frame, flags | _SNDMORE)
    socket.send(frames[-1], flags)


def receive_frames(socket: zmq.Socket[bytes], flags: int = 0) -> list[bytes]:
    """The frames of the next message: `recv_multipart`, in less time."""
    frame = socket.recv(flags, copy=False)
    frames = [frame.bytes]
    while frame.more:
        frame = socket.recv(flags, copy=False)
        frames.append(frame.bytes)
    return frames


def start_authenticator(context: zmq.Context[S], keys: CurveKeys) -> zmq.auth.thread.ThreadAuthenticator:
    """Let only the holder of the client key talk to this context's CURVE servers; until then nobody can.

    One per context; its other sockets are not concerned. Stop it before `term`.
    """
    authenticator = zmq.auth.thread.ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(domain=_ZAP_DOMAIN, credentials_provider=_OneClient(keys.client_public))
    return authenticator


class _OneClient:
    """ZAP credentials: the one client public key of this server start, in Z85."""

    def __init__(self, public_key: str) -> None:
        self._public_key = public_key.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public_key


def _configure(socket: S) -> S:
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    # Credit is counted by the callers (bounded queues); a silent drop at a high-water mark would lose tokens.
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    # For tcp: an idle server's link to its ranks carries nothing for hours, and what lies between may forget it.
    socket.set(zmq.TCP_KEEPALIVE, 1)
    socket.set(zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_SECONDS)
    return socket


def _bind(socket: S, endpoint: Endpoint) -> S:
    endpoint.check()
    if endpoint.curve is not None:
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_SECRETKEY, endpoint.curve.server_secret.encode())
        # Without an authenticator ZeroMQ would let in whoever knows the server's public key.
        socket.set(zmq.ZAP_DOMAIN, _ZAP_DOMAIN.encode())
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
    socket.set(zmq.IPV6, _is_ipv6(endpoint))
    try:
        socket.bind(endpoint.address)
    except zmq.ZMQError as error:
        socket.close()
        raise ConfigError(f"cannot listen on {endpoint.address}: {error.strerror}") from None
    if endpoint.address.startswith("ipc://"):
        os.chmod(endpoint.address[6:], 0o600)
    return socket


def _connect(socket: S, endpoint: Endpoint) -> S:
    endpoint.check()
    if endpoint.curve is not None:
        socket.set(zmq.CURVE_SERVERKEY, endpoint.curve.server_public.encode())
        socket.set(zmq.CURVE_PUBLICKEY, endpoint.curve.client_public.encode())
        socket.set(zmq.CURVE_SECRETKEY, endpoint.curve.client_secret.encode())
    socket.set(zmq.IPV6, _is_ipv6(endpoint))
    socket.set(zmq.RECONNECT_IVL, 20)
    socket.set(zmq.RECONNECT_IVL_MAX, 500)
    socket.connect(endpoint.address)
    return socket


def _is_ipv6(endpoint: Endpoint) -> bool:
    return endpoint.address.startswith("tcp://[")
