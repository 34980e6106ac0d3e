"""The connection to etcd: one gRPC channel at a time, failover, authentication, retries."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    sleep_using_event,
    stop_after_delay,
    wait_random_exponential,
)

from ..errors import LeaseExpired, StoreError, StoreUnavailable
from ..secret import SETTING
from .endpoints import ADDRESSES, ENV_CA, ENV_CERT, ENV_KEY, ENV_PASSWORD, ENV_USER, Certificates, Endpoint
from .protobuf_shim import load_etcdrpc

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # it prints every failed handshake, which our own errors tell


@contextmanager
def _no_poller_in_children() -> Iterator[None]:
    """Keeps gRPC, which reads the variable at import, from giving forked children a poller.

    With its support of forks a child that prepares itself before it executes something else gets a poller, which aborts
    it as soon as ``Popen`` has closed the poller's descriptor (grpc/grpc#43055). Workers do not inherit the variable.
    """
    before = os.environ.get(_FORK_SUPPORT)
    os.environ[_FORK_SUPPORT] = "0"
    try:
        yield
    finally:
        del os.environ[_FORK_SUPPORT]
        if before is not None:
            os.environ[_FORK_SUPPORT] = before


_FORK_SUPPORT = "GRPC_ENABLE_FORK_SUPPORT"
with _no_poller_in_children():
    rpc = load_etcdrpc()
    import grpc  # after the shim, whose error names the cure if it is missing

log = logging.getLogger(__name__)

Metadata = tuple[tuple[str, str], ...]

_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),  # else a new channel inherits the back-off of the broken one
    ("grpc.enable_http_proxy", 0),  # etcd is inside the cluster
    ("grpc.enable_retries", 0),  # retries are decided here
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
#: Members that lost the same etcd do not come back to it in step.
_BACKOFF = wait_random_exponential(multiplier=0.02, max=0.5)
#: Seconds that an etcd under load may take for an answer; the shortest leases allow it.
_ATTEMPT_S = 2.0
_BROKEN = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,  # the channel was closed under the request
    grpc.StatusCode.INTERNAL,  # the stream was reset
)


#: What gRPC says, and what it means.
_CURES = (
    (
        # The last one is gRPC's name for such an alert that comes after the handshake.
        r"ALERT_BAD_CERTIFICATE|CERTIFICATE_REQUIRED|UNKNOWN_CA|Unwrap failed",
        f"etcd wants a client certificate that it trusts: set {ENV_CERT} and {ENV_KEY}",
    ),
    (r"CERTIFICATE_VERIFY_FAILED", f"etcd's certificate is of another authority than {ENV_CA} holds"),
    (r"Hostname Verification", f"etcd's certificate is for other names than {ADDRESSES} has"),
    (r"Handshake read failed|WRONG_VERSION_NUMBER", "etcd does not seem to use TLS: write http://"),
    (r"Socket closed", "if etcd uses TLS write https://"),
)


#: The same at the job's own etcd, whose certificates nobody chooses.
_OWN = (
    (
        r"CERTIFICATE_VERIFY_FAILED|WRONG_VERSION_NUMBER",
        f"what answers there does not know the secret that this process has of the job: check {SETTING}",
    ),
)


class Broken(Exception):
    """The connection failed under a request, which may or may not have been carried out."""


class Silent(Broken):
    """No answer came in time."""


class StaleToken(Exception):
    """etcd does not know the token (any more): authenticate again."""


@dataclass(frozen=True)
class Credentials:
    """Credentials for an etcd that wants authentication.

    Attributes:
        certificates: at an etcd of the user's.
        own: at the job's own etcd; ``None``: there is no such endpoint.
    """

    certificates: Certificates
    own: Certificates | None = None
    user: str | None = None
    password: str | None = field(default=None, repr=False)


class Link:
    """One channel to one endpoint, with its stubs and its token. Used until it breaks, then replaced."""

    def __init__(self, endpoint: Endpoint, access: Credentials) -> None:
        self.endpoint = endpoint
        if endpoint.secure:
            tls = access.own if endpoint.own and access.own else access.certificates
            credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.cert)
            name = () if tls.name is None else (("grpc.ssl_target_name_override", tls.name),)
            self._channel = grpc.secure_channel(endpoint.target, credentials, options=(*_OPTIONS, *name))
        else:
            self._channel = grpc.insecure_channel(endpoint.target, options=_OPTIONS)
        self.kv = rpc.KVStub(self._channel)
        self.lease = rpc.LeaseStub(self._channel)
        self.watch = rpc.WatchStub(self._channel)
        self._auth = rpc.AuthStub(self._channel)
        # One request, one answer: no need for the stream, and for the thread that feeds it.
        self.keep_alive = self._channel.unary_unary(
            "/etcdserverpb.Lease/LeaseKeepAlive",
            request_serializer=rpc.LeaseKeepAliveRequest.SerializeToString,
            response_deserializer=rpc.LeaseKeepAliveResponse.FromString,
        )
        self._user, self._password = access.user, access.password
        self._token: Metadata | None = None
        self._token_lock = threading.Lock()
        self.closed = False
        #: Monotonic seconds of the newest answer, to whatever request.
        self.heard_at = 0.0

    def metadata(self, timeout_s: float) -> Metadata:
        """Credentials of a request; asks etcd for a token the first time."""
        if self._user is None:
            return ()
        with self._token_lock:
            if self._token is None:
                request = rpc.AuthenticateRequest(name=self._user, password=self._password)
                try:
                    answer = self.invoke(self._auth.Authenticate, request, timeout_s, ())
                except StoreError as error:
                    if "not enabled" not in str(error):
                        raise
                    log.warning("etcd at %s has no authentication enabled: going on without", self.endpoint)
                    self._token = ()
                else:
                    self._token = (("token", answer.token),)
            return self._token

    def forget_token(self) -> None:
        """Authenticates again before the next request."""
        with self._token_lock:
            self._token = None

    def invoke(self, method: Any, request: Any, timeout_s: float, metadata: Metadata) -> Any:
        """One attempt of one unary request. Raises as :meth:`translate` says."""
        try:
            answer = method(request, timeout=timeout_s, metadata=metadata)
        except (grpc.RpcError, ValueError) as error:
            raise self.translate(error) from error
        self.heard_at = time.monotonic()
        return answer

    def translate(self, error: BaseException) -> Exception:
        """The error of this package for one of gRPC's (which raises ``ValueError`` for a closed channel)."""
        if isinstance(error, ValueError):
            if self.closed:
                return Broken("the channel was closed")
            return StoreError(f"gRPC refuses the request to {self.endpoint}: {error}")
        code, details = error.code(), str(error.details() or "")  # type: ignore[attr-defined]
        message = f"{code.name.lower().replace('_', ' ')}: {details}"
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return Silent(message)
        if code in _BROKEN:
            return Broken(message)
        if "invalid auth token" in details or "revision of auth store is old" in details or "auth: revision" in details:
            return StaleToken(message)
        if "requested lease not found" in details:
            return LeaseExpired("etcd does not know the lease (any more); its keys are gone too")
        if "authentication failed" in details:
            return StoreError(
                f"etcd at {self.endpoint} refuses the user {self._user!r} or the password; check {ENV_USER} and "
                f"{ENV_PASSWORD}"
            )
        if code is grpc.StatusCode.UNKNOWN or "not leader" in details:
            return Broken(message)  # a member of a cluster that cannot reach the leader, or has lost its place
        if "user name is empty" in details:
            message += f"; set {ENV_USER} and {ENV_PASSWORD}"
        elif "permission denied" in details:
            message += f"; a role of the user {self._user!r} must allow to read and write all keys of the job"
        return StoreError(f"etcd at {self.endpoint} refuses the request: {message}")

    def close(self) -> None:
        """Cancels everything in flight and closes the socket."""
        self.closed = True
        self._channel.close()


