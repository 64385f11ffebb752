import pytest

from engine.errors import BadInput
from engine.wire.access_token import access_token, authorization_headers, check_address, is_authorized


def test_the_header_that_is_sent_is_the_one_that_is_accepted():
    header = authorization_headers("s3cret")["Authorization"]
    assert is_authorized(header, "s3cret")
    assert is_authorized(header.encode(), "s3cret")
    assert authorization_headers(None) == {}


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        b"",
        "s3cret",
        "Bearer",
        "Bearer s3cre",
        "Bearer s3crets",
        "Basic s3cret",
        b"Bearer \xff",
        "Bearer \udcff",
        "Bearer ſ3cret",
        "Bearer s3cret s3cret",
        "BearerX s3cret",
    ],
)
def test_every_other_header_is_refused(header):
    assert not is_authorized(header, "s3cret")


def test_a_token_must_fit_a_header(monkeypatch):
    for value, token in (("", None), ("s3cret", "s3cret")):
        monkeypatch.setenv("METRONOME_TOKEN", value)
        assert access_token() == token
    monkeypatch.delenv("METRONOME_TOKEN")
    assert access_token() is None
    for value in ("a\nb", " a", "ä"):
        monkeypatch.setenv("METRONOME_TOKEN", value)
        with pytest.raises(BadInput, match="METRONOME_TOKEN"):
            access_token()


def test_only_a_token_opens_other_addresses():
    for host in ("127.0.0.1", "127.8.9.1", "localhost", "::1"):
        check_address(host, None)
    for host in ("0.0.0.0", "10.0.0.1", "::", "8.8.8.8"):
        with pytest.raises(BadInput, match=f"rollout.listen {host}: only loopback"):
            check_address(host, None, "rollout.listen")
        check_address(host, "s3cret")
    with pytest.raises(BadInput, match="expected an IP address"):
        check_address("example.org", "s3cret")
