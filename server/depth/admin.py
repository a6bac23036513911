"""The admin route of depth control."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Response

from server.public import json_response
from wire.depth import DepthView


def depth_routes(view: Callable[[], DepthView]) -> APIRouter:
    """The one route."""
    router = APIRouter()

    @router.get("/admin/depth")
    async def get_depth() -> Response:
        """Each engine's K by batch size, what every K would bring, and what is measured of that."""
        return json_response(view())

    return router
