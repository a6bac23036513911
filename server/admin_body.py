"""Bodies of requests on the admin port: small, JSON, and exactly one struct."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from fastapi import Request

from server.body import ClientDisconnected, read_body
from server.errors import ApiError

MAX_BODY_BYTES = 1 << 20
BODY_TIMEOUT_S = 10.0

Body = TypeVar("Body", bound=msgspec.Struct)


async def read_struct(request: Request, kind: type[Body], *, default: bytes = b"") -> Body:
    """The body as that struct, `default` standing for an empty one; raises ApiError saying what is wrong with it."""
    try:
        raw = await read_body(request.receive, request.scope["headers"], max_bytes=MAX_BODY_BYTES, timeout_s=BODY_TIMEOUT_S)
        if not raw and not default:
            names = ", ".join(field.encode_name for field in msgspec.structs.fields(kind))
            raise ApiError(400, f"the request has no body; send a JSON object with {names}", code="bad_body")
        return msgspec.json.decode(raw or default, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not a valid {kind.__name__}: {error}", code="bad_body") from None
    except ClientDisconnected:
        raise ApiError(400, "the client left before its request was complete", code="client_disconnected") from None
