"""Automations for Prefect's server: runs whose process is gone become Crashed; failures and promotions are told."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState, SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification

from flows.events import PROMOTED

HEARTBEAT_S = 30  # PREFECT_FLOWS_HEARTBEAT_FREQUENCY of the workers
_ENDS = ("Completed", "Failed", "Cancelled", "Crashed", "Cancelling", "AwaitingRetry", "Paused")
_RUN = ResourceSpecification.model_validate({"prefect.resource.id": "prefect.flow-run.*"})


def crash_the_silent(missed_s: float = 3 * HEARTBEAT_S) -> AutomationCore:
    """A run that has begun and then sends neither a heartbeat nor its end for `missed_s` is marked Crashed.

    Its worker and its process have gone together (power, memory, a deleted container): nobody else would tell.
    """
    beat = "prefect.flow-run.heartbeat"
    return AutomationCore(
        name="polyturn: silent runs have crashed",
        description="The process and the worker of a run are gone: it would stay Running for ever.",
        trigger=EventTrigger(
            match=_RUN,
            after={beat},
            expect={beat, *(f"prefect.flow-run.{state}" for state in _ENDS)},
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=missed_s),
        ),
        actions=[
            ChangeFlowRunState(
                state=StateType.CRASHED,
                force=False,
                name="Crashed",
                message=f"no sign of life for {missed_s:g} s: its worker and its process are gone",
            )
        ],
    )


def tell_of_failures(block: UUID) -> AutomationCore:
    """A notification when a run fails or crashes."""
    return AutomationCore(
        name="polyturn: a run failed",
        trigger=EventTrigger(
            match=_RUN,
            expect={"prefect.flow-run.Failed", "prefect.flow-run.Crashed"},
            posture=Posture.Reactive,
            threshold=1,
        ),
        actions=[
            SendNotification(
                block_document_id=block,
                subject="polyturn: {{ flow_run.name }} {{ flow_run.state.name }}",
                body="{{ flow_run.state.message }}\ntags: {{ flow_run.tags | join(', ') }}\n{{ flow_run | ui_url }}",
            )
        ],
    )


def tell_of_promotions(block: UUID) -> AutomationCore:
    """A notification when the champion moves (flows/events.py)."""
    return AutomationCore(
        name="polyturn: a model was promoted",
        trigger=EventTrigger(
            match=ResourceSpecification.model_validate({"prefect.resource.id": "polyturn.model.*"}),
            expect={PROMOTED},
            posture=Posture.Reactive,
            threshold=1,
        ),
        actions=[
            SendNotification(
                block_document_id=block,
                subject="polyturn: {{ event.payload.name }} has a new {{ event.payload.alias }}",
                body="version {{ event.payload.version }} of {{ event.payload.name }}",
            )
        ],
    )


def put(client: SyncPrefectClient, automations: Sequence[AutomationCore]) -> None:
    """Make the automations; those of the same name are replaced."""
    for automation in automations:
        for old in client.read_automations_by_name(automation.name):
            client.delete_automation(old.id)
        client.create_automation(automation)