@dataclass(frozen=True)
class EtcdAnswer:
    """An answer of etcd.

    Attributes:
        message: the response.
        ambiguous: whether an earlier attempt broke, so that the request may have been carried out twice.
    """

    message: Any
    ambiguous: bool


class EtcdConnection:
    """The current :class:`Link`, replaced by one to the next endpoint when it breaks. Thread-safe."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        access: Credentials,
        timeout_s: float,
    ) -> None:
        self.endpoints = tuple(endpoints)
        self.timeout_s = timeout_s
        # So that one silent endpoint leaves time to try each of them, and itself again.
        self._attempt_s = max(_ATTEMPT_S, timeout_s / (len(self.endpoints) + 1))
        self._access = access
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._next = 0
        self.closed = threading.Event()

    @property
    def where(self) -> str:
        """All endpoints, for messages."""
        return ", ".join(str(endpoint) for endpoint in self.endpoints)

    def link(self) -> Link:
        """The current link; raises :class:`StoreError` if the store is closed."""
        with self._lock:
            if self.closed.is_set():
                raise StoreError("the store is closed")
            if self._link is None:
                self._link = Link(self.endpoints[self._next % len(self.endpoints)], self._access)
            return self._link

    def abandon(self, link: Link, why: object) -> None:
        """``link`` is broken: close it, and let the next user connect to the next endpoint."""
        with self._lock:
            if self._link is not link:
                return
            self._link = None
            self._next += 1
        if not self.closed.is_set():
            log.info("lost etcd at %s (%s)", link.endpoint, why)
        link.close()

    def attempt(self, link: Link, method: Callable[[Link], Any], request: Any, timeout_s: float) -> Any:
        """One try; ``link`` is abandoned if broken. Raises :class:`Broken` or :class:`StoreError`.

        A link with another answer meanwhile is slow, not broken: its watches go on.
        """
        begin = time.monotonic()
        deadline = begin + timeout_s
        try:
            try:
                return link.invoke(method(link), request, timeout_s, link.metadata(timeout_s))
            except StaleToken:
                link.forget_token()
                left = max(0.1, deadline - time.monotonic())
                return link.invoke(method(link), request, left, link.metadata(left))
        except StaleToken as error:
            raise StoreError(f"etcd at {link.endpoint} refuses a fresh token: {error}") from error
        except Broken as error:
            if not (isinstance(error, Silent) and link.heard_at >= begin):
                self.abandon(link, error)
            raise

    def call(self, method: Callable[[Link], Any], request: Any) -> EtcdAnswer:
        """Sends ``request``, over all endpoints in turn, until answered or ``timeout_s`` has passed.

        Raises :class:`StoreUnavailable` then, :class:`StoreError` for a refusal.
        """
        deadline = time.monotonic() + self.timeout_s
        ambiguous = False
        last: Broken | None = None

        def once() -> Any:
            nonlocal ambiguous, last
            left = deadline - time.monotonic()
            if left <= 0:
                raise last or Broken("no time left")
            try:
                return self.attempt(self.link(), method, request, min(left, self._attempt_s))
            except Broken as error:
                ambiguous = True
                if last is None or not isinstance(error, Silent):  # that time was up says less than what was refused
                    last = error
                raise

        retrying = Retrying(
            retry=retry_if_exception_type(Broken),
            stop=stop_after_delay(self.timeout_s),
            wait=self._backoff,
            sleep=sleep_using_event(self.closed),
            reraise=True,
        )
        try:
            return EtcdAnswer(retrying(once), ambiguous)
        except Broken as error:
            if self.closed.is_set():
                raise StoreError("the store is closed") from error
            raise StoreUnavailable(
                f"etcd did not answer within {self.timeout_s:g} s at {self.where} (last: {last or error}); "
                f"check that it runs and that {ADDRESSES} is right"
                f"{_advice(str(last or error), self._access.own is not None)}"
            ) from error

    def _backoff(self, state: RetryCallState) -> float:
        """Seconds to wait: none before another endpoint is tried, longer from round to round."""
        return 0.0 if state.attempt_number % len(self.endpoints) else _BACKOFF(state)

    def close(self) -> None:
        """Cancels everything in flight; no request works afterwards. Idempotent."""
        with self._lock:
            self.closed.set()
            link, self._link = self._link, None
        if link is not None:
            link.close()


def _advice(error: str, own: bool = False) -> str:
    """Advice for ``error``, as the end of a sentence; empty if there is none.

    Args:
        own: whether the etcd that was asked is the job's own.
    """
    return next((f"; {cure}" for pattern, cure in (_OWN if own else _CURES) if re.search(pattern, error)), "")
