"""Events of polyturn's own that automations listen to (Prefect's own tell of failures)."""

from __future__ import annotations

from prefect.events import emit_event

PROMOTED = "polyturn.model.promoted"


def promoted(*, name: str, version: int | str, alias: str) -> None:
    """Say that `alias` of the registered model `name` now names `version`."""
    emit_event(
        PROMOTED,
        resource={
            "prefect.resource.id": f"polyturn.model.{name}",
            "prefect.resource.name": name,
            "polyturn.version": str(version),
            "polyturn.alias": alias,
        },
        payload={"name": name, "version": str(version), "alias": alias},
    )
