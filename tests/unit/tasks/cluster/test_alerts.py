from datetime import timedelta
from uuid import UUID

import pytest
from prefect.events.schemas.automations import Posture
from prefect.server.utilities.user_templates import render_user_template_sync

from engine.errors import BadInput
from tasks.cluster import alerts
from tasks.cluster.flow_run import CHAMPION, FINISHED, FOLDER

SECRET = "https://hooks.example.com/services/T0/secret"


@pytest.mark.parametrize(
    ("url", "given", "kind"),
    [
        *((f"https://{host}/hook/x", "", kind) for host, kind in alerts.HOSTS.items()),
        ("http://127.0.0.1:9/hook", "", "json"),
        ("http://proxy.internal/hook", "wecom", "wecom"),
    ],
)
def test_the_format_is_that_of_the_host_unless_one_is_given(url, given, kind):
    assert alerts.choose_format(url, given) == kind


@pytest.mark.parametrize(
    ("url", "given", "said"), [("hooks.slack.com/x", "", "--notify"), (SECRET, "teams", "--notify-format teams")]
)
def test_a_bad_address_or_format_is_refused_without_repeating_the_address(url, given, said):
    with pytest.raises(BadInput, match=said) as refused:
        alerts.choose_format(url, given)
    assert url not in str(refused.value)


@pytest.mark.parametrize("kind", alerts.FORMATS)
def test_the_address_is_a_secret_of_the_block(kind):
    block = alerts.webhook_block(SECRET, kind)
    assert SECRET not in block.model_dump_json()
    assert block.secrets.get_secret_value() == {"address": SECRET}


def test_each_message_has_the_reason_the_link_and_the_command():
    made = alerts.build_alerts(UUID(int=1), "http://ui", 20)
    assert len({one.name for one in made}) == 5
    for automation in made:
        [action] = automation.actions
        assert action.subject.startswith("Metronome: {{ ")
        assert action.block_document_id == UUID(int=1)
        what, link, command = action.body.splitlines()
        assert what.partition("|")[0] in ("{{ flow_run.state.message", "{{ event.payload.figures")
        assert link.startswith("http://ui/runs/flow-run/{{ ")
        given = {"id": 1, "labels": {FOLDER: "/shared/runs/night"}}
        payload = {"folder": "/shared/runs/night"}
        assert command_of(command, given, payload) == 'metronome logs "/shared/runs/night"'
        assert command_of(command, {"id": 1, "labels": {}}, {}) == "metronome runs"  # refused, or it has not begun


def command_of(command, run, payload):
    return render_user_template_sync(command, {"flow_run": run, "event": {"payload": payload}})


def test_an_alert_tells_of_what_happens_or_of_what_does_not():
    made = {one.name.partition(": ")[2]: one.trigger for one in alerts.build_alerts(UUID(int=1), "http://ui", 20)}
    events = {name: next(iter(one.expect)) for name, one in made.items() if one.posture == Posture.Reactive}
    assert events == {
        "a run has failed": "prefect.flow-run.Failed",
        "a run has finished": FINISHED,
        "a new champion": CHAMPION,
    }
    waits = made["a run waits for a worker"]
    assert (waits.posture, waits.within) == (Posture.Proactive, timedelta(minutes=20))
    assert {"prefect.flow-run.Pending", "prefect.flow-run.Late"} < waits.after
    crashed = made["a crashed run is not resumed"]
    assert waits.after < crashed.expect
    assert waits.for_each == crashed.for_each == {"prefect.resource.id"}


def test_the_text_of_an_error_calls_nobody_and_is_not_too_long_for_the_receiver():
    text = '<!channel> & <at user_id="all"></at> <@all> ' + "x" * 5000
    state = {"name": text[:40], "state": {"message": text}, "id": 1, "labels": {FOLDER: f"/shared/{text[:40]}"}}
    payload = {"run": text[:40], "folder": f"/shared/{text[:40]}", "figures": text, "policy": text[:40], "flow_run": 1}
    for automation in alerts.build_alerts(UUID(int=1), "http://ui", 20):
        [action] = automation.actions
        given = {"flow_run": state, "event": {"payload": payload}}
        body, subject = (render_user_template_sync(part, given) for part in (action.body, action.subject))
        assert "<" not in body + subject
        assert "channel" in body + subject
        assert len(f"{subject}\n{body}".encode()) < 2048
